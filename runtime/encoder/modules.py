"""The modules after the transformer of a sentence-transformers folder.

``modules.json`` lists them: a Transformer, a Pooling with a folder for its ``config.json``, and
optionally Dense and Normalize modules. As in sentence-transformers, a folder without that file has
mean pooling, or last-token pooling if the model is a decoder.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.checkpoint.config_values import count, flag
from runtime.checkpoint.safetensors_file import SafetensorsDirectory, read_json
from runtime.errors import CheckpointError

MODULES = "modules.json"
_CONFIG = "config.json"
_DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"


class Pooling(StrEnum):
    """Reduction of the hidden states of an input's tokens to one vector.

    Attributes:
        CLS: that of the first token.
        MEAN: their mean.
        MAX: the largest value of each dimension.
        MEAN_SQRT_LEN: their sum over the square root of the number of tokens.
        LAST_TOKEN: that of the last token.
    """

    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    LAST_TOKEN = "lasttoken"


_MODE_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of a pooling module before sentence-transformers 6, in the order of concatenation."""


@dataclass(frozen=True)
class DenseModule:
    """A linear layer after pooling: weight ``[out, in]``, bias ``[out]`` or None."""

    weight: Tensor
    bias: Tensor | None
    tanh: bool


@dataclass(frozen=True)
class Normalize:
    """Division of the embedding by its Euclidean norm."""


@dataclass(frozen=True)
class EmbeddingModules:
    """The modules after the transformer.

    Attributes:
        pooling: modes whose results are concatenated.
        steps: modules after the pooling, in order.
    """

    pooling: tuple[Pooling, ...]
    steps: tuple[DenseModule | Normalize, ...] = ()

    def dimension(self, hidden: int) -> int:
        """Return the dimension of embeddings of a model with this hidden size."""
        dense = [step for step in self.steps if isinstance(step, DenseModule)]
        return len(dense[-1].weight) if dense else len(self.pooling) * hidden

    def hashed(self, model_hash: str) -> str:
        """Return the hash of a transformer with this hash and of these modules, in hexadecimal."""
        found = hashlib.sha256(model_hash.encode())
        found.update(" ".join(self.pooling).encode())
        for step in self.steps:
            if isinstance(step, Normalize):
                found.update(b"normalize")
                continue
            found.update(f"dense {tuple(step.weight.shape)} {step.tanh}".encode())
            for tensor in (step.weight, step.bias):
                if tensor is not None:
                    found.update(tensor.float().contiguous().numpy().tobytes())
        return found.hexdigest()


def read_modules(folder: Path, hidden: int, default: Pooling) -> EmbeddingModules:
    """Return the modules of a folder.

    Args:
        hidden: hidden size of the transformer.
        default: pooling of a folder without ``modules.json``.

    Raises:
        CheckpointError: a file is malformed, or a module or an option is not supported.
    """
    if not (folder / MODULES).is_file():
        return EmbeddingModules((default,))
    kinds = [(_kind(entry), folder / str(entry.get("path", ""))) for entry in _entries(folder)]
    names = [kind for kind, _ in kinds]
    if names[:2] != ["Transformer", "Pooling"]:
        raise CheckpointError(
            f"{folder / MODULES} lists {', '.join(names)}; supported are Transformer and Pooling, "
            "then any number of Dense and Normalize"
        )
    pooling = _pooling(read_json(kinds[1][1] / _CONFIG), hidden)
    steps: list[DenseModule | Normalize] = []
    width = len(pooling) * hidden
    for kind, path in kinds[2:]:
        if kind == "Normalize":
            steps.append(Normalize())
        elif kind == "Dense":
            steps.append(dense := _dense(path, width))
            width = len(dense.weight)
        else:
            raise CheckpointError(f"{folder / MODULES} has a module {kind}, which is not supported")
    return EmbeddingModules(pooling, tuple(steps))


def _entries(folder: Path) -> list[Mapping[str, Any]]:
    try:
        content = json.loads((folder / MODULES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MODULES} cannot be read as JSON: {error}") from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise CheckpointError(f"{folder / MODULES} is not a list of modules")
    return content


def _kind(entry: Mapping[str, Any]) -> str:
    return str(entry.get("type", "")).rpartition(".")[2]


def _pooling(config: Mapping[str, Any], hidden: int) -> tuple[Pooling, ...]:
    if config.get("include_prompt", True) is not True:
        raise CheckpointError("pooling without the tokens of the prompt is not supported")
    key = "embedding_dimension" if "embedding_dimension" in config else "word_embedding_dimension"
    if count(config, key, hidden) != hidden:
        raise CheckpointError(f"the pooling has {key} = {config[key]}, the model {hidden}")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _MODE_KEYS.items() if flag(config, name)] or ["mean"]
    names = [modes] if isinstance(modes, str) else modes
    supported = [mode.value for mode in Pooling]
    if not isinstance(names, list) or not names or any(name not in supported for name in names):
        raise CheckpointError(
            f"pooling mode {modes!r} is not supported; supported: {', '.join(supported)}"
        )
    return tuple(map(Pooling, names))


def _dense(folder: Path, width: int) -> DenseModule:
    config = read_json(folder / _CONFIG)
    activation = str(config.get("activation_function", _DEFAULT_ACTIVATION))
    name = activation.rpartition(".")[2]
    if name not in ("Tanh", "Identity"):
        raise CheckpointError(f"a Dense module has the activation {activation}: not supported")
    others = config.get("module_input_name"), config.get("module_output_name")
    if config.get("use_residual") or any(
        other not in (None, "sentence_embedding") for other in others
    ):
        raise CheckpointError("a Dense module has options that are not supported")
    size = count(config, "out_features")
    files = SafetensorsDirectory(folder)
    if not {"linear.weight"} <= files.names() <= {"linear.weight", "linear.bias"}:
        raise CheckpointError(f"{folder} has not the tensors of a Dense module")
    weight = files.read("linear.weight")
    bias = files.read("linear.bias") if "linear.bias" in files.names() else None
    if weight.shape != (size, width) or (bias is not None and bias.shape != (size,)):
        raise CheckpointError(f"the Dense module in {folder} is not {width} to {size}")
    return DenseModule(weight, bias, tanh=name == "Tanh")
