"""Sampling: the reference, and an equivalent sampler on the device for CUDA graphs."""
