"""From the metadata of a GGUF file of the Llama architecture to `ModelConfig`."""

from collections.abc import Mapping
from typing import Any

from gguf import GGUFReader, ReaderTensor

from runtime.checkpoint.facts import count, number, token_ids
from runtime.config import ModelConfig, RopeConfig
from runtime.errors import CheckpointError

EMBEDDING_NAME = "token_embd.weight"
OUTPUT_NAME = "output.weight"
ROPE_DIVISORS = "rope_freqs.weight"

_READ = ("general.architecture", "llama.", "tokenizer.ggml.eos", "tokenizer.ggml.eot")


def read_config(file: GGUFReader, tensors: Mapping[str, ReaderTensor]) -> ModelConfig:
    """The model's shape, from metadata and from which tensors there are.

    Raises `CheckpointError` for other architectures and for what is missing or malformed.
    """
    try:
        facts: dict[str, Any] = {
            name: field.contents()
            for name, field in file.fields.items()
            if field.data and name.startswith(_READ)
        }
    except ValueError as error:
        raise CheckpointError(f"the GGUF metadata cannot be read: {error}") from error
    architecture = facts.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"GGUF architecture {architecture!r} is not supported, only 'llama'")
    if facts.get("llama.expert_count"):
        raise CheckpointError("GGUF mixture-of-experts models are not supported")
    heads = count(facts, "llama.attention.head_count")
    hidden = count(facts, "llama.embedding_length")
    kv_heads = count(facts, "llama.attention.head_count_kv", heads)
    head_dim = count(facts, "llama.attention.key_length", hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} query heads cannot share {kv_heads} KV heads")
    if count(facts, "llama.rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise CheckpointError("a rotary embedding over a part of the head is not supported")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=_vocabulary(tensors),
        hidden_size=hidden,
        intermediate_size=count(facts, "llama.feed_forward_length"),
        num_layers=_layers(facts, tensors),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=count(facts, "llama.context_length"),
        rms_norm_eps=number(facts, "llama.attention.layer_norm_rms_epsilon"),
        tied_embeddings=OUTPUT_NAME not in tensors,
        rope=_rope(facts, tensors, head_dim),
        eos_token_ids=_eos(facts),
    )


def _vocabulary(tensors: Mapping[str, ReaderTensor]) -> int:
    embedding = tensors.get(EMBEDDING_NAME)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"the checkpoint has no matrix {EMBEDDING_NAME}")
    return int(embedding.shape[1])


def _layers(facts: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> int:
    layers = count(facts, "llama.block_count")
    if layers > len(tensors):
        raise CheckpointError(f"the config has {layers} layers, the file {len(tensors)} tensors")
    return layers


def _rope(
    facts: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], head_dim: int
) -> RopeConfig:
    theta = number(facts, "llama.rope.freq_base", 10_000.0)
    divisors: tuple[float, ...] = ()
    if ROPE_DIVISORS in tensors:
        divisors = tuple(float(divisor) for divisor in tensors[ROPE_DIVISORS].data)
        if len(divisors) != head_dim // 2:
            raise CheckpointError(
                f"{ROPE_DIVISORS} has {len(divisors)} values, not {head_dim // 2}"
            )
    match facts.get("llama.rope.scaling.type", "none"):
        case "none":
            return RopeConfig(theta=theta, frequency_divisors=divisors)
        case "linear":
            return RopeConfig(
                theta=theta,
                scaling="linear",
                factor=number(facts, "llama.rope.scaling.factor"),
                frequency_divisors=divisors,
            )
        case other:
            raise CheckpointError(f"GGUF rope scaling {other!r} is not supported")


def _eos(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The end of the text and the end of a turn: either ends an answer."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(sorted(set().union(*(token_ids(facts, key) for key in keys))))
