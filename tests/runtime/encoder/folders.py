"""Folders of tiny random encoders as transformers and sentence-transformers write them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BertConfig, RobertaConfig, XLMRobertaConfig

from runtime.encoder import EncoderInput

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 90,
    "type_vocab_size": 2,
    # Larger than in trained models, so that a missing term changes results.
    "initializer_range": 0.3,
}
CONFIGS = {"Bert": BertConfig, "Roberta": RobertaConfig, "XLMRoberta": XLMRobertaConfig}
LENGTHS = (1, 2, 17, 63, 64, 65, 80)


def write_encoder(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> Any:
    """Save a random model of an architecture such as ``BertModel``, and return it.

    Norms and biases are random, too.
    """
    family = next(name for name in reversed(CONFIGS) if architecture.startswith(name))
    transformers.set_seed(seed)
    transformers.logging.disable_progress_bar()
    model = getattr(transformers, architecture)(CONFIGS[family](**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def write_modules(
    folder: Path, pooling: Mapping[str, Any], *, normalize: bool = False, more: Sequence[str] = ()
) -> None:
    """Write ``modules.json`` and the config of the pooling.

    Args:
        more: names of further modules.
    """
    names = ["Transformer", "Pooling", *more, *(["Normalize"] if normalize else [])]
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def random_inputs(
    lengths: Sequence[int] = LENGTHS, *, typed: bool = False, seed: int = 0
) -> list[EncoderInput]:
    """Return inputs of random tokens; ``typed`` ones have two token types."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        tokens = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        types = tuple(int(at > length // 2) for at in range(length)) if typed else ()
        found.append(EncoderInput(tuple(tokens), types))
    return found


def peer_inputs(each: EncoderInput) -> dict[str, torch.Tensor]:
    """Return the arguments of a model of transformers for one input."""
    types = each.types or (0,) * len(each.tokens)
    return {
        "input_ids": torch.tensor([each.tokens]),
        "token_type_ids": torch.tensor([types]),
        "attention_mask": torch.ones(1, len(each.tokens), dtype=torch.int64),
    }
