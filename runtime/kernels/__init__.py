"""Triton kernels of the runtime. Callers prepare shapes and strides; references stand beside."""
