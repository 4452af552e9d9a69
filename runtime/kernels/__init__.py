"""Definitions shared by the Triton kernels of several packages, and the version of all kernels."""

VERSION = 13
"""Version of the kernels' results, part of the kernel plan's hash. Increment it whenever a kernel's
results for some model are no longer bitwise identical to those of the previous version."""
