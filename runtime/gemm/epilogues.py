"""Epilogues of a GEMM: what is computed from its output before it is stored."""

from enum import IntEnum

from runtime.gemm.kernels import small_m


class Epilogue(IntEnum):
    """What a GEMM does with its output.

    Attributes:
        PLAIN: store it.
        RESIDUAL: add it to the residual stream, in place.
        GATED: store the SiLU of the first matrix's output times that of the second.
    """

    PLAIN = small_m.PLAIN.value
    RESIDUAL = small_m.RESIDUAL.value
    GATED = small_m.GATED.value
