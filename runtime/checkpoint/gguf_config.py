"""Read a `ModelConfig` from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

from gguf import GGUFReader, ReaderTensor

from runtime.checkpoint.config_values import (
    checked_rope,
    count,
    number,
    refuse_unsupported,
    token_ids,
)
from runtime.checkpoint.family import CheckpointFamily, GGUFFormat, family_of_gguf
from runtime.config import ModelConfig, RopeConfig
from runtime.errors import CheckpointError

EMBEDDING_NAME = "token_embd.weight"
OUTPUT_NAME = "output.weight"
ROPE_DIVISORS = "rope_freqs.weight"

_ARCHITECTURE = "general.architecture"
_FILE_KEYS = ("general.type", "split.count")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "split.count": (0, 1),
    **dict.fromkeys(("expert_count", "attention.scale", "attention.clamp_kqv"), (0,)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.alpha": (0, 1),
    "use_parallel_residual": (False,),
}
"""For each key that may change the computation or the set of files: its values without effect."""
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def read_family(file: GGUFReader) -> CheckpointFamily:
    """Return the model family of a file. Raises `CheckpointError` if no family supports it."""
    return family_of_gguf(_metadata(file, _ARCHITECTURE).get(_ARCHITECTURE))


def read_config(
    file: GGUFReader, tensors: Mapping[str, ReaderTensor], file_format: GGUFFormat
) -> ModelConfig:
    """Return the model's shape, from the metadata and the names and shapes of tensors.

    Raises:
        CheckpointError: a value is missing, malformed or not supported.
    """
    prefix = f"{file_format.general_architecture}."
    metadata = {
        key.removeprefix(prefix): value
        for key, value in _metadata(file, prefix, *_EOS_KEYS, *_FILE_KEYS).items()
    }
    heads = count(metadata, "attention.head_count")
    hidden = count(metadata, "embedding_length")
    kv_heads = count(metadata, "attention.head_count_kv", heads)
    head_dim = count(metadata, "attention.key_length", hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} query heads cannot share {kv_heads} KV heads")
    if count(metadata, "rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise CheckpointError("rotary embedding of only part of the head is not supported")
    refuse_unsupported(metadata, {**_NEUTRAL, "attention.value_length": (head_dim,)})
    length = count(metadata, "context_length")
    return ModelConfig(
        architecture=file_format.architecture,
        vocab_size=_vocabulary(metadata, tensors),
        hidden_size=hidden,
        intermediate_size=count(metadata, "feed_forward_length"),
        num_layers=_layers(metadata, tensors),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=min(length, count(metadata, "attention.sliding_window", length)),
        rms_norm_eps=number(metadata, "attention.layer_norm_rms_epsilon"),
        tied_embeddings=OUTPUT_NAME not in tensors,
        rope=checked_rope(_rope(metadata, tensors), head_dim),
        eos_token_ids=_eos(metadata),
    )


def _metadata(file: GGUFReader, *prefixes: str) -> dict[str, Any]:
    try:
        return {
            name: field.contents()
            for name, field in file.fields.items()
            if field.data and name.startswith(prefixes)
        }
    except ValueError as error:
        raise CheckpointError(f"the GGUF metadata cannot be read: {error}") from error


def _vocabulary(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> int:
    embedding = tensors.get(EMBEDDING_NAME)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"the checkpoint has no matrix {EMBEDDING_NAME}")
    rows = int(embedding.shape[1])
    if count(metadata, "vocab_size", rows) != rows:
        raise CheckpointError(
            f"{EMBEDDING_NAME} has {rows} rows, but vocab_size is {metadata['vocab_size']}"
        )
    return rows


def _layers(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> int:
    layers = count(metadata, "block_count")
    if layers > len(tensors):
        raise CheckpointError(f"the config has {layers} layers, the file {len(tensors)} tensors")
    return layers


def _rope(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> RopeConfig:
    """Return the rotary embedding. As in llama.cpp, a factor without a type scales linearly."""
    theta = number(metadata, "rope.freq_base", 10_000.0)
    divisors: tuple[float, ...] = ()
    if ROPE_DIVISORS in tensors:
        divisors = tuple(float(divisor) for divisor in tensors[ROPE_DIVISORS].data.ravel())
    scaling = metadata.get("rope.scaling.type", "linear")
    if scaling not in ("none", "linear"):
        raise CheckpointError(f"GGUF rope scaling {scaling!r} is not supported")
    old_key = number(metadata, "rope.scale_linear", 0.0)
    factor = number(metadata, "rope.scaling.factor", old_key) or 1.0  # 0 stands for no scaling
    if scaling == "none" or factor == 1.0:
        return RopeConfig(theta=theta, frequency_divisors=divisors)
    return RopeConfig(theta, scaling="linear", factor=factor, frequency_divisors=divisors)


def _eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a text or a chat turn; each of them ends the output."""
    return tuple(sorted(set().union(*(token_ids(metadata, key) for key in _EOS_KEYS))))
