"""Definitions shared by the Triton kernels of several rooms, and the version of all kernels."""

VERSION = 5
"""Version of the kernels' results, part of the kernel plan's hash. Increment it whenever any
kernel returns other bits for some model."""
