"""GEMM kernels: Triton for few tokens, Gluon with warp specialization for many."""
