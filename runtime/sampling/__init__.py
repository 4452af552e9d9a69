"""Sampling: the reference, and the same on the device under CUDA graphs."""
