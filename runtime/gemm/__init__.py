"""Matrix products on a GPU: plan, packed weights, epilogues and kernels."""
