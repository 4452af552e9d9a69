"""Peers of the benchmarks: transformers models with the weights of a checkpoint.

Decode steps use a `StaticCache`, eager or with `torch.compile(mode="reduce-overhead")`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.checkpoint.weights import Checkpoint, Dense, linears_of
from runtime.models.llama import PROJECTIONS


def build(checkpoint: Checkpoint) -> Any:
    """Build a transformers Llama that shares the checkpoint's tensors.

    A factor pair becomes two linear layers. Raises ValueError for another architecture.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = checkpoint.config
    if config.architecture != "LlamaForCausalLM" or config.rope.scaling != "default":
        raise ValueError(
            f"the peer supports LlamaForCausalLM with default RoPE scaling, not "
            f"{config.architecture} with {config.rope.scaling}"
        )
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.context_length,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                tie_word_embeddings=False,
            )
        )
    device = checkpoint.embedding.device
    model.model.embed_tokens.weight = _parameter(checkpoint.embedding)
    model.model.norm.weight = _parameter(checkpoint.final_norm)
    model.lm_head.weight = _parameter(checkpoint.lm_head)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    for layer, weights in zip(model.model.layers, checkpoint.layers, strict=True):
        layer.input_layernorm.weight = _parameter(weights.input_norm)
        layer.post_attention_layernorm.weight = _parameter(weights.post_norm)
        for name, linear in linears_of(weights):
            parent, _, child = PROJECTIONS[name].rpartition(".")
            if isinstance(linear, Dense):
                module: nn.Module = _linear(linear.weight)
            else:
                module = nn.Sequential(_linear(linear.v), _linear(linear.u))
            setattr(layer.get_submodule(parent), child, module)
    return model.eval()


@dataclass(frozen=True)
class PeerStep:
    """A decode step of transformers.

    Attributes:
        run: function that computes the step and returns the greedy tokens, `[batch]`.
        reset: function that restores the cache length, so that every step has the same context.
    """

    run: Callable[[], Tensor]
    reset: Callable[[], None]


def decode_step(model: Any, context: int, batch: int, *, compiled: bool) -> PeerStep:
    """Return a step of ``batch`` sequences with ``context`` tokens each."""
    from transformers import StaticCache

    device = model.lm_head.weight.device
    cache = StaticCache(config=model.config, max_cache_len=context + 8)
    prompt = torch.ones(batch, context, dtype=torch.int64, device=device)
    forward = torch.compile(model, mode="reduce-overhead") if compiled else model
    token = torch.ones(batch, 1, dtype=torch.int64, device=device)
    position = torch.full((batch, 1), context, device=device)
    model(prompt, None, None, cache, use_cache=True, logits_to_keep=1)

    def run() -> Tensor:
        output = forward(token, None, position, cache, use_cache=True)
        tokens: Tensor = output.logits[:, -1].argmax(-1)
        return tokens

    def reset() -> None:
        for layer in cache.layers:
            # Only newer versions of transformers have this attribute.
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, Tensor):
                length.fill_(context)

    return PeerStep(run, reset)


def cached(model: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that appends tokens, `[batch, n]`, to a new KV cache of ``model``.

    The function returns the logits of the last token, `[batch, 1, vocabulary]`.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)

    def forward(tokens: Tensor) -> Tensor:
        # By position: the keyword of the cache was renamed within version 5 of transformers.
        logits: Tensor = model(tokens, None, None, cache, use_cache=True, logits_to_keep=1).logits
        return logits

    return forward


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = _parameter(weight)
    return linear
