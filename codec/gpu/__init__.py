"""GPU backend: launch plans and Triton kernels."""
