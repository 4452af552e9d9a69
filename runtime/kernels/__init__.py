"""Definitions shared by the Triton kernels of several rooms, and the version of all kernels."""

VERSION = 5
"""Version of the kernels' results, part of the kernel plan's hash. Increment it whenever the
results of a kernel change by a bit for some model."""
