"""The decoder: tokens and paged KV in, logits out."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime import kernels
from runtime.attention.base import Batch
from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.weights import Checkpoint
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.format import KVFormat
from runtime.kv.registry import create_format
from runtime.layers.linear import Packed, packs, product
from runtime.layers.pointwise import RmsNorm
from runtime.layers.rope import cos_sin_table
from runtime.models.decoder import DecoderLayer, LayerParts

if TYPE_CHECKING:
    from runtime.gemm.ops import Products
    from runtime.gemm.plan import KernelPlan
    from runtime.gemm.weights import StepWeights

_HOPPER = (9, 0)
"""The compute capability whose shared memory the step's kernel needs."""


class Model:
    """A checkpoint made ready to run on one device.

    Args:
        stepped: pack weights for `runtime.megakernel`: bf16, attention by Triton kernels. Raises
            ValueError for models that these do not have.
        plan: how a stepped model computes products; without one by a rule.
        kv_format: a name or ``module:Class``, see `runtime.kv.registry.create_format`.

    Attributes:
        config: the model's shape.
        kv_format: how its KV is stored and attended.
        layout: the planes of its KV cache.
        page_size: token slots of a page.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        stepped: bool = False,
        plan: "KernelPlan | None" = None,
        kv_format: str = "dense",
    ) -> None:
        self.config = checkpoint.config
        self.page_size = page_size
        self.device, self.dtype = torch.device(device), dtype
        if stepped:
            self.dtype = checkpoint.embedding.dtype
        self.kv_format: KVFormat = create_format(
            kv_format, self.config, self.device, self.dtype, by_halves=stepped
        )
        self.layout = CacheLayout.of(
            self.kv_format, num_layers=self.config.num_layers, page_size=page_size
        )
        self._plan_hash = ""
        self._step_weights = self._stepped(checkpoint, plan) if stepped else None
        if self._step_weights is None:
            self._set_up(checkpoint)
        cos, sin = cos_sin_table(self.config, self.config.context_length)
        self._rope = cos.to(self.device), sin.to(self.device)

    def _set_up(self, checkpoint: Checkpoint) -> None:
        """Layer by layer: of what is packed, no more than a layer is on the device as it was, too.
        Where layers share a basis all of it is, until the last one is packed."""
        packed: Packed = {}
        placed: dict[int, Tensor] = {}
        place = partial(_place, device=self.device, dtype=self.dtype, placed=placed)
        sharing = bool(basis_groups(checkpoint))
        self._embedding = place(checkpoint.embedding)
        self._final_norm: Callable[[Tensor], Tensor] = RmsNorm(
            place(checkpoint.final_norm), self.config.rms_norm_eps
        )
        self._lm_head = product(place(checkpoint.lm_head))
        self._layers: list[DecoderLayer] = []
        for layer in checkpoint.layers:
            parts = LayerParts.of(self.config, place(layer), packed)
            self._layers.append(DecoderLayer(self.config, parts))
            if not sharing:
                placed.clear()
                packed.clear()  # it knows tensors by ids, which are another's when one is gone

    def _stepped(self, checkpoint: Checkpoint, plan: "KernelPlan | None") -> "StepWeights":
        from runtime.attention.gpu import TritonAttention
        from runtime.gemm.ops import Norm
        from runtime.gemm.plan import KernelPlan
        from runtime.gemm.weights import StepWeights
        from runtime.models.packed_layer import parts_of

        plan = plan or KernelPlan()
        weights, config = StepWeights.of(plan.applied(checkpoint), self.device), self.config
        self.dtype = weights.embedding.dtype
        attention = TritonAttention(
            config.num_heads, config.num_kv_heads, config.head_dim, by_halves=True
        )
        fused = attention if self.kv_format.dense_bf16 else None
        self._embedding = weights.embedding
        self._layers = [
            DecoderLayer(config, parts_of(weights, layer, plan, fused)) for layer in weights.layers
        ]
        self._plan_hash = plan.hash
        final = weights.vectors[weights.final_norm : weights.final_norm + config.hidden_size]
        self._final_norm = Norm(final, config.rms_norm_eps)
        self._lm_head = product(weights.head.weight)
        return weights

    def static_step(self, batch: Batch, cache: PagedCache) -> Callable[[], Tensor]:
        """What computes, again and again, what `forward` would for a batch whose tensors stay: one
        token of each sequence. What it returns is overwritten by the next call."""
        plain = partial(self.forward, batch, cache)
        if self._step_weights is None or self.device.type != "cuda":
            return plain
        if not self.kv_format.dense_bf16:
            return plain
        from runtime.megakernel.launch import MOST, DecodeStep

        each_once = batch.single and len(batch.logit_rows) == len(batch.tokens)
        hopper = torch.cuda.get_device_capability(self.device) == _HOPPER
        if not hopper or not each_once or len(batch.tokens) > MOST:
            return plain
        programs = torch.cuda.get_device_properties(self.device).multi_processor_count
        step = DecodeStep(self._step_weights, cache.planes, self._rope, batch, programs=programs)

        def run() -> Tensor:
            step.launch()
            return step.logits

        return run

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return self.config.context_length

    @property
    def kernel_plan(self) -> str:
        """16 hex digits over what decides the bits of a result, beside weights and KV format."""
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
            "products": self.products,
            "plan": self._plan_hash,
            "kv": self.kv_format.kernels,
            "factorized": self.factorized_layers > 0,
        }
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def replayable(self) -> bool:
        """Whether steps are replayed as CUDA graphs."""
        return self.device.type == "cuda" and self.kv_format.graph_safe

    @property
    def factorized_layers(self) -> int:
        """Layers with a factor pair among their projections."""
        return sum(layer.factorized for layer in self._layers)

    @property
    def products(self) -> str:
        """How matrix products are computed: by `runtime.megakernel`, by oneDNN with a packed
        layout, or torch: "step", "packed" or "plain"."""
        if self._step_weights is not None:
            return "step"
        return "packed" if packs(self.device, self.dtype) else "plain"

    def step_products(self) -> "Iterator[Products]":
        """Of a stepped model, what a kernel plan chooses for."""
        from runtime.gemm.projections import StepProjection

        for layer in self._layers:
            for projection in layer.projections:
                if isinstance(projection, StepProjection):
                    yield from projection.products

    def new_cache(self, num_pages: int) -> PagedCache:
        """Memory for ``num_pages`` pages of this model's KV."""
        return PagedCache(self.layout, num_pages=num_pages, device=self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """Computes the tokens of a batch: their KV into the pages, and logits where wanted.

        Returns:
            fp32 `[m, vocab]`, one row for each of the batch's ``logit_rows``.
        """
        *stages, last = self.stages(batch, cache)
        for stage in stages:
            stage()
        return last()

    def stages(self, batch: Batch, cache: PagedCache) -> list[Callable[[], Tensor]]:
        """`forward` in parts, each to be called once and in order: the embedding, every layer, the
        logits. A CUDA graph may hold each of them."""
        hidden = torch.empty(0)

        def embed() -> Tensor:
            nonlocal hidden
            hidden = functional.embedding(batch.tokens, self._embedding)
            return hidden

        def compute(index: int) -> Tensor:
            nonlocal hidden
            last = index == len(self._layers) - 1
            layer, planes = self._layers[index], cache.layer(index)
            kv = self.kv_format.layer(index)
            hidden = layer(hidden, self._rope, kv, planes, batch, last=last)
            return hidden

        def logits() -> Tensor:
            if not len(hidden):
                return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
            return self._lm_head(self._final_norm(hidden)).float()

        layers = [partial(compute, index) for index in range(len(self._layers))]
        return [embed, *layers, logits]


def _triton_version() -> str:
    import triton  # no other device needs it

    return str(triton.__version__)


def step_refusal(
    checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype
) -> str | None:
    """Why a decode step of this model cannot be one launch on a device; None if `stepped` is what
    its `Model` should be. Moves nothing."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"weights are {dtype}, not bf16"
    if (found := torch.cuda.get_device_capability(device)) != _HOPPER:
        return f"compute capability {found[0]}.{found[1]}, not {_HOPPER[0]}.{_HOPPER[1]}"
    from runtime.gemm.weights import refusal

    return refusal(checkpoint)


def _place(value: Any, device: torch.device, dtype: torch.dtype, placed: dict[int, Tensor]) -> Any:
    """The same weights, on ``device`` as ``dtype``; nothing is copied that is so already, and what
    was one tensor is one again."""
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
