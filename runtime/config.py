"""The shape of a model, independent of its file format."""

from dataclasses import dataclass, field
from typing import Literal, Self


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        scaling: Hugging Face's ``rope_type``. ``linear`` divides positions by ``factor``,
            ``llama3`` interpolates low frequencies, ``yarn`` ramps between interpolation and
            extrapolation, ``longrope`` divides each frequency by a factor of its own. ``none``:
            heads are not rotated, because the model encodes positions in another way.
        factor: ratio of the extended context to the original one.
        original_context: context length in tokens before scaling (``llama3``, ``yarn``,
            ``longrope``).
        low_freq_factor, high_freq_factor: bounds of ``llama3``. Wavelengths above
            ``original_context / low_freq_factor`` are interpolated, those below ``original_context
            / high_freq_factor`` are kept.
        beta_fast, beta_slow: ends of the ramp of ``yarn``, as numbers of rotations within the
            original context.
        attention_factor: factor by which ``yarn`` and ``longrope`` multiply cosines and sines.
        truncate: whether ``yarn`` rounds the ends of the ramp to whole dimensions.
        frequency_divisors: divisors of the frequencies, ``[head_dim / 2]``, applied before any
            scaling; empty if there are none. GGUF files store the interpolation of Llama 3 in this
            form.
        short_factor, long_factor: divisors of the frequencies in ``longrope``, ``[head_dim / 2]``.
            For sequences of all lengths, ``long_factor`` is used if the context length of the model
            is above ``original_context``, else ``short_factor``.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder model.

    Attributes:
        architecture: value of ``architectures`` in config.json; determines the model family.
        intermediate_size: width of the MLP.
        context_length: maximum number of tokens in a sequence, including prompt and output.
        rms_norm_eps: epsilon of all norms of the model, also in families that use LayerNorm.
        tied_embeddings: whether the LM head and the token embedding are the same matrix.
        eos_token_ids: tokens that end the output.
        windows: for each layer, the number of last tokens that a token attends to, itself included,
            or None for all; empty if no layer has a sliding window.
        first_kv_head: index of this rank's first KV head among the KV heads of all ranks; 0 for a
            whole model.
        whole: shape of the whole model, if this is the shape of a rank's part; else None.

    Raises:
        ValueError: ``windows`` has a wrong length, or a window is empty.
    """

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
    windows: tuple[int | None, ...] = ()
    first_kv_head: int = 0
    whole: Self | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows of {self.windows} tokens: they must be at least 1")

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None if it has none."""
        return self.windows[layer] if self.windows else None

    @property
    def kv_heads(self) -> range:
        """KV heads of this part, counted over all ranks."""
        return range(self.first_kv_head, self.first_kv_head + self.num_kv_heads)

    @property
    def all_kv_heads(self) -> int:
        """Number of KV heads of the whole model."""
        return (self.whole or self).num_kv_heads


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Shape of an encoder: bidirectional attention, learned positions, post-norm layers.

    ``context_length`` is the maximum number of tokens of an input, special tokens included.
    ``num_kv_heads`` equals ``num_heads``, and there is no LM head.

    Attributes:
        token_types: number of token types (segments).
        first_position: number of rows of the position embeddings before that of the first token:
            0 for BERT, the id of the padding token plus 1 for RoBERTa.
        activation: activation of the MLP: ``gelu`` with the error function, or its approximation
            with tanh.
        labels: outputs of the classification head; 0 for a model without one.
    """

    token_types: int
    first_position: int = 0
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    labels: int = 0
