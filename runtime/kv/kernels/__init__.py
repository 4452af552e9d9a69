"""Triton kernels over stored pages that the compressed formats share."""
