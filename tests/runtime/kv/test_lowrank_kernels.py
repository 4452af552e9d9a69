"""The Triton kernels of `fdc` and `palu`, compared with the torch references."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor

from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig
from runtime.kv import gpu
from runtime.kv.calibration import Artifact
from runtime.kv.dense import DenseFormat
from runtime.kv.fdc import FdcFormat
from runtime.kv.fdc.format import FdcLayer
from runtime.kv.format import Plane
from runtime.kv.gpu import CompressedPageKernels
from runtime.kv.palu import PaluFormat
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.windowed import WindowedFormat
from runtime.offline.bench.kv_formats import fdc_artifact, random_fdc, random_palu
from runtime.pages.window import first_recent
from runtime.parallel.partition import Partition
from tests.runtime.combinations import combinations
from tests.runtime.device import DEVICE, random
from tests.runtime.kv.compressed_data import PAGE, compressed_planes, gaussian, same_bits
from tests.runtime.kv.test_kernels import SMALL, TOLERANCE, WIDE, Sequences, on_device

pytestmark = [pytest.mark.triton, pytest.mark.long]

ULP = 2**-7
"""Largest relative difference of two neighbouring bf16 numbers."""
Format = FdcFormat | PaluFormat


@dataclass
class Compared:
    """One layer of a format: its reference on the CPU, and its kernels on the device."""

    reference: Format
    on_device: Format

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        return self.reference.planes(layer, page_size)

    def encode_reference(
        self,
        keys: Tensor,
        values: Tensor,
        first: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        self.reference.layer(0).encode(keys, values, first, planes, targets)

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.reference.layer(0).decode(planes, pages, first)

    @property
    def kernels(self) -> CompressedPageKernels:
        found = self.on_device.layer(0).kernels(DEVICE)
        assert isinstance(found, CompressedPageKernels)
        return found

    def sequences(self, config: ModelConfig, lengths: list[int]) -> Sequences:
        return Sequences.of(cast(QuantizedFormat, self), config, lengths)


def fdc(config: ModelConfig) -> Compared:
    """Return `fdc` with ranks of 16 to 48, of which a tile has powers of two and others."""
    ranks = 48, 16, 32, 48, 16
    return Compared(random_fdc(config, ranks), random_fdc(config, ranks, DEVICE))


def palu(config: ModelConfig, ranks: tuple[int, int] = (48, 40)) -> Compared:
    """Return `palu` with the largest groups. Latents of K are one or several chunks of 64."""
    group = max(g for g in range(1, 5) if config.num_kv_heads % g == 0)
    made = (random_palu(config, ranks, device, group) for device in ("cpu", DEVICE))
    return Compared(*made)


FORMATS = {"fdc": fdc, "palu": palu}
Create = Callable[[ModelConfig], Compared]


@pytest.fixture(params=FORMATS)
def create(request: pytest.FixtureRequest) -> Create:
    return FORMATS[request.param]


def nearly_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Return whether few elements differ, by one rounding to bf16: sums have another order."""
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=ULP, atol=1e-5)
        if (left != right).float().mean() > 0.01:
            return False
    return True


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_encode_is_near_the_reference(create: Create, dim: int) -> None:
    config = replace(SMALL, head_dim=dim, context_length=200)
    made = create(config)
    if not made.reference.fused:
        pytest.skip("the head dimension has no kernels")
    keys = gaussian(config, 3).to(DEVICE)
    # A view of pages in another order of dimensions, as some caches have.
    values = keys.flip(0).transpose(1, 2).contiguous().transpose(1, 2)
    sources, targets = torch.tensor([2, 0, 1]), torch.tensor([3, 0, 4])
    first = torch.tensor([32, 16, 96])
    found, expected = on_device(compressed_planes(made, 5)), compressed_planes(made, 5)  # type: ignore[arg-type]
    on = targets.to(DEVICE), sources.to(DEVICE), first.to(DEVICE)
    made.kernels.encode(keys, values, found, *on)
    made.encode_reference(keys.cpu()[sources], values.cpu()[sources], first, expected, targets)
    assert nearly_equal(tuple(plane.cpu() for plane in found), expected)
    again = on_device(compressed_planes(made, 5))  # type: ignore[arg-type]
    alone = tuple(x[1:2] for x in on)
    made.kernels.encode(keys, values, again, *alone)
    assert same_bits(tuple(x[:1] for x in again), tuple(x[:1] for x in found))


def test_encode_stores_zeros_beyond_the_ranks() -> None:
    made = fdc(SMALL)
    found = on_device(compressed_planes(made, 1))  # type: ignore[arg-type]
    page = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    keys = gaussian(SMALL, 1).to(DEVICE)
    made.kernels.encode(keys, keys, found, page, None, page)
    layer = made.reference.layer(0)
    assert isinstance(layer, FdcLayer)
    for plane, ranks in zip(found, (layer.k_ranks, layer.v_ranks), strict=True):
        for head, rank in enumerate(ranks):
            flat = plane[0, head].flatten()
            assert (flat[: PAGE * rank] != 0).float().mean() > 0.99
            assert not flat[PAGE * rank :].any()


@pytest.mark.parametrize(
    ("create", "lengths", "dtype", "config"),
    combinations(
        list(FORMATS),
        [[1], [17, 95, 96], [700, 79, 111, 300]],
        [torch.float32, torch.bfloat16],
        [SMALL, WIDE],
    ),
    indirect=["create"],
)
def test_attend_is_dense_attention_over_decoded_pages(
    create: Create, lengths: list[int], dtype: torch.dtype, config: ModelConfig
) -> None:
    config = replace(config, context_length=800)
    made = create(config)
    sequences = made.sequences(config, lengths)
    q = random(len(lengths), config.num_heads, config.head_dim).to(dtype)
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)
    again = made.kernels.attend(q, sequences.planes, sequences.batch)  # reuses partial results
    assert torch.equal(got, again)


@pytest.mark.parametrize(
    ("create", "heads"),
    combinations(list(FORMATS), [(5, 5), (9, 3), (20, 1), (8, 4)], covered=1),
    indirect=["create"],
)
def test_attend_supports_groups_of_any_size(create: Create, heads: tuple[int, int]) -> None:
    config = replace(SMALL, num_heads=heads[0], num_kv_heads=heads[1], context_length=300)
    made = create(config)
    sequences = made.sequences(config, [200, 150])
    q = random(2, heads[0], 64)
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("create", "programs"), combinations(list(FORMATS), [1, 3, 40], covered=1), indirect=["create"]
)
def test_attend_is_independent_of_how_tiles_are_divided(
    create: Create, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "decode_programs", lambda device, each: programs)
    config = replace(SMALL, context_length=1000)
    made = create(config)
    sequences = made.sequences(config, [1000, 1, 130, 300])
    q = random(4, 4, 64)
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_lengths_may_change_between_launches(create: Create) -> None:
    """A CUDA graph replays the same launch with other lengths in the same tensors."""
    config = replace(SMALL, context_length=700)
    made = create(config)
    for lengths in ([600, 95], [96, 97], [1, 500]):
        sequences = made.sequences(config, lengths)
        q = random(2, 4, 64)
        got = made.kernels.attend(q, sequences.planes, sequences.batch)
        torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_ranks_attend_to_their_heads_and_store_them_as_one_rank_does() -> None:
    """The planes of `fdc` are wider than the ranks of the heads of the second rank."""
    config = replace(SMALL, num_heads=6, num_kv_heads=3, context_length=300)
    artifact = fdc_artifact(config, (48, 16, 32, 48, 16, 16))
    whole = FdcFormat(config, artifact, device=DEVICE)
    kernels = whole.layer(0).kernels(DEVICE)
    assert kernels is not None
    keys = gaussian(config, 2).to(DEVICE)
    pages = torch.arange(2, device=DEVICE)
    expected = on_device(compressed_planes(whole, 2))
    kernels.encode(keys, keys, expected, pages, None, pages)
    for rank in range(2):
        part = Partition.of(config, rank, 2).config_of(config)
        own = slice(part.kv_heads.start, part.kv_heads.stop)
        made = Compared(FdcFormat(part, artifact), FdcFormat(part, artifact, device=DEVICE))
        found = on_device(compressed_planes(made, 2))  # type: ignore[arg-type]
        made.kernels.encode(keys[:, own], keys[:, own], found, pages, None, pages)
        assert same_bits(found, tuple(plane[:, own] for plane in expected))
        sequences = made.sequences(part, [200, 150])
        q = random(2, part.num_heads, part.head_dim)
        got = made.kernels.attend(q, sequences.planes, sequences.batch)
        torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_pages_that_leave_the_window_have_the_bits_of_prompts(create: Create) -> None:
    lengths = [1, 15, 64, 80, 95, 96, 97, 111, 112, 160, 200]
    config = replace(SMALL, context_length=300)
    made = create(config)
    sequences = made.sequences(config, lengths)
    k, v = (gaussian(config, len(sequences.planes[0]), seed).to(DEVICE) for seed in (1, 2))
    stored = sequences.planes[2:]
    found, expected = (on_device(stored) for _ in range(2))
    made.kernels.encode_leaving((k, v, *found), sequences.batch)
    left = []
    for number, length in enumerate(lengths):
        page = first_recent(length, PAGE) - 1
        if page >= first_recent(length - 1, PAGE):
            left.append((number, page))
    rows, pages = torch.tensor(left, device=DEVICE).T
    sources, targets = (table[rows, pages].long() for table in sequences.batch.page_tables)
    made.kernels.encode(k, v, expected, targets, sources, pages * PAGE)
    assert not same_bits(found, stored)
    assert same_bits(found, expected)


def test_non_finite_tokens_are_stored_as_such() -> None:
    made = fdc(SMALL)
    keys = gaussian(SMALL, 1).to(DEVICE)
    keys[0, 0, 3, 5] = math.nan
    found = on_device(compressed_planes(made, 1))  # type: ignore[arg-type]
    page = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    made.kernels.encode(keys, keys, found, page, None, page)
    k, _ = made.reference.layer(0).decode(tuple(x.cpu() for x in found), page.cpu(), page.cpu())
    assert k[0, 0, 3].isnan().all()
    assert k[0, 0, [0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("programs", "options"),
    combinations(
        [8, 40], [{"by_cost": False}, {"splits": 0}, {"splits": 1}, {"splits": 3}], covered=1
    ),
)
def test_attend_is_independent_of_the_division_of_tiles(
    options: dict[str, int], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ablations of balancing."""
    monkeypatch.setattr(gpu, "decode_programs", lambda device, each: programs)
    made = fdc(SMALL)
    sequences = made.sequences(SMALL, [1000, 1, 130, 300])
    q = random(4, 4, 64)
    source = replace(made.reference.kernel_source(), **options)  # type: ignore[arg-type]
    inputs = made.on_device.layer(0).kernel_inputs()
    kernels = CompressedPageKernels(SMALL, source).of_layer(inputs)
    got = kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_windowed_layer_uses_the_kernels(create: Create) -> None:
    config = replace(SMALL, context_length=400)
    made = create(config)
    sequences = made.sequences(config, [300, 95, 96])
    q = random(3, 4, 64)
    exact = DenseFormat(config, ReferenceAttention)
    windowed = WindowedFormat(exact, made.on_device)
    found = windowed.layer(0).attend(q, sequences.planes, sequences.batch)
    made.on_device.fused = False
    reference = windowed.layer(0).attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(found, reference, rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.equal(found, reference)


def test_bases_without_kernels_are_not_fused() -> None:
    """Rows of other ranks are not aligned, and K before RoPE has to be rebuilt."""
    assert random_fdc(SMALL, (48, 16)).fused
    assert not random_fdc(SMALL, (48, 20)).fused
    made = random_fdc(SMALL, (48,))
    tensors = {f"{x}_basis.{n}": getattr(made.layer(n), f"{x}_basis") for n in (0, 1) for x in "kv"}
    tensors |= {f"{x}_ranks": torch.full((2, 2), 48) for x in "kv"}
    options = {"prc": False}
    before_rope = FdcFormat(SMALL, Artifact("fdc", FdcFormat.version, "", options, tensors))
    assert not before_rope.fused
    assert before_rope.layer(0).kernels(DEVICE) is None
    assert random_palu(SMALL, (48, 40), group_heads=2).fused
    assert not random_palu(SMALL, (48, 20), group_heads=2).fused
    assert not random_palu(replace(SMALL, head_dim=96), (48, 40), group_heads=2).fused
    assert not random_palu(replace(SMALL, num_kv_heads=8, num_heads=8), (16, 16), "cpu", 8).fused
