"""One decoder layer over paged KV: packed projections around an attention backend."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.attention.base import Batch, MixedBatch
from runtime.checkpoint.slices import norm_after_v
from runtime.checkpoint.weights import FactorPair, linears_of
from runtime.config import ModelConfig
from runtime.kv.format import LayerKV
from runtime.layers.linear import LinearOp, NormAfterV, Projection, SharedOps
from runtime.layers.residual import ResidualPart
from runtime.layers.summed import SummedProjection
from runtime.models.family import Gate, LayerParts, ModelFamily
from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import Scheme


class ServingBuilder:
    """Builds the parts of a layer for serving; see `runtime.models.family.LayerBuilder`.

    Args:
        weights: weights of the layer, an instance of the family's ``layer_type``.
        shared: packed linear operators, by the ids of the tensors stacked in them. The same dict is
            passed to every layer, so that a basis shared by several layers is packed once.
        group: the ranks of the worker.
        scheme: how they divide the linears.
        residual: the rank's part of the residual stream; None if each rank has all of it.
    """

    def __init__(
        self,
        family: ModelFamily[Any],
        config: ModelConfig,
        weights: Any,
        shared: SharedOps,
        group: RankGroup = ONE_RANK,
        scheme: Scheme = Scheme.LOW_RANK,
        residual: ResidualPart | None = None,
    ) -> None:
        self._family = family
        self.config = config
        self._weights = weights
        self._shared = shared
        self._group = group
        self._scheme = scheme
        self._residual = residual
        self._layout = family.layout(config)
        self._applied = self._norms_after_v() if residual else {}

    def has(self, field: str) -> bool:
        return getattr(self._weights, field) is not None

    def qkv(self, *fields: str) -> LinearOp:
        return self._projection(*fields)

    def linear(self, field: str) -> LinearOp:
        return self._projection(field)

    def residual(self, field: str) -> Callable[[Tensor, Tensor], Tensor]:
        projection = self._projection(field)
        return lambda x, hidden: projection(x).add_(hidden)

    def gated(self, gate_field: str, up_field: str, gate: Gate) -> Callable[[Tensor], Tensor]:
        gate_and_up = self._projection(gate_field, up_field)  # [n, 2 d]
        function = gate.for_serving()
        return lambda x: function(gate_and_up(x))

    def norm(self, field: str, bias: str = "") -> Callable[[Tensor], Tensor]:
        if field in self._applied.values():
            return lambda part: part  # the projections apply it
        weight = getattr(self._weights, field)
        added = getattr(self._weights, bias) if bias else None
        norm = self._family.norm.for_serving(weight, self.config.rms_norm_eps, added)
        residual = self._residual
        if residual is None or self._layout.vectors[field].size != residual.size:
            return norm
        return lambda part: norm(residual.whole(part))

    def _norms_after_v(self) -> dict[str, str]:
        """Return the fields of the norms that projections apply, by that of the first linear."""
        found = {}
        for names in self._layout.groups():
            linears = [getattr(self._weights, name) for name in names]
            if norm := norm_after_v(self._layout.linears[names[0]], linears):
                found[names[0]] = norm
        return found

    def _projection(self, *fields: str) -> LinearOp:
        linears = [getattr(self._weights, field) for field in fields]
        if self._scheme is Scheme.BASE:
            return SummedProjection(linears, self._group, self._shared)
        # All of them read the same input, so that they are divided alike.
        first = self._layout.linears[fields[0]]
        norm = None
        if self._residual and (field := self._applied.get(self._layout.input_of(fields[0]))):
            weight = getattr(self._weights, field)
            norm = NormAfterV(weight, self.config.rms_norm_eps, self._residual)
        return Projection(
            linears,
            self._shared,
            self._group,
            writes_residual=first.writes_residual,
            residual=self._residual if first.writes_residual else None,
            norm=norm,
        )


class DecoderLayer:
    """One layer of a model.

    Attributes:
        parts: callables for the parts of the layer.
        factorized: whether any of its linears is a factor pair.
    """

    def __init__(
        self, family: ModelFamily[Any], config: ModelConfig, parts: LayerParts, *, factorized: bool
    ) -> None:
        self._family = family
        self._config = config
        self.parts = parts
        self.factorized = factorized

    @classmethod
    def build(
        cls,
        family: ModelFamily[Any],
        config: ModelConfig,
        weights: Any,
        shared: SharedOps,
        group: RankGroup = ONE_RANK,
        scheme: Scheme = Scheme.LOW_RANK,
        residual: ResidualPart | None = None,
    ) -> "DecoderLayer":
        """Build a layer from a checkpoint's weights. For the arguments see `ServingBuilder`."""
        builder = ServingBuilder(family, config, weights, shared, group, scheme, residual)
        parts = family.parts(builder)
        factorized = any(isinstance(linear, FactorPair) for _, linear in linears_of(weights))
        return cls(family, config, parts, factorized=factorized)

    def __call__(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        kv: LayerKV,
        planes: tuple[Tensor, ...],
        batch: Batch,
        *,
        last: bool,
    ) -> Tensor:
        """Compute the layer and write the batch's K and V into ``planes``.

        Args:
            hidden: residual stream ``[n, hidden]``, or this rank's part of it.
            rope: cosines and sines, fp32 ``[context, dim / 2]`` each.
            planes: the layer's planes, in the order of `KVFormat.planes`.
            last: whether this is the last layer. The last layer writes K and V of all tokens, and
                computes everything after that only for the rows that need logits, unless hidden
                states are logged.

        Returns:
            The same after the layer; for the last layer, only the ``m`` logit rows, unless hidden
            states are logged.
        """
        parts = self.parts
        every = batch.single and len(batch.logit_rows) == len(hidden)
        some = last and not every and batch.hidden is None
        x, carried = self._family.before_attention(parts, hidden)
        mixed = isinstance(batch, MixedBatch)
        fused = parts.prefill if batch.queries is None else None
        if fused is not None and not (some or mixed or batch.single):
            attended = fused(x, rope, planes, batch)
        else:
            append = parts.append or kv.append
            q = append(self._norm_heads(parts.qkv(x)), rope, planes, batch)
            if batch.queries is not None:
                batch.queries.layers.append(q[batch.queries.rows])
            if some:
                rows = batch.logit_rows
                if not len(rows):
                    return hidden[:0]
                carried = tuple(tensor[rows] for tensor in carried)
                attended = _attend_rows(kv, q, planes, batch)
            else:
                attended = _attend(kv, q, planes, batch)
        return self._family.after_attention(parts, attended, *carried)

    def _norm_heads(self, qkv: Tensor) -> Tensor:
        """Norm each query head and each key head of ``[n, (heads + 2 kv_heads) * dim]``."""
        if self.parts.head_norms is None:
            return qkv
        norm_q, norm_k = self.parts.head_norms
        heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        by_head = qkv.view(len(qkv), -1, self._config.head_dim)  # [n, heads + 2 kv_heads, dim]
        q, k, v = torch.split(by_head, [heads, kv_heads, kv_heads], dim=1)
        q, k = q.contiguous(), k.contiguous()
        normed = (norm_q(q), norm_k(k), v)
        return torch.cat(normed, dim=1).flatten(1)


def _attend_rows(kv: LayerKV, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
    """Return the attention of the logit rows of a batch, `[m, heads * dim]`."""
    rows = batch.logit_rows
    if isinstance(batch, MixedBatch) and batch.decodes_other_groups:
        return _attend(kv, q, planes, batch)[rows]
    return _attend(kv, q[rows], planes, batch.where_logits())


def _attend(kv: LayerKV, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
    """Return the attention of a batch, `[n, heads * dim]`; decode rows use a separate call."""
    if not isinstance(batch, MixedBatch):
        return kv.attend(q, planes, batch)
    attended = kv.attend(q, planes, batch.chunks)
    count = len(batch.decoding)
    last = attended[-count:]
    decoded = kv.attend(q[-count:], planes, batch.decode)
    torch.where(batch.decoding, decoded, last, out=last)
    return attended
