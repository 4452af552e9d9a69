"""Options of `shard`: dynamic allocation of bits to K, codes of several widths, codebooks of V."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.errors import CalibrationError, KVFormatError
from runtime.kv import shard, two_bits
from runtime.kv.calibration import KVMoments
from runtime.kv.rotation import PageRotation
from runtime.kv.shard import codebook
from runtime.kv.shard.allocation import DROP_PENALTY, ERRORS, allocate
from runtime.kv.shard.codes import STEPS, decode_steps, encode_coefficients, runs_of
from runtime.kv.shard.commuting import commuting_basis
from runtime.kv.transforms import hadamard
from tests.runtime.kv.compressed_data import compressed_planes
from tests.runtime.kv.lowrank import (
    CONFIG,
    PAGE,
    activations,
    moments_of,
    orthonormal,
    pages_of,
    relative_error,
    round_trip,
)

BITS = [8, 6, 6, 6, 6, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2]
"""Bits of 15 coefficients in 1 + 3 + 1 + 2 bytes."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_errors_of_codes_are_those_of_normal_coefficients(bits: int) -> None:
    """Numeric integration over N(0, 1); rounding of the table's last digit is below 1 %."""
    x = torch.linspace(-9, 9, 180_004, dtype=torch.float64)[:, None]
    density = (-x.square() / 2).exp()
    runs = runs_of([8, *[bits] * 4])
    scale = torch.tensor([1.0, *[STEPS[bits]] * 4])
    coefficients = torch.cat((torch.zeros_like(x), x.expand(-1, 4)), 1).float()
    decoded = decode_steps(encode_coefficients(coefficients, scale, runs), runs) * scale
    squared = (decoded[:, 1:2].double() - x).square()
    assert float((squared * density).sum() / density.sum()) == pytest.approx(ERRORS[bits], rel=0.01)


def test_codes_of_all_widths_round_trip() -> None:
    """Every level of every width is decoded to itself, at every place in a byte."""
    runs = runs_of(BITS)
    assert [(run.stored.start, run.stored.stop) for run in runs] == [(0, 1), (1, 4), (4, 5), (5, 7)]
    scales = torch.arange(1.0, 16.0)
    levels = [
        torch.arange(-1.5, 2.0) if bits == 2 else torch.arange(1 - 2 ** (bits - 1), 2 ** (bits - 1))
        for bits in BITS
    ]
    drawn = [level[torch.randint(len(level), (500,))] for level in levels]
    coefficients = torch.stack(drawn, 1) * scales
    stored = encode_coefficients(coefficients, scales, runs)
    assert stored.shape == (500, 7)
    assert torch.equal(decode_steps(stored, runs) * scales, coefficients)
    far = encode_coefficients(coefficients.sign() * 1e30, scales, runs)
    largest = torch.stack([level.abs().max() for level in levels]) * scales
    assert torch.equal(decode_steps(far, runs) * scales, coefficients.sign() * largest)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 14])
def test_tokens_with_a_coefficient_that_is_not_finite_are_marked(bad: float, index: int) -> None:
    runs = runs_of(BITS)
    scales = torch.ones(15)
    coefficients = normal(3, 15)
    coefficients[1, index] = bad
    decoded = decode_steps(encode_coefficients(coefficients, scales, runs), runs) * scales
    assert decoded[1].isnan().any()
    assert decoded[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bits", [[2] * 4, [8, 2, 2], [3] * 8, [4], [], [8, 0]])
def test_unsuitable_bits_are_rejected(bits: list[int]) -> None:
    with pytest.raises(CalibrationError):
        runs_of(bits)


@pytest.mark.parametrize("budget", [4, 7, 12, 16, 30, 99])
def test_allocation_has_the_least_error_of_all(budget: int) -> None:
    variances = [9.0, 4.0, 1.0, 0.3]
    costs = {0: DROP_PENALTY, **ERRORS}

    def error(bits: tuple[int, ...]) -> float:
        return sum(costs[b] * v for b, v in zip(bits, variances, strict=True))

    possible = [
        bits for bits in itertools.product(costs, repeat=4) if sum(bits) <= budget and bits[0] >= 4
    ]
    found = tuple(allocate(variances, budget))
    assert found in possible
    assert error(found) == pytest.approx(min(map(error, possible)))


def test_penalty_keeps_groups_that_would_be_dropped() -> None:
    """Without the penalty, 2 more bits for the first group would save more than the third group."""
    variances = [9.0, 1.0, 0.08]
    assert (ERRORS[4] - ERRORS[6]) * 9.0 > (1 - ERRORS[2]) * 0.08
    assert allocate(variances, 8) == [4, 2, 2]


def test_allocation_needs_bits_for_the_first_group() -> None:
    with pytest.raises(KVFormatError, match="do not suffice"):
        allocate([1.0, 0.1], 3)


def decaying(tokens: int = 512, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with K of decaying variances over all heads, after RoPE."""
    basis = orthonormal(256, 256, seed=1)
    joined = (normal(tokens, 256, seed=seed) * torch.logspace(0.5, -1.5, 256)) @ basis.T
    k = joined.view(tokens, 4, 64).transpose(0, 1)
    first = torch.tensor([PAGE])
    rotated = PageRotation(CONFIG).apply(k[None], first)[0]
    v = activations(orthonormal(4, 64, 64, seed=2), seed + 1, tokens)
    return rotated.repeat_interleave(2, 0), rotated, v


def formats(**options: object) -> shard.ShardFormat:
    moments = KVMoments.of(CONFIG, sample_every=1)
    reference = moments_of(CONFIG, decaying())
    for name in ("keys", "values", "unrotated_keys", "unrotated_sum", "tokens"):
        setattr(moments, name, getattr(reference, name))
    moments.value_samples = [decaying()[2]]
    made = shard.calibrate([moments] * 2, shard.ShardOptions(**options), "m")  # type: ignore[arg-type]
    return shard.ShardFormat(CONFIG, made)


def test_dynamic_allocation_has_smaller_errors_at_the_same_bytes() -> None:
    _, k, v = decaying(seed=9)
    errors, sizes = {}, {}
    for allocation in ("uniform", "dynamic"):
        made = formats(allocation=allocation)
        keys, values = round_trip(made, pages_of(k), pages_of(v))
        errors[allocation] = relative_error(keys, pages_of(k))
        sizes[allocation] = made.planes(0, PAGE)[0].shape
        assert relative_error(values, pages_of(v)) < 0.45
    assert sizes["uniform"] == sizes["dynamic"] == (4, PAGE, 6)
    assert errors["dynamic"] < 0.8 * errors["uniform"]
    assert formats(allocation="dynamic").describe(0).startswith("K 16 x ")


def test_groups_that_do_not_fill_the_bytes_of_a_head_are_padded() -> None:
    """16 coefficients of 4 bits and 16 of 2 bits are 12 bytes; 5 heads would have 3 each."""
    made = formats(allocation="dynamic", rank=16, group=16)
    used = made.layer(0).k_runs[-1].stored.stop
    width = made.planes(0, PAGE)[0].shape[2]
    assert 4 * (width - 1) < used <= 4 * width
    _, k, v = decaying(seed=9)
    planes = compressed_planes(made, len(pages_of(k)))
    pages = torch.arange(len(planes[0]))
    made.layer(0).encode(pages_of(k), pages_of(v), (1 + pages) * PAGE, planes, pages)
    joined = planes[0].transpose(1, 2).flatten(2)
    assert not joined[..., used:].any()


@pytest.mark.parametrize(
    "options",
    [{"allocation": "x"}, {"values": "x"}, {"allocation": "dynamic", "group": 24}, {"step": 0.0}],
)
def test_unsuitable_options_are_rejected(options: dict[str, object]) -> None:
    with pytest.raises(KVFormatError):
        formats(**options)


@pytest.mark.long
def test_codebook_has_smaller_errors_than_scalar_codes_on_its_own_samples() -> None:
    """The bound of 2 bits is 0.25 for normal values, that of scalar codes 0.345 = sqrt(0.1188)."""
    values = normal(2, 1024, 64).to(torch.bfloat16)
    book = codebook.train(values, 0)
    assert book.shape == (256, 4)
    assert torch.equal(book, codebook.train(values, 0))
    assert not torch.equal(book, codebook.train(values, 1))
    pages = values.view(2, 64, PAGE, 64).transpose(0, 1)
    by_book = codebook.dequantize(*codebook.quantize(pages, book), book)
    scalar = two_bits.dequantize(*two_bits.quantize(pages))
    assert relative_error(by_book, pages) < 0.97 * relative_error(scalar, pages)
    assert relative_error(scalar, pages) == pytest.approx(0.345, rel=0.02)


def test_vectors_are_stored_as_the_nearest_entry() -> None:
    book = normal(256, 4)
    entries = torch.randint(256, (3, 2, PAGE, 16), generator=torch.Generator().manual_seed(1))
    transformed = book[entries].flatten(-2)
    values = hadamard(transformed * 8 / transformed.norm(dim=-1, keepdim=True))
    codes, norms = codebook.quantize(values, book)
    assert torch.equal(norms, torch.full_like(norms, 8.0))
    expected = torch.cdist(hadamard(values).view(-1, 4), book).argmin(1)
    assert torch.equal(codes.flatten().long(), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_codebook_keeps_zeros_and_marks_values_that_are_not_finite(bad: float) -> None:
    values = normal(1, 2, PAGE, 64)
    values[0, 0, 3], values[0, 1, 5, 7] = 0.0, bad
    book = normal(256, 4, seed=1)
    decoded = codebook.dequantize(*codebook.quantize(values, book), book)
    assert not decoded[0, 0, 3].any()
    assert decoded[0, 1, 5].isnan().all()
    decoded[0, 1, 5] = 0.0
    assert decoded.isfinite().all()


@pytest.mark.long
def test_pages_with_codebooks_do_not_depend_on_other_pages() -> None:
    made = formats(values="vq", allocation="dynamic")
    assert made.describe(1).endswith("V 256 vectors")
    _, k, v = decaying(seed=9)
    keys, values = pages_of(k)[:5], pages_of(v)[:5]
    together = round_trip(made, keys, values)
    planes = compressed_planes(made, 1, layer=1)
    page = torch.zeros(1, dtype=torch.int64)
    made.layer(1).encode(keys[2:3], values[2:3], page + 3 * PAGE, planes, page)
    alone = made.layer(1).decode(planes, page, page + 3 * PAGE)
    for found, expected in zip(alone, together, strict=True):
        assert torch.equal(found[0], expected[2])


def test_codebooks_need_samples_and_fit_the_format() -> None:
    moments = moments_of(CONFIG, decaying())
    with pytest.raises(KVFormatError, match="no values were kept"):
        shard.calibrate([moments], shard.ShardOptions(values="vq"), "")
    with pytest.raises(KVFormatError, match="too few"):
        codebook.train(normal(1, 7, 64), 0)
    made = shard.calibrate([moments] * 2, shard.ShardOptions(), "")
    tensors = {**made.tensors, "v_book.0": torch.zeros(16, 4)}
    with pytest.raises(CalibrationError, match=r"v_book\.0"):
        shard.ShardFormat(CONFIG, replace(made, tensors=tensors))
    tensors = {**made.tensors, "k_bits.1": torch.full((48,), 3)}
    with pytest.raises(CalibrationError, match="layer 1: 48 coefficients of 3 bits"):
        shard.ShardFormat(CONFIG, replace(made, tensors=tensors))


def test_commuting_basis_is_orthonormal_with_descending_deviations() -> None:
    factor = normal(24, 24, seed=3).double()
    covariance = factor @ factor.T
    deviations, basis = commuting_basis(covariance, 3)
    torch.testing.assert_close(basis.T @ basis, torch.eye(24, dtype=torch.float64))
    variances = (basis.T @ covariance @ basis).diagonal()
    torch.testing.assert_close(deviations.square(), variances)
    assert (deviations[:-1] >= deviations[1:]).all()


def test_projection_onto_commuting_components_commutes_with_rope() -> None:
    """Both parts of a component are kept: RoPE rotates them into each other."""
    factor = normal(256, 256, seed=4).double() * torch.logspace(0.5, -1.5, 256)[:, None]
    _, basis = commuting_basis(factor @ factor.T, 4)
    support = (basis.view(4, 2, 32, 256) != 0).any(0).any(0)  # frequencies of each column
    assert (support.sum(0) == 1).all()
    of_frequency = basis[:, support[5]].float()  # 2 columns of each of 4 components
    plane = of_frequency[:, :1]
    turned = torch.cat((-plane.view(4, 2, 32)[:, 1:], plane.view(4, 2, 32)[:, :1]), 1).view(-1, 1)
    pair = torch.cat((plane, turned), 1)
    assert relative_error(of_frequency @ (of_frequency.T @ turned), turned) < 1e-6
    keys = normal(3, 4, PAGE, 64)
    first = torch.tensor([16, 160, 480])

    def projected(x: Tensor) -> Tensor:
        tokens = x.transpose(1, 2).flatten(2) @ pair @ pair.T
        return tokens.view(3, PAGE, 4, 64).transpose(1, 2)

    rotation = PageRotation(CONFIG)
    expected = rotation.apply(projected(keys), first)
    assert relative_error(projected(rotation.apply(keys, first)), expected) < 1e-5


def test_commuting_option_is_recorded_and_served() -> None:
    moments = [moments_of(CONFIG, decaying())] * 2
    made = shard.calibrate(moments, shard.ShardOptions(k_basis="commuting"), "")
    assert made.options["k_basis"] == "commuting"
    best = shard.calibrate(moments, shard.ShardOptions(), "")
    _, k, v = decaying(seed=1)
    errors = []
    for artifact in (best, made):
        keys, _ = round_trip(shard.ShardFormat(CONFIG, artifact), pages_of(k), pages_of(v))
        errors.append(relative_error(keys, pages_of(k)))
    assert errors[0] < errors[1] < 1
    with pytest.raises(KVFormatError, match="commuting"):
        shard.ShardOptions(k_basis="fourier")
