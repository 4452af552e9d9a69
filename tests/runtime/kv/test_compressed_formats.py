"""Properties that every compressed KV format has."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from runtime.config import ModelConfig
from runtime.kv.cache import CacheLayout
from runtime.kv.compressed import CompressedFormat
from runtime.kv.fp8 import FP8Format
from runtime.kv.int4 import Int4Format
from runtime.kv.k4v2 import K4V2Format
from runtime.pages.sizes import token_bytes
from tests.runtime.kv.compressed_data import (
    LLAMA_3_8B,
    PAGE,
    SMOLLM2_135M,
    compressed_planes,
    gaussian,
    round_trip,
    same_bits,
)

Create = Callable[[ModelConfig], CompressedFormat]


def fp8_e5m2(config: ModelConfig) -> FP8Format:
    return FP8Format(config, torch.float8_e5m2)


FORMATS: dict[str, Create] = {
    "fp8": FP8Format,
    "fp8-e5m2": fp8_e5m2,
    "int4": Int4Format,
    "k4v2": K4V2Format,
}


@pytest.fixture(params=FORMATS)
def create(request: pytest.FixtureRequest) -> Create:
    return FORMATS[request.param]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_their_names(name: str) -> None:
    assert FORMATS[name](SMOLLM2_135M).name == name


@pytest.mark.parametrize(
    ("name", "llama", "smollm2"),
    [("fp8", 2064, 390), ("fp8-e5m2", 2064, 390), ("int4", 1088, 216), ("k4v2", 816, 162)],
)
def test_bytes_per_token_of_a_layer(name: str, llama: int, smollm2: int) -> None:
    for config, expected in ((LLAMA_3_8B, llama), (SMOLLM2_135M, smollm2)):
        planes = FORMATS[name](config).planes(0, PAGE)
        layout = CacheLayout(PAGE, config.num_kv_heads, (planes,))
        assert token_bytes(layout.page_bytes) == expected


def test_only_floating_point_codes_are_encodable(create: Create) -> None:
    for plane in create(SMOLLM2_135M).planes(0, PAGE):
        is_fp8 = plane.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        assert plane.encodable == is_fp8, plane


def test_encode_writes_all_bytes_of_its_targets_and_no_others(create: Create) -> None:
    kv_format = create(SMOLLM2_135M)
    keys, values = gaussian(SMOLLM2_135M, 3, 1), gaussian(SMOLLM2_135M, 3, 2)
    targets, others = torch.tensor([6, 0, 3]), torch.tensor([1, 2, 4, 5])
    written = []
    for fill in (0x00, 0xA5):
        planes = compressed_planes(kv_format, 7, fill)
        untouched = tuple(plane[others].clone() for plane in planes)
        kv_format.layer(0).encode(keys, values, targets * PAGE, planes, targets)
        assert same_bits(tuple(plane[others] for plane in planes), untouched)
        written.append(tuple(plane[targets] for plane in planes))
    assert same_bits(*written)


@pytest.mark.parametrize("config", [SMOLLM2_135M, LLAMA_3_8B], ids=["d64", "d128"])
def test_pages_have_the_same_bits_alone_and_together(create: Create, config: ModelConfig) -> None:
    kv_format = create(config)
    layer = kv_format.layer(0)
    keys, values = gaussian(config, 5, 1), gaussian(config, 5, 2)
    ids = torch.arange(5)
    together, alone = compressed_planes(kv_format, 5), compressed_planes(kv_format, 5)
    layer.encode(keys, values, ids * PAGE, together, ids)
    for at in (4, 1, 0, 3, 2):
        # A view of one page in another order of dimensions, as some caches have.
        one = slice(at, at + 1)
        key, value = (x[one].transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
        layer.encode(key, value, ids[one] * PAGE, alone, ids[one])
    assert same_bits(together, alone)
    decoded = layer.decode(together, ids, ids * PAGE)
    for at in range(5):
        single = layer.decode(together, ids[[at]], ids[[at]] * PAGE)
        assert same_bits(single, tuple(x[[at]] for x in decoded))


def test_decode_reads_pages_in_the_given_order(create: Create) -> None:
    kv_format = create(SMOLLM2_135M)
    layer = kv_format.layer(0)
    keys, values = gaussian(SMOLLM2_135M, 3, 1), gaussian(SMOLLM2_135M, 3, 2)
    planes = compressed_planes(kv_format, 9)
    targets = torch.tensor([8, 2, 5])
    layer.encode(keys, values, targets * PAGE, planes, targets)
    decoded = layer.decode(planes, targets, targets * PAGE)
    assert [x.dtype for x in decoded] == [torch.float32] * 2
    assert same_bits(decoded, round_trip(kv_format, keys, values))


def test_no_pages_are_encoded_and_decoded(create: Create) -> None:
    kv_format = create(SMOLLM2_135M)
    keys, values = round_trip(kv_format, *[gaussian(SMOLLM2_135M, 0)] * 2)
    assert keys.shape == values.shape == (0, 3, PAGE, 64)


def test_zero_vectors_decode_to_zero(create: Create) -> None:
    keys, values = gaussian(SMOLLM2_135M, seed=1), gaussian(SMOLLM2_135M, seed=2)
    keys[1, 2, 3], values[2, 0, 15] = 0, 0
    k, v = round_trip(create(SMOLLM2_135M), keys, values)
    assert (k[1, 2, 3] == 0).all()
    assert (v[2, 0, 15] == 0).all()
    assert int((k == 0).all(-1).sum()) == int((v == 0).all(-1).sum()) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("element", [0, 63])
def test_non_finite_elements_make_only_their_vector_nan(
    create: Create, bad: float, element: int
) -> None:
    kv_format = create(SMOLLM2_135M)
    keys, values = gaussian(SMOLLM2_135M, seed=1), gaussian(SMOLLM2_135M, seed=2)
    k, v = round_trip(kv_format, keys, values)
    keys[1, 2, 3, element], values[2, 0, 15, element] = bad, bad
    k[1, 2, 3], v[2, 0, 15] = math.nan, math.nan
    decoded = round_trip(kv_format, keys, values)
    torch.testing.assert_close(decoded, (k, v), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("power", [-40, -9, 9, 40])
def test_errors_do_not_depend_on_the_magnitude(create: Create, power: int) -> None:
    """Scales and norms have the range of bf16: a factor of 2**n stays exact."""
    kv_format = create(SMOLLM2_135M)
    keys, values = gaussian(SMOLLM2_135M, seed=1), gaussian(SMOLLM2_135M, seed=2)
    expected = tuple(x * 2.0**power for x in round_trip(kv_format, keys, values))
    assert same_bits(round_trip(kv_format, keys * 2.0**power, values * 2.0**power), expected)


def test_keys_and_values_are_independent(create: Create) -> None:
    kv_format = create(SMOLLM2_135M)
    keys, values, other = (gaussian(SMOLLM2_135M, seed=seed) for seed in (1, 2, 3))
    k, v = round_trip(kv_format, keys, values)
    assert torch.equal(k, round_trip(kv_format, keys, other)[0])
    assert torch.equal(v, round_trip(kv_format, other, values)[1])


@pytest.mark.parametrize("head_dim", [2, 48, 80, 96])
@pytest.mark.parametrize("name", ["int4", "k4v2"])
def test_head_dims_without_a_hadamard_transform_are_refused(name: str, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"{name} needs a head dimension .*, not {head_dim}"):
        FORMATS[name](replace(SMOLLM2_135M, head_dim=head_dim))
