"""Epilogues of a GEMM: operations fused with the store of its output."""

from enum import IntEnum

from runtime.gemm.kernels import small_m


class Epilogue(IntEnum):
    """Operation fused with the store of a GEMM's output.

    Attributes:
        PLAIN: store the output.
        RESIDUAL: add the output to the residual stream, in place.
        GATED: store SiLU(a) * b, with the outputs a and b of the first and the second matrix.
    """

    PLAIN = small_m.PLAIN.value
    RESIDUAL = small_m.RESIDUAL.value
    GATED = small_m.GATED.value
