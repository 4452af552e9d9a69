"""Tiny GGUF files."""

import re
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, HEADS, KV_HEADS = 64, 4, 2
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_model(tied: bool) -> Any:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


BF16 = gguf.GGMLQuantizationType.BF16


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return rows in GGUF's order for Llama: the halves of each head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(
    model: Any,
    path: Path,
    changes: dict[str, Any] | None = None,
    *,
    architecture: str = "llama",
    quantize: Any = None,
    vocabulary: int = 0,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Write a GGUF file; ``changes`` maps tensor names to new tensors, or to None to omit one."""
    changes = dict(changes or {})
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_eos_token_id(9)
    writer.add_eot_token_id(11)
    for key, metadatum in (metadata or {}).items():
        writer.add_key_value(key, metadatum, gguf.GGUFValueType.get_type(metadatum))
    if vocabulary:
        writer.add_token_list([f"token {index}" for index in range(vocabulary)])
        writer.add_token_types([1] * vocabulary)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    for name, tensor in state.items():
        layer, inner = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.weight", name).groups()  # type: ignore[union-attr]
        own = f"blk.{layer}.{NAMES[inner]}.weight" if layer else f"{NAMES[inner]}.weight"
        if inner.endswith(("q_proj", "k_proj")):
            query = inner.endswith("q_proj")
            heads = config.num_attention_heads if query else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        value = changes.pop(own, tensor.numpy())
        if value is None:
            continue
        if quantize is not None and (value.ndim == 2 or quantize == BF16):
            writer.add_tensor(own, gguf.quantize(value, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(own, value)
    for own, value in changes.items():
        writer.add_tensor(own, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
