"""Compressed pages of kvquant, and of fdc and palu with quantized latents."""

import math
from dataclasses import replace

import pytest
import torch

from runtime.kv import fdc, kvquant
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.calibration import KVMoments
from runtime.kv.compressed import CompressedFormat
from runtime.kv.kvquant.codes import VectorCode
from runtime.kv.registry import CALIBRATED, from_artifact
from runtime.kv.rotation import PageRotation
from runtime.pages.plan import PageCount
from runtime.pages.sizes import token_bytes
from tests.runtime.kv.compressed_data import compressed_planes, is_unwritten, same_bits
from tests.runtime.kv.lowrank import (
    CONFIG,
    PAGE,
    activations,
    orthonormal,
    pages_of,
    relative_error,
    round_trip,
)
from tests.runtime.kv.quantized import HASH, NAMES, calibration, create, held_out, text


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=[(4, 1, 1), (3, 2, 0), (4, 0, 0), (3, 0, 3)], ids=str)
def made(request: pytest.FixtureRequest, name: str) -> CompressedFormat:
    bits, of_k, of_v = request.param
    return create(name, bits=bits, k_outliers=of_k, v_outliers=of_v)


@pytest.mark.few(4)
def test_pages_encoded_alone_or_together_are_identical(made: CompressedFormat) -> None:
    keys, values = held_out()
    first = (1 + torch.arange(16)) * PAGE
    layer = made.layer(1)
    together, alone = (compressed_planes(made, 17, layer=1) for _ in range(2))
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
        planes = tuple(plane.fill_(fill) for plane in compressed_planes(made, 7))
        made.layer(0).encode(keys, values, targets * PAGE, planes, targets)
        assert all((plane[others] == fill).all() for plane in planes)
        written.append(tuple(plane[targets] for plane in planes))
    assert same_bits(*written)


def test_no_pages_are_encoded(made: CompressedFormat) -> None:
    planes = compressed_planes(made, 2)
    none = torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0, 4, PAGE, 64, dtype=torch.bfloat16)
    made.layer(0).encode(empty, empty, none, planes, none)
    keys, values = made.layer(0).decode(planes, none, none)
    assert keys.shape == values.shape == empty.shape
    assert all(map(is_unwritten, planes))


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


@pytest.mark.few(8)
@pytest.mark.parametrize(("of_k", "of_v"), [(0, 0), (1, 1), (2, 0), (0, 3)])
@pytest.mark.parametrize("bits", [3, 4])
def test_bytes_per_token_are_those_of_the_allocated_pages(
    name: str, bits: int, of_k: int, of_v: int
) -> None:
    made = create(name, bits=bits, k_outliers=of_k, v_outliers=of_v)
    width = 64 if name.startswith("kvquant") else 48
    layout = CacheLayout.of(made, num_layers=2, page_size=PAGE)  # type: ignore[arg-type]
    expected = 2 * 4 * (2 * width * bits // 8 + 2 + (of_k + of_v) * 3)
    assert token_bytes(layout.page_bytes) == expected
    cache = PagedCache(layout, PageCount(10))
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


@pytest.mark.slow
@pytest.mark.few(1)
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
        CONFIG, replace(artifact, format=name, version=artifact.version // 100), HASH, "cpu"
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
    page = torch.arange(2)
    planes = compressed_planes(made, 2)
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


def test_heads_of_lower_rank_keep_their_channels() -> None:
    """K of head 0 has rank 16, that of the others 64: errors are those of the codes."""
    _, k, v = text()
    k = torch.cat((activations(orthonormal(1, 64, 16, seed=2), 1, k.shape[1]), k[1:]))
    found = KVMoments.of(CONFIG, page_every=1)
    q, keys, values = (
        torch.cat((x[:, :PAGE], x), 1)[None] for x in (k.repeat_interleave(2, 0), k, v)
    )
    found.add(q, keys, values, PageRotation(CONFIG))
    layers = [found] * 2
    made = fdc.calibrate(layers, fdc.FdcOptions(removal_rate=1e-4), HASH)
    latents = fdc.FdcFormat(CONFIG, made)
    assert latents.layer(0).k_ranks == (16, 64, 64, 64)
    codes = kvquant.quantize_latents(made, latents, layers, kvquant.CodeOptions())
    decoded = round_trip(from_artifact("fdc", codes, CONFIG), pages_of(k), pages_of(v))
    for head in range(4):
        assert relative_error(decoded[0][:, head], pages_of(k)[:, head]) < 0.15
