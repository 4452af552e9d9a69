"""Limits on the tokens that a layer computes at once on a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Passes:
    """Maximum tokens that a layer computes at once. They determine the memory of activations.

    Attributes:
        attention_tokens: maximum tokens that attention, with its linears, computes at once, unless
            a single input has more.
        mlp_tokens: maximum tokens that the MLP computes at once. A fused MLP computes all.
        fused_mlp: whether the MLP of factor pairs is computed in rank space where that is supported
            and fills the GPU.
    """

    attention_tokens: int = 8192
    mlp_tokens: int = 5632
    fused_mlp: bool = True
