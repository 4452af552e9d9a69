"""Triton kernels of wire version 2. `codec.cuda` prepares their arguments and launches them."""

from codec.kernels.checksum import TOTALS, digest_kernel, sum_kernel
from codec.kernels.decode import decode_kernel, verify_kernel
from codec.kernels.encode import encode_kernel, seal_kernel
from codec.kernels.words import GROUP

__all__ = [
    "GROUP",
    "TOTALS",
    "decode_kernel",
    "digest_kernel",
    "encode_kernel",
    "seal_kernel",
    "sum_kernel",
    "verify_kernel",
]
