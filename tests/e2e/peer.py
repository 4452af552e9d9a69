"""Baseline of `tests.e2e.bench`: transformers with the same weights, in a separate process."""

import json
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.checkpoint import load_checkpoint
from runtime.checkpoint.weights import Checkpoint, Dense, Linear
from services.common.model_source import resolve_model

PREFILL_TOKENS, DECODE_PROMPT, DECODE_TOKENS, REPEATS = 512, 128, 48, 3


def build(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """Build a transformers model with the same dense fp32 weights."""
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.context_length,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope.theta,
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    state = {
        "model.embed_tokens.weight": checkpoint.embedding,
        "lm_head.weight": checkpoint.lm_head,
    }
    state["model.norm.weight"] = checkpoint.final_norm
    for number, layer in enumerate(checkpoint.layers):
        prefix = f"model.layers.{number}."
        state[f"{prefix}input_layernorm.weight"] = layer.input_norm
        state[f"{prefix}post_attention_layernorm.weight"] = layer.post_norm
        for name in ("q", "k", "v", "o"):
            state[f"{prefix}self_attn.{name}_proj.weight"] = _weight(getattr(layer, name))
        for name in ("gate", "up", "down"):
            state[f"{prefix}mlp.{name}_proj.weight"] = _weight(getattr(layer, name))
    model.load_state_dict(state, strict=True)
    return model.eval()


def _weight(linear: Linear) -> torch.Tensor:
    if not isinstance(linear, Dense):
        raise TypeError("the peer supports dense models only")
    return linear.weight


@torch.inference_mode()
def measure(model: LlamaForCausalLM) -> dict[str, float]:
    """Return the seconds of a 512-token prefill and the tokens/s of greedy decode, medians of 3."""
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size
    prompt = torch.randint(vocab, (1, PREFILL_TOKENS), generator=generator)
    prefill, decode = [], []
    model(prompt[:, :DECODE_PROMPT])
    for _ in range(REPEATS):
        start = time.perf_counter()
        model(prompt, logits_to_keep=1)
        prefill.append(time.perf_counter() - start)
        output = model(prompt[:, :DECODE_PROMPT], use_cache=True, logits_to_keep=1)
        cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for _ in range(DECODE_TOKENS):
            output = model(token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
        decode.append(DECODE_TOKENS / (time.perf_counter() - start))
    return {
        "prefill_s": statistics.median(prefill),
        "decode_tokens_per_s": statistics.median(decode),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    peer = build(load_checkpoint(resolve_model("smollm2-135m")))
    print(json.dumps(measure(peer)))  # noqa: T201
