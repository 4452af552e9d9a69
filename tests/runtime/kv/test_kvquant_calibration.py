"""Codes, levels and calibrations of kvquant, and of fdc and palu with quantized latents."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.errors import CalibrationError, KVFormatError
from runtime.kv import fdc, kvquant, shard
from runtime.kv.calibration import KVMoments
from runtime.kv.compressed import COMPRESSED
from runtime.kv.kvquant.codes import edges_of, pack_codes, unpack_codes
from runtime.kv.kvquant.levels import fit_levels
from runtime.kv.registry import calibrated_format, create_format, from_artifact
from runtime.kv.rotation import PageRotation
from tests.runtime.kv.calibrated import QUANTIZED, quantized_calibration
from tests.runtime.kv.compressed_data import same_bits
from tests.runtime.kv.lowrank import (
    CONFIG,
    PAGE,
    round_trip,
)
from tests.runtime.kv.quantized import HASH, NAMES, calibration, create, held_out, moments
from tests.runtime.tiny import CONFIG as TINY


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


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
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
            from_artifact(kind, replace(artifact, **other), CONFIG, HASH)


def test_quantized_calibration_is_refused_where_the_codes_would_be_ignored() -> None:
    """A format of the name `fdc` must not read it as a calibration of bf16 latents."""
    with pytest.raises(CalibrationError, match=r"is of KV format fdc\+kvquant .*, not of fdc"):
        fdc.FdcFormat(CONFIG, calibration("fdc"), HASH)
    with pytest.raises(CalibrationError, match=r"fdc\+kvquant version .*, not of palu"):
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
def test_created_format_has_compressed_planes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    artifact = quantized_calibration(name)
    artifact.save(path)
    made = create_format(f"{name}:{path}", TINY, torch.device("cpu"), torch.float32)
    assert made.artifact_hash == artifact.hash
    stored = [plane.name for plane in made.planes(0, PAGE) if plane.group == COMPRESSED]
    assert stored == [
        *("k_stored", "v_stored", "v_scale_stored", "outlier_stored", "outlier_index_stored")
    ]
