"""Triton and Gluon kernels of encoders."""
