"""Triton kernels of the runtime. Callers prepare shapes and strides; references stand beside."""

VERSION = 4
"""Of what they compute, bit for bit: counted up with every change of a result."""
