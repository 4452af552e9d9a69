"""Format kvquant, and fdc and palu with quantized latents."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.errors import CalibrationError, KVFormatError
from runtime.kv import fdc, kvquant, palu, shard
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.calibration import Artifact, KVMoments
from runtime.kv.compressed import CompressedFormat
from runtime.kv.kvquant.codes import VectorCode, edges_of, pack_codes, unpack_codes
from runtime.kv.kvquant.levels import fit_levels
from runtime.kv.registry import CALIBRATED, calibrated_format, create_format, from_artifact
from runtime.kv.rotation import PageRotation
from tests.runtime.kv.calibrated import QUANTIZED, quantized_calibration
from tests.runtime.kv.compressed_data import same_bits
from tests.runtime.kv.lowrank import (
    CONFIG,
    PAGE,
    activations,
    orthonormal,
    pages_of,
    relative_error,
    round_trip,
    stored_planes,
)
from tests.runtime.tiny import CONFIG as TINY

HASH = "model"
NAMES = "kvquant", "kvquant-before", "fdc", "palu"


def text(seed: int = 0, tokens: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v with means, decaying spectra and some large elements."""
    generator = torch.Generator().manual_seed(seed)

    def part(heads: int, at: int) -> Tensor:
        x = activations(orthonormal(heads, 64, 64, seed=heads), seed + at, tokens)
        large = torch.rand(x.shape, generator=generator) < 0.005
        return torch.where(large, 20.0, x * torch.linspace(3, 0.1, 64) + 0.2)

    return part(8, 0), part(4, 1), part(4, 2)


@cache
def moments() -> list[KVMoments]:
    """Return moments of `text` for 2 layers, with all pages as samples."""
    found = KVMoments.of(CONFIG, page_every=1)
    q, k, v = (torch.cat((x[:, :PAGE], x), 1)[None] for x in text())
    found.add(q, k, v, PageRotation(CONFIG))
    return [found] * 2


@cache
def calibration(name: str, **options: int | str) -> Artifact:
    """Return the calibration of one of `NAMES`."""
    kind, _, before = name.partition("-")
    if kind == "kvquant":
        rope = {"rope": "before"} if before else {}
        chosen = kvquant.KvQuantOptions(**options, **rope)  # type: ignore[arg-type]
        return kvquant.calibrate(moments(), chosen, HASH, CONFIG)
    made = (
        fdc.calibrate(moments(), fdc.FdcOptions(rank=48), HASH)
        if kind == "fdc"
        else palu.calibrate(moments(), palu.PaluOptions(rank=48), HASH)
    )
    codes = kvquant.CodeOptions(**options)  # type: ignore[arg-type]
    return kvquant.quantize_latents(made, CALIBRATED[kind](CONFIG, made), moments(), codes)


def create(name: str, **options: int | str) -> CompressedFormat:
    return from_artifact(name.partition("-")[0], calibration(name, **options), CONFIG, HASH)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=[(4, 1, 1), (3, 2, 0), (4, 0, 0), (3, 0, 3)], ids=str)
def made(request: pytest.FixtureRequest, name: str) -> CompressedFormat:
    bits, of_k, of_v = request.param
    return create(name, bits=bits, k_outliers=of_k, v_outliers=of_v)


def held_out(pages: int = 16) -> tuple[Tensor, Tensor]:
    _, k, v = text(seed=50)
    return pages_of(k)[:pages], pages_of(v)[:pages]


def test_pages_encoded_alone_or_together_are_identical(made: CompressedFormat) -> None:
    keys, values = held_out()
    first = (1 + torch.arange(16)) * PAGE
    layer = made.layer(1)
    together, alone = (stored_planes(made, 1, 17) for _ in range(2))
    layer.encode(keys, values, first, together, torch.arange(16))
    for page in (7, 0, *range(15, 0, -1)):
        one = slice(page, page + 1)
        key, value = (x[one].transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
        layer.encode(key, value, first[one], alone, torch.tensor([page]))
    assert same_bits(together, alone)
    both = layer.decode(together, torch.arange(16), first)
    last = layer.decode(together, torch.tensor([15, 2]), first[[15, 2]])
    assert same_bits(tuple(x[[15, 2]] for x in both), last)


def test_encode_writes_all_bytes_of_its_targets_and_no_others(made: CompressedFormat) -> None:
    keys, values = held_out(3)
    targets, others = torch.tensor([6, 0, 3]), torch.tensor([1, 2, 4, 5])
    written = []
    for fill in (0, 77):
        planes = tuple(plane.fill_(fill) for plane in stored_planes(made, 0, 7))
        made.layer(0).encode(keys, values, targets * PAGE, planes, targets)
        assert all((plane[others] == fill).all() for plane in planes)
        written.append(tuple(plane[targets] for plane in planes))
    assert same_bits(*written)


def test_no_pages_are_encoded(made: CompressedFormat) -> None:
    planes, none = stored_planes(made, 0, 2), torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0, 4, PAGE, 64, dtype=torch.bfloat16)
    made.layer(0).encode(empty, empty, none, planes, none)
    keys, values = made.layer(0).decode(planes, none, none)
    assert keys.shape == values.shape == empty.shape
    assert all((plane == 77).all() for plane in planes)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_that_are_not_finite_decode_to_nan(made: CompressedFormat, bad: float) -> None:
    """K and V of the token and head become NaN; with latents of `palu`, K of the whole group."""
    keys, values = held_out(4)
    k, v = round_trip(made, keys, values)
    keys[1, 2, 3, 63], values[2, 0, 15, 0] = bad, bad
    found = round_trip(made, keys, values)
    heads = slice(None) if made.name.startswith("palu") else slice(2, 3)
    for tensor in (k, v):
        tensor[1, heads, 3] = math.nan
    k[2, slice(None) if made.name.startswith("palu") else 0, 15] = math.nan
    v[2, 0, 15] = math.nan
    torch.testing.assert_close(found, (k, v), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("of_k", "of_v"), [(0, 0), (1, 1), (2, 0), (0, 3)])
@pytest.mark.parametrize("bits", [3, 4])
def test_bytes_per_token_are_those_of_the_allocated_pages(
    name: str, bits: int, of_k: int, of_v: int
) -> None:
    made = create(name, bits=bits, k_outliers=of_k, v_outliers=of_v)
    width = 64 if name.startswith("kvquant") else 48
    layout = CacheLayout.of(made, num_layers=2, page_size=PAGE)  # type: ignore[arg-type]
    expected = 2 * 4 * (2 * width * bits // 8 + 2 + (of_k + of_v) * 3)
    assert layout.bytes_per_token == expected
    cache = PagedCache(layout, num_pages=10)
    assert sum(plane.nbytes for plane in cache.planes) == 10 * PAGE * expected
    assert not any(plane.encodable for _, plane in layout.planes)


@pytest.mark.parametrize(
    "options", [{}, {"bits": 3, "v_outliers": 2}, {"levels": "uniform", "k_outliers": 1}]
)
def test_errors_are_bounded_by_the_levels_and_outliers_are_exact(
    options: dict[str, int | str],
) -> None:
    """Within the levels, an element is at most half an interval from its level.

    Room: rounding of fp32, and of scales of tokens to bf16.
    """
    made = create("kvquant", **options)
    assert isinstance(made, kvquant.KvQuantFormat)
    exact = held_out()
    for code, x, decoded in zip(
        (made.layer(0).keys, made.layer(0).values), exact, round_trip(made, *exact), strict=True
    ):
        found = code.analyze(x.float())
        at = torch.zeros(found.z.shape, dtype=torch.bool).scatter(-1, found.outliers, True)
        assert int(at.sum()) == code.outliers * found.scale.numel()
        assert torch.equal(decoded[at], x.float()[at])
        levels = code.levels
        within = ~at & (found.z >= levels[0]) & (found.z <= levels[-1])
        assert within.float().mean() > 0.9
        bound = levels.diff().max() / 2 * found.scale.float() * code.scale[:, None] * (1 + 2**-7)
        errors = (decoded - x.float()).abs()
        assert (errors <= bound)[within].all()


@pytest.mark.parametrize("name", ["kvquant", "fdc"])
def test_more_bits_and_outliers_have_smaller_errors(name: str) -> None:
    exact = held_out()
    errors = {}
    for bits, outliers, levels in (
        *((4, 1, "kmeans"), (3, 1, "kmeans"), (4, 0, "kmeans"), (4, 0, "uniform")),
    ):
        made = create(name, bits=bits, k_outliers=outliers, v_outliers=outliers, levels=levels)
        decoded = round_trip(made, *exact)
        errors[bits, outliers, levels] = [
            relative_error(found, x) for found, x in zip(decoded, exact, strict=True)
        ]
    best, *others, uniform = errors.values()
    assert all(a < b for other in others for a, b in zip(best, other, strict=True))
    assert all(a < b for a, b in zip(errors[4, 0, "kmeans"], uniform, strict=True))


@pytest.mark.parametrize("name", ["fdc", "palu"])
def test_quantized_latents_decode_close_to_the_latents(name: str) -> None:
    artifact = calibration(name)
    latents = CALIBRATED[name](
        CONFIG, replace(artifact, format=name, version=artifact.version // 100), HASH
    )
    exact = held_out()
    expected = round_trip(latents, *exact)
    found = round_trip(from_artifact(name, artifact, CONFIG, HASH), *exact)
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    assert 0 < min(errors) <= max(errors) < 0.2


def test_keys_before_rope_have_the_positions_of_their_page() -> None:
    """The same K at other positions is other K before RoPE, and decodes equally well."""
    made = create("kvquant-before")
    keys, values = held_out(2)
    page, planes = torch.arange(2), stored_planes(made, 0, 2)
    made.layer(0).encode(keys, values, page * 96 + 48, planes, page)
    decoded = made.layer(0).decode(planes, page, page * 96 + 48)[0]
    moved = made.layer(0).decode(planes, page, page * 96 + 64)[0]
    assert relative_error(decoded, keys) < 0.2 < relative_error(moved, keys)


def test_outliers_are_those_with_the_largest_loss_and_the_first_of_equal_ones() -> None:
    levels = torch.linspace(-1, 1, 8)
    ones = torch.ones(1, 8)
    keys = VectorCode(0 * ones, ones, ones, levels, 2, by_token=False)
    weighted = replace(keys, weight=torch.tensor([[1.0] * 7 + [5.0]]))
    values = replace(keys, by_token=True)
    x = torch.tensor([0.0, 5.0, 0, 5.0, 0, 5.0, 0, -4.0])[None, None, None]
    assert keys.encode(x).indices.flatten().tolist() == [1, 3]
    assert weighted.encode(x).indices.flatten().tolist() == [7, 1]
    coded = values.encode(x)
    assert coded.indices.flatten().tolist() == [1, 3]
    assert coded.scale.item() == 5.0
    assert torch.equal(values.decode(coded)[0, 0, 0, [1, 3, 5]], torch.full((3,), 5.0))


def test_scales_of_tokens_ignore_outliers() -> None:
    made = create("kvquant", v_outliers=1)
    keys, values = held_out(1)
    decoded = round_trip(made, keys, values)[1]
    values[0, 0, 0, 9] = 1e30
    changed = round_trip(made, keys, values)[1]
    assert changed[0, 0, 0, 9] == values[0, 0, 0, 9]
    others = torch.arange(64) != 9
    exact = values[0, 0, 0, others].float()
    assert relative_error(changed[0, 0, 0, others], exact) < 0.2
    assert same_bits((decoded[0, 1:],), (changed[0, 1:],))


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_round_trip(bits: int) -> None:
    codes = torch.randint(2**bits, (5, 24), generator=torch.Generator().manual_seed(0)).byte()
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, 24 * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)


def test_codes_of_three_bits_are_low_bits_then_high_bits() -> None:
    codes = torch.tensor([[5, 1, 2, 3, 4, 0, 7, 6]], dtype=torch.uint8)
    low = [1 | 2 << 2 | 0 << 4 | 3 << 6, 1 | 3 << 2 | 0 << 4 | 2 << 6]
    assert pack_codes(codes, 3).tolist() == [[*low, 0b11010001]]


def brute_force(samples: Tensor, weights: Tensor, levels: Tensor) -> float:
    return float((weights * (samples[:, None] - levels).square().amin(1)).sum())


def test_kmeans_levels_are_a_local_optimum() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(4000, generator=generator) + 5
    weights = torch.rand(4000, generator=generator)
    levels = fit_levels(samples, weights, 8, "kmeans")
    best = brute_force(samples, weights, levels)
    for at in range(8):
        for step in (-0.05, 0.05):
            moved = levels.clone()
            moved[at] += step
            assert brute_force(samples, weights, moved) > best
    uniform = fit_levels(samples, weights, 8, "uniform")
    assert best < 0.6 * brute_force(samples, weights, uniform)
    torch.testing.assert_close(uniform.diff(), uniform.diff()[:1].expand(7))
    torch.testing.assert_close(uniform, -uniform.flip(0))
    # Each level is the mean of its interval; Lloyd's iteration is not complete.
    nearest = torch.bucketize(samples, edges_of(levels))
    means = [
        float((weights * samples)[nearest == n].sum() / weights[nearest == n].sum())
        for n in range(8)
    ]
    torch.testing.assert_close(levels, torch.tensor(means), rtol=0.01, atol=0)


def test_levels_follow_the_weights() -> None:
    """Most samples are near 0, but only the others count."""
    important = torch.arange(10.0, 18.0)
    samples = torch.cat((torch.linspace(-1, 1, 101), important))
    levels = fit_levels(samples, torch.where(samples < 2, 1e-9, 1.0), 8, "kmeans")
    torch.testing.assert_close(levels, important)


def test_sample_pages_are_evenly_spaced() -> None:
    rotation = PageRotation(CONFIG)
    k = torch.arange(2.0)[:, None, None, None] * 100 + torch.arange(90.0)[None, None, :, None]
    k = k.expand(2, 4, 90, 64)
    q = torch.zeros(2, 8, 90, 64)
    for calls in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        found = KVMoments.of(CONFIG, page_every=3)
        for rows in calls:
            found.add(q[rows], k[rows], -k[rows], rotation)
        keys, values, first = (torch.cat(x) for x in zip(*found.sample_pages, strict=True))
        # Pages 1 to 4 of each text of 90 tokens; every third of these 8.
        assert first.tolist() == [16, 64, 48]
        assert keys[:, 0, 0, 0].tolist() == [16, 64, 148]
        assert torch.equal(values, -keys)
        assert keys.shape == (3, 4, PAGE, 64)
    assert not KVMoments.of(CONFIG).sample_pages


def test_artifact_round_trip_and_other_models(name: str, tmp_path: Path) -> None:
    kind, path = name.partition("-")[0], tmp_path / "kv.safetensors"
    artifact = calibration(name, bits=3)
    artifact.save(path)
    again = calibration.__wrapped__(name, bits=3)
    assert again.hash == artifact.hash != calibration(name).hash
    loaded = calibrated_format(f"{kind}:{path}", CONFIG, HASH)
    assert loaded.artifact_hash == artifact.hash
    assert loaded.name == ("kvquant" if kind == "kvquant" else f"{kind}+kvquant")
    assert same_bits(round_trip(loaded, *held_out()), round_trip(create(name, bits=3), *held_out()))
    with pytest.raises(CalibrationError, match=rf"{path}: .* to model model, not to other"):
        calibrated_format(f"{kind}:{path}", CONFIG, "other")
    for changes in ({"num_layers": 3}, {"num_kv_heads": 2}, {"head_dim": 32}):
        with pytest.raises(KVFormatError):
            calibrated_format(f"{kind}:{path}", replace(CONFIG, **changes), HASH)  # type: ignore[arg-type]
    for other in ({"format": "none"}, {"version": 99}):
        with pytest.raises(CalibrationError, match="not of"):
            from_artifact(kind, replace(artifact, **other), CONFIG, HASH)  # type: ignore[arg-type]


def test_quantized_calibration_is_refused_where_the_codes_would_be_ignored() -> None:
    """A format of the name `fdc` must not read it as a calibration of bf16 latents."""
    with pytest.raises(CalibrationError, match=r"is of KV format fdc\+kvquant version 201, not of"):
        fdc.FdcFormat(CONFIG, calibration("fdc"), HASH)
    with pytest.raises(CalibrationError, match=r"fdc\+kvquant version 201, not of palu"):
        from_artifact("palu", calibration("fdc"), CONFIG, HASH)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("v_levels.1"), r"no tensor 'v_levels\.1'"),
        (lambda t: t.update({"k_levels.0": torch.ones(15)}), "8 or 16 numbers in ascending"),
        (lambda t: t.update({"k_levels.0": -torch.arange(16.0)}), "8 or 16 numbers in ascending"),
        (lambda t: t.update({"v_code.0": torch.zeros(3, 4, 64)}), "scale that is not positive"),
        (lambda t: t.update({"v_code.0": torch.ones(3, 4, 32)}), "but this model needs"),
        (lambda t: t.update({"k_code.1": torch.full((3, 4, 64), math.nan)}), "NaN"),
        (lambda t: t.pop("k_code.1"), "1 layers, but this model 2"),
    ],
)
def test_malformed_calibrations_are_rejected(
    damage: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    artifact = calibration("kvquant")
    tensors = dict(artifact.tensors)
    damage(tensors)
    with pytest.raises(CalibrationError, match=message):
        from_artifact("kvquant", replace(artifact, tensors=tensors), CONFIG, HASH)


@pytest.mark.parametrize("outliers", [None, "1", -1, 5, True])
def test_impossible_numbers_of_outliers_are_rejected(outliers: object) -> None:
    artifact = calibration("kvquant")
    options = {**artifact.options, "v_outliers": outliers}
    with pytest.raises(CalibrationError, match="outliers"):
        from_artifact("kvquant", replace(artifact, options=options), CONFIG, HASH)


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2},
        {"bits": 8},
        {"k_outliers": -1},
        {"v_outliers": 5},
        {"levels": "x"},
        {"rope": "x"},
    ],
)
def test_unsuitable_options_are_rejected(options: dict[str, int | str]) -> None:
    with pytest.raises(KVFormatError):
        kvquant.KvQuantOptions(**options)  # type: ignore[arg-type]


def test_formats_with_codes_of_their_own_are_not_quantized_again() -> None:
    made = shard.calibrate(moments(), shard.ShardOptions(), HASH)
    with pytest.raises(KVFormatError, match="KV format shard cannot be quantized again"):
        kvquant.quantize_latents(
            made, shard.ShardFormat(CONFIG, made), moments(), kvquant.CodeOptions()
        )
    for name in ("int4", "k4v2", "fp8", "stream4", "shard", "kvquant"):
        with pytest.raises(KVFormatError, match=f"KV format {name} cannot be quantized"):
            kvquant.check_quantizable(name)
    forged = replace(made, format="shard+kvquant")
    with pytest.raises(KVFormatError, match="KV format shard cannot be quantized again"):
        from_artifact("shard", forged, CONFIG, HASH)


def test_calibration_needs_sample_pages_and_a_suitable_head_dimension() -> None:
    without = KVMoments.of(CONFIG)
    with pytest.raises(KVFormatError, match="layer 0: no pages were kept"):
        kvquant.calibrate([without], kvquant.KvQuantOptions(), HASH, CONFIG)
    with pytest.raises(KVFormatError, match="multiple of 8 dimensions up to 256, not 20"):
        from_artifact("kvquant", calibration("kvquant"), replace(CONFIG, head_dim=20), HASH)
    with pytest.raises(KVFormatError, match="15 samples are too few for 16"):
        fit_levels(torch.ones(15), torch.ones(15), 16, "kmeans")


@pytest.mark.parametrize("name", QUANTIZED)
def test_created_format_has_stored_planes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    artifact = quantized_calibration(name)
    artifact.save(path)
    made = create_format(f"{name}:{path}", TINY, torch.device("cpu"), torch.float32)
    assert made.artifact_hash == artifact.hash
    stored = [plane.name for plane in made.planes(0, PAGE) if plane.stored]
    assert stored == [
        *("k_stored", "v_stored", "v_scale_stored", "outlier_stored", "outlier_index_stored")
    ]
