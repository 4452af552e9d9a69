"""Rotary position embedding (RoPE): frequencies and cos/sin tables for all supported scalings.

Pairs follow the rotate-half convention: dimensions ``i`` and ``i + head_dim / 2`` rotate together.
All arithmetic is in fp32, including position times frequency, as in the models' reference
implementations.
"""

import math

import torch
from torch import Tensor

from runtime.config import ModelConfig, RopeConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the radians per position of each pair of dimensions, fp32 ``[head_dim / 2]``."""
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_divisors:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    match rope.scaling:
        case "none":
            return torch.zeros_like(frequencies)
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)
        case "yarn":
            return _yarn(frequencies, rope, config.head_dim)
        case "longrope":
            long = config.context_length > rope.original_context
            divisors = torch.tensor(rope.long_factor if long else rope.short_factor)
            return 1.0 / (divisors * rope.theta**exponents)


def cos_sin_table(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions ``0 … length - 1``, fp32 ``[length, head_dim / 2]``.

    Both include the attention factor of YaRN and LongRoPE, so that q·k is scaled by its square.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config))
    return angles.cos() * config.rope.attention_factor, angles.sin() * config.rope.attention_factor


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Apply Llama 3.1 scaling: divide low frequencies, keep high ones, interpolate in between."""
    wavelengths = 2 * math.pi / frequencies
    blend = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Apply YaRN scaling (arXiv 2309.00071, section 3.2).

    Dimensions with few rotations in the original context are interpolated, those with many are
    kept.
    """

    def dimension_of(rotations: float) -> float:
        spread = math.log(rope.original_context / (rotations * 2 * math.pi))
        return head_dim * spread / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(head_dim // 2) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * interpolated + frequencies * (1 - interpolated)
