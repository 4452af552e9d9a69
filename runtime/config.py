"""What a model of the Llama family is, independent of the file it came from."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. ``scaling`` is the Hugging Face ``rope_type``.

    ``linear`` divides positions by ``factor``; ``llama3`` interpolates low frequencies
    (``low_freq_factor``, ``high_freq_factor``, ``original_context``); ``yarn`` ramps between
    interpolation and extrapolation (``beta_fast``, ``beta_slow``; ``truncate`` rounds the ramp's
    ends to whole dimensions) and scales cos and sin by ``attention_factor``.
    ``frequency_divisors`` ``[head_dim / 2]``, where not empty, divide the frequencies before any
    scaling: GGUF files store Llama 3's interpolation so.
    """

    theta: float = 10_000.0
    scaling: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder (Llama 2/3, Mistral, Qwen2, Qwen3)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    tied_embeddings: bool
    rope: RopeConfig = field(default_factory=RopeConfig)
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads
