"""The Triton kernels of `shard`, compared with the torch reference."""

import math
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor

from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig, RopeConfig
from runtime.kv import gpu
from runtime.kv.calibration import KVMoments
from runtime.kv.dense import DenseFormat
from runtime.kv.format import Plane
from runtime.kv.gpu import CompressedPageKernels
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.rotation import PageRotation
from runtime.kv.shard import ShardFormat, ShardOptions, calibrate
from runtime.kv.shard.decoder import KeyDecoder
from runtime.kv.windowed import WindowedFormat, WindowedLayer
from runtime.offline.bench.kv_formats import random_shard
from runtime.pages.window import first_recent
from tests.runtime.combinations import combinations
from tests.runtime.device import DEVICE, random
from tests.runtime.kv.compressed_data import PAGE, compressed_planes, gaussian, same_bits
from tests.runtime.kv.test_kernels import SMALL, WIDE, Sequences, on_device

pytestmark = [pytest.mark.triton, pytest.mark.long]
TOLERANCE = 2e-2
"""The kernels round weights to fp8, the reference does not."""


@dataclass
class Compared:
    """One layer of the format: its reference on the CPU, and its kernels on the device."""

    reference: ShardFormat
    on_device: ShardFormat

    @classmethod
    def of(cls, config: ModelConfig, rank: int | None = None) -> "Compared":
        config = replace(config, context_length=1100, num_layers=1)
        ranks = () if rank is None else (rank,)
        return cls(random_shard(config, ranks), random_shard(config, ranks, DEVICE))

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
        self.reference.layer(0).encode_reference(keys, values, first, planes, targets)

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.reference.layer(0).decode(planes, pages, first)

    @property
    def kernels(self) -> CompressedPageKernels:
        found = self.on_device.layer(0).kernels(DEVICE)
        assert isinstance(found, CompressedPageKernels)
        return found

    def stored(self, pages: int) -> tuple[Tensor, ...]:
        return compressed_planes(self.reference, pages)

    def sequences(self, config: ModelConfig, lengths: list[int]) -> Sequences:
        config = replace(config, context_length=1100)
        return Sequences.of(cast(QuantizedFormat, self), config, lengths)


def assert_nearly_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Codes of K may differ by 1 where a coefficient is at an edge; V has the same bits."""
    k, *others = (plane.cpu() for plane in found)
    assert same_bits(tuple(others), expected[1:])
    for shift in (0, 4):
        distance = (k >> shift & 15).int() - (expected[0] >> shift & 15).int()
        assert distance.abs().max() <= 1
        assert distance.count_nonzero() <= distance.numel() / 1000


@pytest.mark.parametrize("rank", [None, 4, 36, 128])
@pytest.mark.parametrize("dim", [64, 128])
def test_encode_is_near_the_reference(dim: int, rank: int | None) -> None:
    config = replace(SMALL, head_dim=dim)
    made = Compared.of(config, rank)
    keys = gaussian(config, 3).to(DEVICE)
    # A view of pages in another order of dimensions, as some caches have.
    values = keys.flip(0).transpose(1, 2).contiguous().transpose(1, 2)
    sources, targets = torch.tensor([2, 0, 1]), torch.tensor([3, 0, 4])
    first = torch.tensor([32, 16, 1008])
    found = on_device(made.stored(5))
    expected = made.stored(5)
    on = targets.to(DEVICE), sources.to(DEVICE), first.to(DEVICE)
    made.kernels.encode(keys, values, found, *on)
    made.encode_reference(keys.cpu()[sources], values.cpu()[sources], first, expected, targets)
    assert_nearly_equal(found, expected)
    again = on_device(made.stored(5))
    made.kernels.encode(keys, values, again, *(x[1:2] for x in on))
    assert same_bits(tuple(x[:1] for x in again), tuple(x[:1] for x in found))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which runs interpreted kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_tokens_that_are_not_finite_are_marked(bad: float) -> None:
    made = Compared.of(SMALL)
    keys, values = (gaussian(SMALL, 2, seed) for seed in (1, 2))
    keys[0, 1, 3, 63] = keys[1, 0, 15, 0] = values[1, 1, 0, 5] = bad
    found = on_device(made.stored(2))
    expected = made.stored(2)
    pages, first = torch.arange(2), torch.tensor([16, 64])
    made.encode_reference(keys, values, first, expected, pages)
    on = keys.to(DEVICE), values.to(DEVICE), found, pages.to(DEVICE), None, first.to(DEVICE)
    made.kernels.encode(*on)
    assert_nearly_equal(found, expected)
    k, v = made.decode(expected, pages, first)
    assert k[0, :, 3].isnan().all()
    assert v[0, :, 3].isnan().all()
    assert v[1, 1, 0].isnan().all()
    assert k.isnan().sum() == 2 * 2 * 64
    assert v.isnan().sum() == 5 * 64


@pytest.mark.parametrize(
    ("lengths", "dtype", "config"),
    combinations(
        [[1], [17, 95, 96], [700, 79, 111, 300]], [torch.float32, torch.bfloat16], [SMALL, WIDE]
    ),
)
def test_attend_is_dense_attention_over_decoded_pages(
    lengths: list[int], dtype: torch.dtype, config: ModelConfig
) -> None:
    made = Compared.of(config)
    sequences = made.sequences(config, lengths)
    q = random(len(lengths), config.num_heads, config.head_dim).to(dtype) * 4
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)
    again = made.kernels.attend(q, sequences.planes, sequences.batch)  # reuses partial results
    assert torch.equal(got, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [4, 36, 64, 128, 192, 256])
def test_attend_supports_any_rank(rank: int, dtype: torch.dtype) -> None:
    """Some ranks have a faster kernel for bf16 on GPUs."""
    config = replace(SMALL, head_dim=128)
    made = Compared.of(config, rank)
    sequences = made.sequences(config, [800, 150])
    q = random(2, 4, 128).to(dtype) * 4
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_attend_supports_means_that_are_far_larger_than_the_deviations() -> None:
    """Keys are fp16 in the kernel; one dimension of a head has a mean of 10^4 deviations."""
    made = Compared.of(SMALL)
    for one in (made.reference, made.on_device):
        layer = one.layer(0)
        mean = layer.k_mean.clone()
        mean[70], mean[100] = 5e3, -1e4
        decoder = KeyDecoder.of(layer.k_basis, layer.k_scale, mean, 2)
        one._layers[0] = replace(layer, k_mean=mean, k_decoder=decoder)
    sequences = made.sequences(SMALL, [200, 150])
    q = random(2, 4, 64)
    q[:, 2:, [6, 36]] = 0  # softmax is over the other dimensions
    q[:, 2:, [6 + 32, 36 - 32]] = 0  # RoPE mixes pairs
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    assert got.isfinite().all()
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("heads", [(5, 5), (9, 3), (20, 1)])
def test_attend_supports_groups_of_any_size(heads: tuple[int, int]) -> None:
    config = replace(SMALL, num_heads=heads[0], num_kv_heads=heads[1])
    made = Compared.of(config)
    sequences = made.sequences(config, [200, 150])
    q = random(2, heads[0], 64)
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_attend_scales_keys_as_yarn_does() -> None:
    rope = RopeConfig(scaling="yarn", factor=4.0, original_context=256, attention_factor=1.2)
    config = replace(SMALL, rope=rope)
    made = Compared.of(config)
    assert made.reference.layer(0).rotation.factor == 1.2
    sequences = made.sequences(config, [500, 150])
    q = random(2, 4, 64) * 3
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_marked_tokens_make_the_output_nan() -> None:
    made = Compared.of(SMALL)
    sequences = made.sequences(SMALL, [200, 150])
    page = int(sequences.batch.page_tables[1][1, 2])
    keys, values = (gaussian(SMALL, 1, seed) for seed in (1, 2))
    keys[0, 0, 7, 1] = math.nan
    stored = tuple(plane.cpu() for plane in sequences.planes[2:])
    made.encode_reference(keys, values, torch.tensor([32]), stored, torch.tensor([page]))
    planes = (*sequences.planes[:2], *on_device(stored))
    got = made.kernels.attend(random(2, 4, 64), planes, sequences.batch)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


@pytest.mark.parametrize("programs", [1, 3, 40])
def test_attend_is_independent_of_how_tiles_are_divided(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intervals begin within a sequence, where queries are rotated anew."""
    monkeypatch.setattr(gpu, "decode_programs", lambda device, each: programs)
    made = Compared.of(SMALL)
    sequences = made.sequences(SMALL, [1000, 1, 130, 300])
    q = random(4, 4, 64) * 3
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_attend_supports_many_sequences() -> None:
    """Their number exceeds the lanes of a warp."""
    config = replace(SMALL, head_dim=128)
    made = Compared.of(config, 192)
    sequences = made.sequences(config, [100 + 16 * (n % 5) for n in range(40)])
    q = random(40, 4, 128).to(torch.bfloat16) * 4
    got = made.kernels.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_lengths_may_change_between_launches() -> None:
    """A CUDA graph replays the same launch with other lengths in the same tensors."""
    made = Compared.of(SMALL)
    for lengths in ([600, 95], [96, 97], [1, 500]):
        sequences = made.sequences(SMALL, lengths)
        q = random(2, 4, 64)
        got = made.kernels.attend(q, sequences.planes, sequences.batch)
        torch.testing.assert_close(got, sequences.expected(q), rtol=TOLERANCE, atol=TOLERANCE)


def test_pages_that_leave_the_window_have_the_bits_of_bulk_encoding() -> None:
    lengths = [1, 15, 64, 80, 95, 96, 97, 111, 112, 160, 200]
    made = Compared.of(SMALL)
    sequences = made.sequences(SMALL, lengths)
    generator = torch.Generator().manual_seed(9)
    k, v = (
        torch.randn(plane.shape, generator=generator).to(torch.bfloat16).to(DEVICE)
        for plane in sequences.planes[:2]
    )
    stored = sequences.planes[2:]
    found, expected = (on_device(stored) for _ in range(2))
    made.kernels.encode_leaving((k, v, *found), sequences.batch)
    for number, length in enumerate(lengths):
        page = first_recent(length, PAGE) - 1
        if page >= first_recent(length - 1, PAGE):
            source, target = (
                table[number, page : page + 1].long() for table in sequences.batch.page_tables
            )
            first = torch.tensor([page * PAGE], device=DEVICE)
            made.kernels.encode(k, v, expected, target, source, first)
    assert not same_bits(found, stored)
    assert same_bits(found, expected)


def test_windowed_layer_uses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, context_length=400)
    made = Compared.of(config)
    windowed = WindowedFormat(DenseFormat(config, ReferenceAttention), made.on_device)
    layer = windowed.layer(0)
    assert isinstance(layer, WindowedLayer)
    sequences = made.sequences(config, [300, 95, 96])
    q = random(3, 4, 64)
    fused = layer.attend(q, sequences.planes, sequences.batch)
    monkeypatch.setattr(made.on_device, "fused", False)
    reference = layer.attend(q, sequences.planes, sequences.batch)
    torch.testing.assert_close(fused, reference, rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.equal(fused, reference)


@pytest.mark.parametrize("options", [{"allocation": "dynamic"}, {"values": "vq"}])
def test_other_codes_have_no_kernels(options: dict[str, str]) -> None:
    moments = KVMoments.of(SMALL, sample_every=1)
    q, k, v = (torch.randn(1, heads, 600, 64) for heads in (4, 2, 2))
    config = replace(SMALL, context_length=700, num_layers=1)
    moments.add(q, k, v, PageRotation(config))
    artifact = calibrate([moments], ShardOptions(**options), "")  # type: ignore[arg-type]
    kv_format = ShardFormat(config, artifact, device=DEVICE)
    assert not kv_format.fused
    assert kv_format.layer(0).kernels(DEVICE) is None
