"""A checkpoint's weights in the layout that the GEMM kernels and the megakernel read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.family import family_of
from runtime.checkpoint.sharing import layers_with_bases
from runtime.checkpoint.slices import norm_after_v
from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    FactorPair,
    Latents,
    LayerWeights,
    Linear,
    layer_shapes,
    linears_of,
)
from runtime.config import ModelConfig
from runtime.graphs.upload import Uploader
from runtime.kernels.alignment import LINE_BYTES, LINE_ELEMENTS, VECTOR_ELEMENTS, round_up
from runtime.parallel.partition import EvenRows, LowRankRows, Partition

PROJECTION_GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Projections grouped by their input. The V matrices of a group's factor pairs are stacked."""
_WRITE_RESIDUAL = (("o",), ("down",))
"""Groups whose projections write the residual stream, so that ranks divide their inputs."""
_HEAD_DIM_MULTIPLE = 16
"""Required divisor of the head dimension: `by_halves` groups eight rows of a head's first half with
eight of its second."""
_MAX_HEAD_DIM = 256
"""Widest head of the Triton attention kernels for bf16 queries."""


@dataclass(frozen=True)
class PackedMatrix:
    """One weight matrix in the layout of the kernels.

    Attributes:
        weight: bf16 `[rows, width]`. Each row begins on a 128-byte line, because GEMMs of many
            tokens are slower if rows share lines.
        bias: offset of the bias in `PackedWeights.vectors`; -1 if there is none.
        inner_column: for the U of a factor pair, index of the first column that it reads in the
            group's inner activations (the output of the stacked V); -1 if the matrix reads the
            group's input.
    """

    weight: Tensor
    bias: int = -1
    inner_column: int = -1


@dataclass(frozen=True)
class PackedLayer:
    """One layer: offsets of its norms in `PackedWeights.vectors`, and its matrices.

    Attributes:
        input_norm, post_norm: offsets of the RMSNorm weights `[hidden]`.
        inner: stacked V of each group of `PROJECTION_GROUPS` with factor pairs, by the name of the
            group's first projection. Each rank is padded to a multiple of 8. Layers that share all
            V of a group hold the same object.
        outer: matrix of each projection by name: W if it is dense, U if it is a factor pair; none
            for `Latents`.
        latents: for `Latents`, the columns of the group's inner activations that are the output of
            the projection, by name.
        norm_after_v: first projections of the groups that read the residual stream before the norm,
            because the ranks divide it (`Scheme.EVEN`). The norm's weight is part of the stacked V,
            and its scale is applied to the output of V.
        stacked: all matrices of a group without factor pairs, stacked, by the name of the group's
            first projection. ``outer`` holds views of it.
        q_norm, k_norm: offsets of the RMSNorm weights of q and k heads `[head_dim]`, in the model's
            order of dimensions; -1 if the model has none.
    """

    input_norm: int
    post_norm: int
    inner: dict[str, PackedMatrix]
    outer: dict[str, PackedMatrix]
    stacked: dict[str, Tensor]
    q_norm: int = -1
    k_norm: int = -1
    latents: dict[str, range] = field(default_factory=dict)
    norm_after_v: set[str] = field(default_factory=set)

    @property
    def matrices(self) -> list[PackedMatrix]:
        """All matrices that a forward pass reads, each once."""
        return [*self.inner.values(), *self.outer.values()]


@dataclass(frozen=True)
class PackedWeights:
    """All weights of a model on one device.

    Attributes:
        layers: layers in order.
        vectors: fp32 `[v]`, all norms and biases concatenated.
        final_norm: offset of the final RMSNorm in ``vectors``.
        embedding: bf16 `[vocab, hidden]`, contiguous.
        lm_head: the output projection; the kernels count offsets of matrices from its weight.
        max_inner: largest width of the inner activations of any group, in elements.
        partition: part of the model that these are the weights of; None for one rank.
        ones: offset of `[hidden]` ones in ``vectors`` if the ranks divide the residual stream: the
            weight of norms whose weight is part of a stacked V. Otherwise -1.
    """

    config: ModelConfig
    layers: tuple[PackedLayer, ...]
    vectors: Tensor
    final_norm: int
    embedding: Tensor
    lm_head: PackedMatrix
    max_inner: int
    partition: Partition | None = None
    ones: int = -1

    @classmethod
    def pack(
        cls,
        checkpoint: Checkpoint,
        device: torch.device | str,
        fold: Callable[[int, LayerWeights], LayerWeights] = lambda _, layer: layer,
    ) -> "PackedWeights":
        """Pack a checkpoint for ``device``, as bf16.

        Args:
            fold: function of the index and the weights of a layer that returns the weights to pack;
                see `runtime.kv.format.KVFormat.fold_weights`.

        Raises:
            ValueError: the kernels do not support the model; see `unsupported`.
        """
        config = checkpoint.config
        if reason := unsupported(checkpoint):
            raise ValueError(reason)
        with Uploader(torch.device(device)) as upload:
            part = checkpoint.partition
            packer = _Packer(upload, config, part, _residual_rows(config, part))
            layers = tuple(
                packer.layer(fold(index, layer), shared)
                for index, (layer, shared) in enumerate(layers_with_bases(checkpoint))
            )
            final_norm = packer.vector(checkpoint.final_norm)
            divides = packer.residual_rows is not None
            ones = packer.vector(torch.ones(config.hidden_size) if divides else None)
            head = packer.matrix(checkpoint.lm_head)
            tied = checkpoint.embedding is checkpoint.lm_head and head.weight.is_contiguous()
            return cls(
                config=config,
                layers=layers,
                final_norm=final_norm,
                embedding=head.weight if tied else packer.moved(checkpoint.embedding),
                lm_head=head,
                vectors=torch.cat(packer.vectors),
                max_inner=packer.max_inner,
                partition=part,
                ones=ones,
            )

    @property
    def residual_rows(self) -> EvenRows | None:
        """Elements of the residual stream that this rank has; None if it has all of them."""
        return _residual_rows(self.config, self.partition)

    @property
    def head_norms(self) -> bool:
        """Whether some layer normalizes its query and key heads."""
        return any(layer.q_norm >= 0 for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory, with padding. A matrix that layers share counts once."""
        tensors = [self.embedding, *(matrix.weight for matrix in self._matrices())]
        distinct = {id(tensor): tensor for tensor in tensors}.values()
        padded = sum(len(tensor) * tensor.stride(0) * tensor.itemsize for tensor in distinct)
        return self.vectors.nbytes + padded

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of the matrices that a decode step reads. Shared ones count once per layer."""
        return sum(matrix.weight.nbytes for matrix in self._matrices())

    def _matrices(self) -> Iterator[PackedMatrix]:
        yield self.lm_head
        for layer in self.layers:
            yield from layer.matrices


def by_halves(rows: Tensor, dim: int) -> Tensor:
    """Reorder the rows of heads so that RoPE partners are eight rows apart.

    Eight rows of a head's first half alternate with their eight partners in its second half. A GEMM
    tile of 16 rows then holds whole RoPE pairs.

    Args:
        rows: `[heads * dim, …]`, in the model's order; ``dim`` is a multiple of 16.
    """
    blocks = rows.view(-1, 2, dim // 16, 8, *rows.shape[1:])  # [heads, 2, dim / 16, 8, …]
    return blocks.transpose(1, 2).reshape(rows.shape)


def unsupported(checkpoint: Checkpoint) -> str | None:
    """Return why the GEMM kernels do not support a checkpoint, or None if they support it.

    Only shapes are read.
    """
    config = checkpoint.config
    if config.head_dim % _HEAD_DIM_MULTIPLE or config.head_dim > _MAX_HEAD_DIM:
        return (
            f"heads of {config.head_dim}: the GEMM backend needs a multiple of "
            f"{_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM}"
        )
    features = _features_of_ranks(checkpoint)
    if any(size % VECTOR_ELEMENTS for size in (config.hidden_size, *features)):
        return (
            f"hidden size {config.hidden_size} and intermediate size "
            f"{', '.join(map(str, sorted(features)))}: "
            f"the GEMM backend needs multiples of {VECTOR_ELEMENTS}"
        )
    layers = layer_shapes(checkpoint)
    pairs = (pair for layer in layers for _, pair in linears_of(layer))
    if any(isinstance(pair, FactorPair) and not pair.rank for pair in pairs):
        return "a factor pair of rank 0"
    if any((layer.q_norm is None) != (layer.k_norm is None) for layer in layers):
        return "norms of query heads without norms of key heads, or the reverse"
    return None


def _features_of_ranks(checkpoint: Checkpoint) -> set[int]:
    """Return the numbers of features of the MLP of all ranks, so that all use the same backend."""
    config, own = checkpoint.config, checkpoint.partition
    if own is None or config.whole is None:
        return {config.intermediate_size}
    parts = (Partition.of(config.whole, rank, own.size, own.scheme) for rank in range(own.size))
    return {len(part.features) for part in parts}


def _residual_rows(config: ModelConfig, part: Partition | None) -> EvenRows | None:
    return None if part is None else part.residual_rows(config.hidden_size)


def _zeros(rows: int, width: int, device: torch.device) -> Tensor:
    """Return bf16 zeros `[rows, width]` in which each row begins on a 128-byte line."""
    stride = round_up(width, LINE_ELEMENTS)
    memory = torch.zeros((rows + 1) * stride, dtype=torch.bfloat16, device=device)
    first = -memory.data_ptr() % LINE_BYTES // memory.itemsize
    return memory[first : first + rows * stride].view(rows, stride)[:, :width]


@dataclass
class _Packer:
    """Packs one layer after another, and collects norms and biases in ``vectors``.

    Attributes:
        shared: packed stacks of V, by the ids of their V, all of which later layers share. If two
            layers share only some V of a stack, each has a stack of its own. So have those whose V
            contain the weights of norms.
    """

    upload: Uploader
    config: ModelConfig
    partition: Partition | None
    residual_rows: EvenRows | None
    vectors: list[Tensor] = field(default_factory=list)
    max_inner: int = VECTOR_ELEMENTS
    shared: dict[tuple[int, ...], PackedMatrix] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.linears = family_of(self.config.architecture).layout(self.config).linears

    def moved(self, values: Tensor) -> Tensor:
        """Return a tensor on the device, as bf16. The dtype is converted on the device."""
        return self.upload(values).to(torch.bfloat16)

    def vector(self, values: Tensor | None) -> int:
        """Append a norm or a bias, rounded to bf16; return its offset, -1 for None."""
        if values is None:
            return -1
        offset = sum(map(len, self.vectors))
        self.vectors.append(self.moved(values).to(torch.float32).flatten())
        return offset

    def matrix(
        self, weight: Tensor, bias: Tensor | None = None, inner_column: int = -1
    ) -> PackedMatrix:
        """Pack a weight and its bias. Rows are padded to lines unless they are aligned already."""
        weight = self.moved(weight)
        aligned = weight.shape[1] % VECTOR_ELEMENTS == 0 and weight.stride(0) % LINE_ELEMENTS == 0
        if not aligned or weight.stride(1) != 1 or weight.data_ptr() % LINE_BYTES:
            padded = _zeros(len(weight), round_up(weight.shape[1]), weight.device)
            padded[:, : weight.shape[1]] = weight
            weight = padded
        return PackedMatrix(weight, self.vector(bias), inner_column)

    def layer(self, weights: LayerWeights, shared: frozenset[int]) -> PackedLayer:
        """Pack a layer; the arguments are those that `layers_with_bases` yields."""
        packed = PackedLayer(
            input_norm=self.vector(weights.input_norm),
            post_norm=self.vector(weights.post_norm),
            inner={},
            outer={},
            stacked={},
            q_norm=self.vector(weights.q_norm),
            k_norm=self.vector(weights.k_norm),
        )
        for names in PROJECTION_GROUPS:
            self._pack_group(weights, names, packed)
        self.shared = {ids: stack for ids, stack in self.shared.items() if shared.issuperset(ids)}
        return packed

    def _pack_group(self, weights: LayerWeights, names: Sequence[str], packed: PackedLayer) -> None:
        linears = {name: getattr(weights, name) for name in names}
        rows = {
            name: self._rows(name, linear)
            for name, linear in linears.items()
            if not isinstance(linear, Latents)
        }
        if any(isinstance(linear, FactorPair) for linear in linears.values()):
            pairs = [linear for linear in linears.values() if isinstance(linear, FactorPair)]
            ids = tuple(id(pair.v) for pair in pairs)
            norm = self._norm_after_v(names[0], list(linears.values()))
            if norm is not None:
                packed.norm_after_v.add(names[0])
                ids += (id(getattr(weights, norm)),)
            if ids not in self.shared:
                scale = None if norm is None else getattr(weights, norm)
                stack = self._stacked_v(pairs, names in _WRITE_RESIDUAL, scale)
                self.shared[ids] = self.matrix(stack)
            packed.inner[names[0]] = self.shared[ids]
        elif len(names) > 1:
            whole = self.matrix(torch.cat(list(rows.values()))).weight
            packed.stacked[names[0]] = whole
            parts = torch.split(whole, [len(part) for part in rows.values()])
            rows = dict(zip(names, parts, strict=True))
        column = 0
        for name, linear in linears.items():
            dense = isinstance(linear, Dense)
            if isinstance(linear, Latents):
                packed.latents[name] = range(column, column + linear.rank)
            elif dense:
                packed.outer[name] = self.matrix(rows[name], linear.bias)
            else:
                own, bias = rows[name], linear.bias
                if names in _WRITE_RESIDUAL:
                    own, bias = self._padded(own), None if bias is None else self._padded(bias)
                packed.outer[name] = self.matrix(own, bias, column)
            column += 0 if dense else round_up(linear.rank)

    def _rows(self, name: str, linear: Linear) -> Tensor:
        rows = linear.weight if isinstance(linear, Dense) else linear.u
        rows = self.moved(rows)
        return by_halves(rows, self.config.head_dim) if name in PROJECTION_GROUPS[0] else rows

    def _padded(self, rows: Tensor) -> Tensor:
        """Return the rank's rows of a U, or of its bias, with `EvenRows.height` rows."""
        if self.residual_rows is None:
            return rows
        missing = self.residual_rows.height - len(rows)
        return functional.pad(rows, (*[0, 0] * (rows.dim() - 1), 0, missing)) if missing else rows

    def _norm_after_v(self, first: str, linears: Sequence[Linear]) -> str | None:
        """Return the field of the norm that is applied after a group's V, or None."""
        if self.residual_rows is None:
            return None
        return norm_after_v(self.linears[first], linears) or None

    def _stacked_v(
        self, pairs: Sequence[FactorPair], writes_residual: bool, norm: Tensor | None = None
    ) -> Tensor:
        """Return the stacked V of all factor pairs: bf16 `[sum of padded ranks, in]`.

        If the ranks of a worker divide its rows, return those of this rank.

        Args:
            norm: weight `[hidden]` of the norm that is applied after V, whose columns the ranks
                divide; None if its input is normed.
        """
        if norm is not None:
            return self._scaled_v(pairs, norm)
        rank, size = 0, 1
        if self.partition is not None and not writes_residual:
            rank, size = self.partition.rank, self.partition.size
        low = LowRankRows.of([pair.rank for pair in pairs], rank, size)
        self.max_inner = max(self.max_inner, low.height)
        stacked = torch.zeros(
            low.height, pairs[0].v.shape[1], dtype=torch.bfloat16, device=self.upload.device
        )
        for pair, place in zip(pairs, low.places, strict=True):
            stacked[place : place + len(pair.v)] = self.upload(pair.v)
        return stacked

    def _scaled_v(self, pairs: Sequence[FactorPair], norm: Tensor) -> Tensor:
        """Return the rank's columns of the stacked V times the norm's weight, rounded once."""
        assert self.residual_rows is not None  # or the norm is applied before V
        own = self.residual_rows.rows
        scale = self.moved(norm[own.start : own.stop]).float()
        low = LowRankRows.of([pair.rank for pair in pairs], 0, 1)
        self.max_inner = max(self.max_inner, low.height)
        shape = low.height, self.residual_rows.height
        stacked = torch.zeros(shape, dtype=torch.bfloat16, device=self.upload.device)
        for pair, offset in zip(pairs, low.offsets, strict=True):
            rows = stacked[offset : offset + pair.rank, : len(own)]
            rows.copy_(self.upload(pair.v).float() * scale)
        return stacked
