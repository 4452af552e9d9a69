"""Engine steps that replay CUDA graphs."""
