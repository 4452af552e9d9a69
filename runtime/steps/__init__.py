"""How a step is computed: directly, or by replaying CUDA graphs."""
