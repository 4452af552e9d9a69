"""Matrix products on a GPU: plan, packed weights, epilogues, kernels and their reference."""
