"""Just-in-time compilation of CPU loops, and register-tiled GEMM micro-kernels for them."""
