"""Triton kernels of attention over paged KV."""
