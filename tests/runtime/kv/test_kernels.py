"""The Triton kernels of formats with compressed pages, compared with the torch reference."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig
from runtime.kv import gpu
from runtime.kv.dense import DenseFormat
from runtime.kv.gpu import CompressedPageKernels
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.registry import COMPRESSED
from runtime.kv.windowed import WindowedFormat, WindowedLayer
from runtime.pages.window import SINK_PAGES, first_recent
from tests.runtime.combinations import combinations
from tests.runtime.device import DEVICE, random
from tests.runtime.kv.compressed_data import (
    LLAMA_3_8B,
    PAGE,
    SMOLLM2_135M,
    compressed_planes,
    gaussian,
    heavy_tailed,
    same_bits,
)

pytestmark = [pytest.mark.triton, pytest.mark.long]

SMALL = replace(SMOLLM2_135M, num_heads=4, num_kv_heads=2)
"""4 query heads, 2 KV heads of 64."""
WIDE = replace(LLAMA_3_8B, num_heads=8, num_kv_heads=1)
FUSED = [name for name, create in COMPRESSED.items() if getattr(create(SMALL), "fused", False)]
"""Formats with Triton kernels."""
Create = Callable[[ModelConfig], QuantizedFormat]


@pytest.fixture(params=FUSED)
def create(request: pytest.FixtureRequest) -> Create:
    return cast(Create, COMPRESSED[request.param])


def on_device(planes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return copies of planes; those in one block remain in one block."""
    copies: dict[int, torch.UntypedStorage] = {}
    moved = []
    for plane in planes:
        storage = plane.untyped_storage()
        if storage.data_ptr() not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=plane.device).set_(storage)
            copies[storage.data_ptr()] = whole.to(DEVICE, copy=True).untyped_storage()
        made = torch.empty(0, dtype=plane.dtype, device=DEVICE)
        own = copies[storage.data_ptr()]
        moved.append(made.set_(own, plane.storage_offset(), plane.shape, plane.stride()))
    return tuple(moved)


def kernels_of(kv_format: QuantizedFormat) -> CompressedPageKernels:
    found = kv_format.kernels(DEVICE)
    assert isinstance(found, CompressedPageKernels)
    return found


def special(config: ModelConfig, pages: int = 3) -> Tensor:
    """Return pages with vectors of all magnitudes, zeros, infinities and NaN."""
    x = gaussian(config, pages, seed=5)
    powers = torch.tensor([-130, -126, -100, -20, -7, 0, 3, 20, 100, 120, 126])
    x[0, 0, :11] *= (2.0**powers)[:, None]
    x[1, 0, 0] = 0
    x[1, 0, 1, 1:] = 0
    x[1, 0, 2] = 3e38
    x[1, 0, 3] = 1
    x[1, 0, 4] = 2.0**-133
    x[1, 0, 5, 5], x[1, 0, 6, 0], x[1, 0, 7, -1] = math.inf, math.nan, -math.inf
    x[1, 0, 8, ::2], x[1, 0, 9, 1::2] = 448, -57344
    x[2, 0, 0] *= torch.linspace(-14, 0, x.shape[-1]).exp2()
    return x


def _supports_head_dim(name: str, dim: int, _: object) -> bool:
    """Return whether a format has kernels; the Hadamard transform needs a power of two."""
    if dim == 96 and name not in ("fp8", "fp8-e5m2"):
        return False
    return cast(QuantizedFormat, COMPRESSED[name](replace(SMALL, head_dim=dim))).fused


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which runs interpreted kernels
@pytest.mark.parametrize(
    ("create", "dim", "data"),
    combinations(
        FUSED, [32, 64, 96, 128], [gaussian, heavy_tailed, special], valid=_supports_head_dim
    ),
    indirect=["create"],
)
def test_encode_has_the_bits_of_the_reference(
    create: Create, dim: int, data: Callable[[ModelConfig, int], Tensor]
) -> None:
    config = replace(SMALL, head_dim=dim)
    kv_format = create(config)
    keys = data(config, 3).to(DEVICE)
    # A view of pages in another order of dimensions, as some caches have.
    values = keys.flip(0).transpose(1, 2).contiguous().transpose(1, 2)
    targets = torch.tensor([3, 0, 2], device=DEVICE)
    found, expected = (on_device(compressed_planes(kv_format, 5)) for _ in range(2))
    kernels_of(kv_format).encode(keys, values, found, targets)
    kv_format.encode_reference(keys, values, targets * PAGE, expected, targets)
    assert same_bits(found, expected)


def test_encode_reads_given_pages(create: Create) -> None:
    kv_format = create(SMALL)
    keys, values = gaussian(SMALL, 6, 1).to(DEVICE), gaussian(SMALL, 6, 2).to(DEVICE)
    sources, targets = (torch.tensor(ids, device=DEVICE) for ids in ([5, 0, 2], [1, 3, 0]))
    found, expected = (on_device(compressed_planes(kv_format, 5)) for _ in range(2))
    kernels_of(kv_format).encode(keys, values, found, targets, sources)
    arguments = keys[sources], values[sources], targets * PAGE
    kv_format.encode_reference(*arguments, expected, targets)
    assert same_bits(found, expected)


@dataclass
class Sequences:
    """Decoding sequences of a model over both kinds of pages, and what attention must return.

    Attributes:
        planes: K, V and the compressed planes. Slots without a token are NaN, and so are the
            full-precision pages of compressed tokens.
        before: the compressed planes before the pages that leave the window are encoded.
        k, v: fp32 K and V of each sequence as attention reads them, `[pages, kv_heads, PAGE, dim]`.
    """

    kv_format: QuantizedFormat
    batch: Batch
    planes: tuple[Tensor, ...]
    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def of(
        cls, kv_format: QuantizedFormat, config: ModelConfig, lengths: Sequence[int]
    ) -> "Sequences":
        counts = [-(-length // PAGE) for length in lengths]
        total = sum(counts)
        generator = torch.Generator().manual_seed(1)
        full_precision_ids, compressed_ids = (
            torch.split(torch.randperm(total, generator=generator) + 1, counts) for _ in range(2)
        )
        batch = Batch.of(
            [
                SequenceSlice([0], length - 1, own.tolist(), more_pages=[other.tolist()])
                for length, own, other in zip(
                    lengths, full_precision_ids, compressed_ids, strict=True
                )
            ],
            DEVICE,
        )
        full_precision = [torch.full_like(gaussian(config, total + 1), math.nan) for _ in range(2)]
        compressed_planes_ = compressed_planes(kv_format, total + 1, 0xFF)
        ks, vs = [], []
        for number, length in enumerate(lengths):
            k, v = (
                heavy_tailed(config, counts[number], 7 * number + i).clamp(-4, 4) for i in (0, 1)
            )
            k[-1, :, (length - 1) % PAGE + 1 :] = math.nan
            v[-1, :, (length - 1) % PAGE + 1 :] = math.nan
            recent = first_recent(length, PAGE)
            old = torch.arange(SINK_PAGES, recent)
            targets = compressed_ids[number][old]
            kv_format.encode_reference(k[old], v[old], old * PAGE, compressed_planes_, targets)
            for plane, x in zip(full_precision, (k, v), strict=True):
                plane[full_precision_ids[number]] = x
                plane[full_precision_ids[number][old]] = math.nan
            k, v = k.float(), v.float()
            if len(old):
                k[old], v[old] = kv_format.decode(compressed_planes_, targets, old * PAGE)
            ks.append(k.to(DEVICE))
            vs.append(v.to(DEVICE))
        planes = on_device((*full_precision, *compressed_planes_))
        return cls(kv_format, batch, planes, ks, vs)

    def expected(self, q: Tensor) -> Tensor:
        """Return dense attention over the decoded pages."""
        rows = []
        for number, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            length = int(self.batch.lengths[number])
            alone = Batch.of([SequenceSlice([0], length - 1, list(range(len(k))))], DEVICE)
            rows.append(ReferenceAttention().attend(q[number : number + 1], k, v, alone))
        return torch.cat(rows)


TOLERANCE = 1e-2
"""Queries, after the transform, and weights times scales are rounded to bf16."""


@pytest.mark.parametrize(
    ("create", "lengths", "dtype", "config"),
    combinations(
        FUSED,
        [[1], [17, 95, 96], [700, 79, 111, 300]],
        [torch.float32, torch.bfloat16],
        [SMALL, WIDE],
    ),
    indirect=["create"],
)
def test_attend_is_dense_attention_over_decoded_pages(
    create: Create, lengths: list[int], dtype: torch.dtype, config: ModelConfig
) -> None:
    sequences = Sequences.of(create(config), config, lengths)
    q = random(len(lengths), config.num_heads, config.head_dim).to(dtype)
    kernels = kernels_of(sequences.kv_format)
    got = kernels.attend(q, sequences.planes, sequences.batch)
    expected = sequences.expected(q)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
    again = kernels.attend(q, sequences.planes, sequences.batch)  # reuses partial results
    assert torch.equal(got, again)


@pytest.mark.parametrize(
    ("create", "heads"),
    combinations(FUSED, [(5, 5), (9, 3), (20, 1)], covered=1),
    indirect=["create"],
)
def test_attend_supports_groups_of_any_size(create: Create, heads: tuple[int, int]) -> None:
    config = replace(SMALL, num_heads=heads[0], num_kv_heads=heads[1])
    sequences = Sequences.of(create(config), config, [200, 150])
    q = random(2, heads[0], 64)
    got = kernels_of(sequences.kv_format).attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dim", [20, 96])
def test_fp8_attends_with_other_head_dims(dim: int) -> None:
    config = replace(SMALL, head_dim=dim)
    sequences = Sequences.of(cast(QuantizedFormat, COMPRESSED["fp8"](config)), config, [200, 150])
    q = random(2, 4, dim)
    got = kernels_of(sequences.kv_format).attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("create", "programs"), combinations(FUSED, [1, 3, 40], covered=1), indirect=["create"]
)
def test_attend_is_independent_of_how_tiles_are_divided(
    create: Create, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program takes all tiles, or intervals begin and end in both kinds of tiles."""
    monkeypatch.setattr(gpu, "decode_programs", lambda device, each: programs)
    sequences = Sequences.of(create(SMALL), SMALL, [1000, 1, 130, 300])
    q = random(4, 4, 64)
    kernels = kernels_of(sequences.kv_format)
    got = kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_lengths_may_change_between_launches(create: Create) -> None:
    """A CUDA graph replays the same launch with other lengths in the same tensors."""
    kv_format = create(SMALL)
    kernels = kernels_of(kv_format)
    for lengths in ([600, 95], [96, 97], [1, 500]):
        sequences = Sequences.of(kv_format, SMALL, lengths)
        q = random(2, 4, 64)
        got = kernels.attend(q, sequences.planes, sequences.batch)
        torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_pages_that_leave_the_window_are_encoded(create: Create) -> None:
    """Compare with the reference, which reads lengths on the host."""
    lengths = [1, 15, 64, 80, 95, 96, 97, 111, 112, 160, 200]
    kv_format = create(SMALL)
    sequences = Sequences.of(kv_format, SMALL, lengths)
    generator = torch.Generator().manual_seed(9)
    k, v = (
        torch.randn(plane.shape, generator=generator).to(torch.bfloat16).to(DEVICE)
        for plane in sequences.planes[:2]
    )
    stored = sequences.planes[2:]
    found, expected = (on_device(stored) for _ in range(2))
    kernels_of(kv_format).encode_leaving((k, v, *found), sequences.batch)
    for number, length in enumerate(lengths):
        page = first_recent(length, PAGE) - 1
        if page >= first_recent(length - 1, PAGE):
            source, target = (
                table[number, page : page + 1].long() for table in sequences.batch.page_tables
            )
            kv_format.encode_reference(k[source], v[source], target, expected, target)
    assert not same_bits(found, stored)
    assert same_bits(found, expected)


def test_windowed_layer_uses_the_kernels(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, context_length=400)
    kv_format = create(config)
    windowed = WindowedFormat(DenseFormat(config, ReferenceAttention), kv_format)
    layer = windowed.layer(0)
    assert isinstance(layer, WindowedLayer)
    lengths = [300, 95, 96]
    sequences = Sequences.of(kv_format, config, lengths)
    q = random(3, 4, 64)
    expected = layer.attend(q, sequences.planes, sequences.batch)
    monkeypatch.setattr(QuantizedFormat, "kernels", lambda self, device: None)
    reference = layer.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(expected, reference, rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.equal(expected, reference)
