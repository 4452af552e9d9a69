"""Triton kernels over compressed pages that the compressed formats share."""
