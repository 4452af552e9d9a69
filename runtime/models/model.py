"""The decoder: tokens and paged KV in, logits out."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from runtime import kernels
from runtime.attention.base import Batch
from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.weights import Checkpoint
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.format import KVFormat
from runtime.kv.registry import check_windows, create_format
from runtime.kv.windowed import WindowedFormat
from runtime.layers.embedding import embedding_op
from runtime.layers.linear import SharedOps, linear_op, uses_packed_layout
from runtime.layers.rope import cos_sin_table
from runtime.models.decoder import DecoderLayer
from runtime.models.registry import model_family, unsupported_family
from runtime.pages.plan import PageCount

if TYPE_CHECKING:
    from runtime.gemm.ops import GroupedGemm
    from runtime.gemm.plan import KernelPlan
    from runtime.gemm.weights import PackedWeights

Backend = Literal["torch", "gemm"]
"""Implementation of the linear layers. "torch" uses torch and, on the CPU, our compiled loops.
"gemm" uses `runtime.gemm` over packed weights, and `runtime.megakernel` for decode steps."""
_HOPPER = (9, 0)
"""Compute capability for which the GEMM kernels and the megakernel are written."""


class Model:
    """A checkpoint prepared to run on one device.

    Args:
        dtype: dtype of the computation with backend "torch".
        page_size: token slots of a page.
        backend: "gemm" packs the weights as bf16 for `runtime.gemm` and computes attention with
            Triton kernels; see `unsupported_by_gemm`.
        plan: kernel of each GEMM with backend "gemm". If None, `runtime.gemm.plan.default_tile`
            selects the kernels.
        kv_format: built-in name, ``name:PATH`` or ``module:Class``; see
            `runtime.kv.registry.create_format`.

    Attributes:
        config: shape of the model.
        kv_format: format in which KV is stored and attended.
        layout: planes of the KV cache.
        page_size: token slots of a page.
        weight_bytes: bytes of the checkpoint's tensors in the dtype of the computation.

    Raises:
        ValueError: backend "gemm", or attention on a GPU, does not support the model.
        KVFormatError: the KV format does not support the model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        backend: Backend = "torch",
        plan: "KernelPlan | None" = None,
        kv_format: str = "dense",
    ) -> None:
        self.config = checkpoint.config
        self.page_size = page_size
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if backend == "gemm" else dtype
        self.kv_format: KVFormat = create_format(
            kv_format,
            self.config,
            self.device,
            self.dtype,
            by_halves=backend == "gemm",
            model_hash=checkpoint.model_hash,
        )
        check_windows(self.kv_format, self.config)
        self.layout = CacheLayout.of(
            self.kv_format, num_layers=self.config.num_layers, page_size=page_size
        )
        self._plan_hash, self.weight_bytes = "", 0
        self._packed = self._set_up_gemm(checkpoint, plan) if backend == "gemm" else None
        if self._packed is None:
            self._set_up(checkpoint)
        cos, sin = cos_sin_table(self.config, self.config.context_length)
        self._rope = cos.to(self.device), sin.to(self.device)

    def _set_up(self, checkpoint: Checkpoint) -> None:
        """Move the weights to the device and pack them, one layer at a time to limit peak memory.

        If layers share bases, all layers stay on the device unpacked until the last one is packed.
        """
        packed: SharedOps = {}
        placed: dict[int, Tensor] = {}
        place = partial(_place, device=self.device, dtype=self.dtype, placed=placed)
        sharing = bool(basis_groups(checkpoint))
        family = model_family(self.config)
        norm = place(checkpoint.final_norm)
        self._final_norm = family.norm.for_serving(norm, self.config.rms_norm_eps)
        self._lm_head = linear_op(place(checkpoint.lm_head))
        tied = self._lm_head if checkpoint.lm_head is checkpoint.embedding else None
        self._embed = embedding_op(place(checkpoint.embedding), tied)
        self._layers: list[DecoderLayer] = []
        for number, layer in enumerate(checkpoint.layers, 1):
            self._layers.append(DecoderLayer.build(family, self.config, place(layer), packed))
            if not sharing or number == len(checkpoint.layers):
                self.weight_bytes += sum(tensor.nbytes for tensor in placed.values())
                placed.clear()
                packed.clear()  # its keys are tensor ids, which Python reuses

    def _set_up_gemm(self, checkpoint: Checkpoint, plan: "KernelPlan | None") -> "PackedWeights":
        """Pack the weights for `runtime.gemm`, and build the layers over them."""
        from runtime.attention.gpu import TritonAttention
        from runtime.gemm.plan import KernelPlan
        from runtime.gemm.weights import PackedWeights
        from runtime.models.packed_layer import packed_norm, packed_parts

        if reason := unsupported_family(self.config):
            raise ValueError(reason)
        plan, config = plan or KernelPlan(), self.config
        weights = PackedWeights.pack(plan.multiply_out(checkpoint), self.device)
        attention = TritonAttention(
            config.num_heads, config.num_kv_heads, config.head_dim, by_halves=True
        )
        fused = attention if self.kv_format.dense_bf16 else None
        self._embed = embedding_op(weights.embedding)
        self._layers = [
            DecoderLayer(
                model_family(config),
                config,
                packed_parts(weights, layer, plan, fused),
                factorized=bool(layer.inner),
            )
            for layer in weights.layers
        ]
        self._plan_hash, self.weight_bytes = plan.hash, checkpoint.nbytes
        self._final_norm = packed_norm(weights, weights.final_norm)
        self._lm_head = linear_op(weights.lm_head.weight)
        return weights

    @property
    def unsupported_by_megakernel(self) -> str | None:
        """Reason why the megakernel cannot compute decode steps; None if it can."""
        if self._packed is None:
            return "the megakernel needs the packed weights of backend gemm"
        attends = isinstance(self.kv_format, WindowedFormat) and self.kv_format.graph_safe
        if not (self.kv_format.dense_bf16 or attends):
            return f"the megakernel does not support KV format {self.kv_format.name}"
        if self.page_size % 16:
            return f"pages of {self.page_size} tokens: the megakernel needs a multiple of 16"
        from runtime.megakernel.support import unsupported

        return unsupported(self._packed)

    def static_step(self, batch: Batch, cache: PagedCache) -> Callable[[], Tensor]:
        """Return a function that computes `forward` for a batch whose tensors keep their addresses.

        It uses the megakernel if that supports the model, the device and the batch, which must have
        one token per sequence: up to `MAX_SEQUENCES`, or `MAX_SEQUENCES_WITHOUT_ATTENTION` with a
        compressed KV format. The next call overwrites the result.
        """
        plain = partial(self.forward, batch, cache)
        if self._packed is None or self.device.type != "cuda" or self.unsupported_by_megakernel:
            return plain
        from runtime.megakernel.launch import (
            MAX_SEQUENCES,
            MAX_SEQUENCES_WITHOUT_ATTENTION,
            DecodeStep,
        )

        one_each = batch.single and len(batch.logit_rows) == len(batch.tokens)
        hopper = torch.cuda.get_device_capability(self.device) == _HOPPER
        most = MAX_SEQUENCES if self.kv_format.dense_bf16 else MAX_SEQUENCES_WITHOUT_ATTENTION
        if not hopper or not one_each or len(batch.tokens) > most:
            return plain
        programs = torch.cuda.get_device_properties(self.device).multi_processor_count
        packed, rope = self._packed, self._rope
        if not isinstance(self.kv_format, WindowedFormat):
            return DecodeStep(packed, cache.planes, rope, batch, programs=programs).launch
        layers = [cache.layer(index) for index in range(self.config.num_layers)]
        dense = [plane for planes in layers for plane in planes[:2]]  # K and V
        attend = self.kv_format.decode_attention(layers, batch)
        step = DecodeStep(packed, dense, rope, batch, attend=attend, programs=programs)
        encoder = self.kv_format.encoder(layers)

        def run() -> Tensor:
            encoder.encode_leaving(batch)
            return step.launch()

        return run

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        return self.config.context_length

    @property
    def kernel_plan_hash(self) -> str:
        """Hash of all that determines results, except the weights and the KV format; 16 hex digits.

        If it differs, results may not be bitwise identical. The handshake compares the weights and
        the KV format separately.
        """
        plan = {
            "torch": torch.__version__.split("+")[0],
            "cuda": None if self.device.type == "cpu" else torch.version.cuda,
            "triton": None if self.device.type == "cpu" else _triton_version(),
            "kernels": kernels.VERSION,
            "device": self.device.type,
            "instructions": torch.backends.cpu.get_cpu_capability()
            if self.device.type == "cpu"
            else torch.cuda.get_device_name(self.device),
            "dtype": str(self.dtype),
            "matmul": self.matmul,
            "plan": self._plan_hash,
            "kv": self.kv_format.kernels,
            "factorized": self.factorized_layers > 0,
        }
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def replayable(self) -> bool:
        """Whether steps can be replayed as CUDA graphs."""
        return self.device.type == "cuda" and self.kv_format.graph_safe

    @property
    def factorized_layers(self) -> int:
        """Number of layers with at least one factor pair."""
        return sum(layer.factorized for layer in self._layers)

    @property
    def matmul(self) -> str:
        """Implementation of the matmuls; logged, and part of `kernel_plan_hash`.

        "gemm" is `runtime.gemm`, "packed" is oneDNN with a packed layout, and "plain" is torch.
        """
        if self._packed is not None:
            return "gemm"
        return "packed" if uses_packed_layout(self.device, self.dtype) else "plain"

    def grouped_gemms(self) -> "Iterator[GroupedGemm]":
        """Yield the GEMMs for which a kernel plan chooses tiles; none with backend "torch"."""
        from runtime.gemm.projections import PackedProjection

        for layer in self._layers:
            for part in vars(layer.parts).values():
                if isinstance(part, PackedProjection):
                    yield from part.gemms

    def new_cache(self, pages: PageCount) -> PagedCache:
        """Allocate pages for this model's KV; see `PagedCache`."""
        return PagedCache(self.layout, pages, self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """Run the model on a batch: write its tokens' KV into the pages, and return logits.

        Returns:
            fp32 `[m, vocab]`, one row for each of the batch's ``logit_rows``.
        """
        *stages, last = self.stages(batch, cache)
        for stage in stages:
            stage()
        return last()

    def stages(self, batch: Batch, cache: PagedCache) -> list[Callable[[], Tensor]]:
        """Return the parts of `forward`: the embedding, every layer, and the logits.

        Each function must be called once, in order. The last one returns the logits; a CUDA graph
        may capture each of them.
        """
        hidden = torch.empty(0)

        def embed() -> Tensor:
            nonlocal hidden
            hidden = self._embed(batch.tokens)
            return hidden

        def compute(index: int) -> Tensor:
            nonlocal hidden
            last = index == len(self._layers) - 1
            layer, planes = self._layers[index], cache.layer(index)
            kv = self.kv_format.layer(index)
            own = batch.of_group(self.layout.layer_groups[index])
            hidden = layer(hidden, self._rope, kv, planes, own, last=last)
            return hidden

        def logits() -> Tensor:
            if not len(hidden):
                return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
            return self._lm_head(self._final_norm(hidden)).float()

        layers = [partial(compute, index) for index in range(len(self._layers))]
        return [embed, *layers, logits]


def _triton_version() -> str:
    import triton  # only needed on a GPU

    return str(triton.__version__)


def unsupported_by_gemm(
    checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype
) -> str | None:
    """Return why backend "gemm" does not support a checkpoint on a device, or None.

    Only shapes are read.
    """
    if reason := unsupported_family(checkpoint.config):
        return reason
    device = torch.device(device)
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"weights are {dtype}, not bf16"
    if (found := torch.cuda.get_device_capability(device)) != _HOPPER:
        return f"compute capability {found[0]}.{found[1]}, not {_HOPPER[0]}.{_HOPPER[1]}"
    from runtime.gemm.weights import unsupported

    return unsupported(checkpoint)


def _place(value: Any, device: torch.device, dtype: torch.dtype, placed: dict[int, Tensor]) -> Any:
    """Return ``value`` with all tensors on ``device`` as ``dtype``, copied only where necessary.

    Args:
        value: a tensor, or nested tuples and dataclasses with tensors.
        placed: results by the id of the original tensor, so that a tensor that is used twice is
            copied once.
    """
    if isinstance(value, Tensor):
        return placed.setdefault(id(value), value.to(device, dtype))
    if isinstance(value, tuple):
        return tuple(_place(item, device, dtype, placed) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        moved = {
            f.name: _place(getattr(value, f.name), device, dtype, placed) for f in fields(value)
        }
        return replace(value, **moved)
    return value
