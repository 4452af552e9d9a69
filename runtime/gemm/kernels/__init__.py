"""Triton and Gluon GEMM kernels."""
