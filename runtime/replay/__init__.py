"""Prefill and decode under CUDA graphs."""
