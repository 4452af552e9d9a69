"""Grouped GEMMs on a GPU: kernel plan, packed weights, epilogues, kernels and their reference."""
