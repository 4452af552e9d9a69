"""CPU backend: loops compiled by numba."""
