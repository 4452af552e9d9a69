"""An encoder prepared for one device, and loading one from a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.checkpoint.huggingface import CONFIG
from runtime.checkpoint.load import load_checkpoint
from runtime.checkpoint.safetensors_file import read_json
from runtime.checkpoint.weights import Checkpoint
from runtime.config import EncoderConfig, ModelConfig
from runtime.encoder.batch import EncoderInput, RaggedBatch, in_parts
from runtime.encoder.bert import BertBackbone, classification_head
from runtime.encoder.decoder import DecoderBackbone
from runtime.encoder.modules import Pooling, read_modules
from runtime.encoder.pooling import Head, embedding_head
from runtime.encoder.replay import ReplayedBackbone
from runtime.errors import CheckpointError, InvalidRequest

__all__ = ["Activation", "Encoder", "EncoderInput", "EncoderTask", "load_encoder"]


CPU_TOKENS, GPU_TOKENS = 1024, 16_384
"""Maximum tokens that a CPU or a GPU computes at once, unless a single input has more: so that the
activations stay in the caches of the CPU, and in 150 MB of the GPU with the shape of BERT-base."""


class EncoderTask(StrEnum):
    """Output of an encoder: an embedding of each input, or the logits of its labels."""

    EMBED = "embed"
    CLASSIFY = "classify"


class Activation(StrEnum):
    """Function from the logits of a cross encoder to its scores."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"

    def __call__(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits) if self is Activation.SIGMOID else logits


class Backbone(Protocol):
    """The transformer of an encoder.

    Attributes:
        name: identity of the attention kernels.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Return the hidden states of all tokens, `[n, hidden]`."""
        ...


@dataclass(eq=False, kw_only=True)
class Encoder:
    """An encoder prepared to run on one device; see `load_encoder`.

    Attributes:
        config: shape of the model.
        device, dtype: device and dtype of the computation.
        dimension: dimension of an embedding, or number of labels.
        max_tokens: maximum tokens of an input, special tokens included.
        task: what `encode` returns.
        activation: from the logits of a classifier to its scores; not applied by `encode`.
        model_hash: hash of the weights, the config, and the modules after the transformer.
        backend: name of the attention kernels.
        backbone: hidden states `[n, hidden]` of a batch.
        head: results `[s, dimension]` from hidden states.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    dimension: int
    max_tokens: int
    task: EncoderTask
    activation: Activation
    model_hash: str
    backend: str
    backbone: Backbone
    head: Head

    @torch.inference_mode()
    def encode(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Return the embedding of each input, or the logits of its labels.

        Inputs are concatenated without padding. On the CPU in fp32, the result of an input is
        bitwise identical regardless of the others. At most `CPU_TOKENS` or `GPU_TOKENS` tokens are
        computed at once.

        Returns:
            fp32 `[len(inputs), dimension]` on the device.

        Raises:
            InvalidRequest: see `check`.
        """
        for each in inputs:
            self.check(each)
        if not inputs:
            return torch.empty(0, self.dimension, device=self.device)
        most = CPU_TOKENS if self.device.type == "cpu" else GPU_TOKENS
        parts = in_parts([len(each.tokens) for each in inputs], most)
        return torch.cat([self._encode(inputs[part]) for part in parts])

    def warm_up(self) -> None:
        """Capture all CUDA graphs, so that no later call does."""
        if isinstance(self.backbone, ReplayedBackbone):
            with torch.inference_mode():
                self.backbone.warm_up()

    def check(self, each: EncoderInput) -> None:
        """Check that an input can be encoded.

        Raises:
            InvalidRequest: it is empty or too long, or has an unknown token or token type.
        """
        length = len(each.tokens)
        if not 0 < length <= self.max_tokens:
            raise InvalidRequest(
                f"an input has {length} tokens: it must have 1 to {self.max_tokens}"
            )
        if not 0 <= min(each.tokens) <= max(each.tokens) < self.config.vocab_size:
            raise InvalidRequest(f"token ids must be below {self.config.vocab_size}")
        if not each.types:
            return
        if len(each.types) != length:
            raise InvalidRequest(f"{len(each.types)} token types for {length} tokens")
        known = self.config.token_types if isinstance(self.config, EncoderConfig) else 1
        if not 0 <= min(each.types) <= max(each.types) < known:
            raise InvalidRequest(f"token types must be below {known}")

    def _encode(self, inputs: Sequence[EncoderInput]) -> Tensor:
        batch = RaggedBatch.of(inputs, self.device)
        return self.head(self.backbone(batch), batch).float()


def load_encoder(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_tokens: int | None = None,
    backend: str = "auto",
) -> Encoder:
    """Load an encoder for one device.

    Args:
        path: folder of Hugging Face or sentence-transformers with safetensors, or a canonical
            checkpoint. Its ``modules.json`` names pooling and normalization; without one, the mean
            of the tokens is the embedding, or the last token of a decoder. A model with a
            classification head is a cross encoder.
        dtype: dtype of the computation. Pooling and what follows it are computed in fp32.
        max_tokens: maximum tokens of an input; by default, as many as the model supports.
        backend: attention kernels: ``compiled`` (CPU), ``reference``, or ``auto``. Decoders use
            those that serve them.

    Raises:
        CheckpointError: the folder is malformed, or something in it is not supported.
        RuntimeFault: the backend is not known.
    """
    folder, device = Path(path), torch.device(device)
    checkpoint = load_checkpoint(folder, None)
    config = checkpoint.config
    backbone: Backbone
    if isinstance(config, EncoderConfig):
        backbone, labels = (
            _bert(BertBackbone(checkpoint, device, dtype, backend), device),
            config.labels,
        )
        pooling = Pooling.MEAN
    else:
        backbone, labels = DecoderBackbone(checkpoint, device, dtype), 0
        pooling = Pooling.LAST_TOKEN
    if labels:
        dimension, activation = labels, _activation(_config_of(folder), labels)
        head = classification_head(checkpoint, device, dtype)
        model_hash = checkpoint.model_hash
    else:
        modules = read_modules(folder, config.hidden_size, pooling)
        dimension, activation = modules.dimension(config.hidden_size), Activation.IDENTITY
        head = embedding_head(modules, device)
        model_hash = modules.hashed(checkpoint.model_hash)
    return Encoder(
        config=config,
        device=device,
        dtype=dtype,
        dimension=dimension,
        max_tokens=_max_tokens(max_tokens, checkpoint),
        task=EncoderTask.CLASSIFY if labels else EncoderTask.EMBED,
        activation=activation,
        model_hash=model_hash,
        backend=backbone.name,
        backbone=backbone,
        head=head,
    )


def _bert(backbone: BertBackbone, device: torch.device) -> Backbone:
    """Return a backbone that replays small batches, if its attention can be captured."""
    if not backbone.packed:
        return backbone
    pool = torch.cuda.graph_pool_handle()
    return ReplayedBackbone(backbone, backbone.name, device, pool)


def _max_tokens(wanted: int | None, checkpoint: Checkpoint) -> int:
    supported = checkpoint.config.context_length
    if wanted is None:
        return supported
    if not 0 < wanted <= supported:
        raise CheckpointError(f"max_tokens is {wanted}: the model has positions 1 to {supported}")
    return wanted


def _config_of(folder: Path) -> dict[str, Any]:
    """Return ``config.json``, which a canonical checkpoint need not have."""
    path = folder / CONFIG
    return read_json(path) if path.is_file() else {}


def _activation(config: dict[str, Any], labels: int) -> Activation:
    """Return the activation of a cross encoder, as sentence-transformers chooses it."""
    own = config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is None:
        return Activation.SIGMOID if labels == 1 else Activation.IDENTITY
    kind = str(name).rpartition(".")[2].lower()
    if kind not in list(Activation):
        raise CheckpointError(f"a cross encoder with the activation {name} is not supported")
    return Activation(kind)
