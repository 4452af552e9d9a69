"""Computation of a step: directly, or by replaying CUDA graphs."""
