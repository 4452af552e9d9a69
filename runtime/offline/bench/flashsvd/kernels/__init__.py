"""Triton kernels that compute in rank space."""
