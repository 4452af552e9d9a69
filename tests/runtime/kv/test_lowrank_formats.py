"""Formats fdc, palu and shard: encoding, decoding, sizes and artifacts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.errors import KVFormatError
from runtime.kv import fdc, palu, shard, two_bits
from runtime.kv.calibration import KVMoments
from runtime.kv.rotation import PageRotation
from tests.runtime.kv.compressed_data import compressed_planes, is_unwritten
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

HASH = "model"
BF16 = 2**-8
"""Largest relative error of rounding to bf16, with room for the order of summation."""

Format = fdc.FdcFormat | palu.PaluFormat | shard.ShardFormat


def rotated(unrotated: Tensor) -> Tensor:
    """Apply RoPE to ``[heads, n, dim]`` at positions from 16."""
    return PageRotation(CONFIG).apply(unrotated[None], torch.tensor([PAGE]))[0]


def low_rank_text(rank: int, *, before_rope: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of which k and v, and q after RoPE, have a rank per head."""
    basis = orthonormal(4, 64, rank, seed=3)
    q = activations(basis.repeat_interleave(2, 0), 4)
    k = activations(basis, 5)
    v = activations(orthonormal(4, 64, rank, seed=6), 7)
    return q, rotated(k) if before_rope else k, v


def full_text(seed: int = 0, tokens: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v with decaying spectra and means other than 0."""
    parts = [
        activations(orthonormal(h, 64, 64, seed=h), seed + i, tokens)
        for i, h in enumerate((8, 4, 4))
    ]
    q, k, v = (x * torch.linspace(3, 0.1, 64) + 0.2 for x in parts)
    return q, rotated(k), v


def create(name: str, layers: list[KVMoments], config: ModelConfig = CONFIG) -> Format:
    options: dict[str, Any] = {
        "fdc": fdc.FdcOptions(rank=32),
        "palu": palu.PaluOptions(rank=32),
        "shard": shard.ShardOptions(),
    }
    if name == "fdc":
        return fdc.FdcFormat(config, fdc.calibrate(layers, options[name], HASH), HASH)
    if name == "palu":
        return palu.PaluFormat(config, palu.calibrate(layers, options[name], HASH), HASH)
    return shard.ShardFormat(config, shard.calibrate(layers, options[name], HASH), HASH)


@pytest.fixture(scope="module", params=["fdc", "palu", "shard"])
def kv_format(request: pytest.FixtureRequest) -> Format:
    return create(request.param, [moments_of(CONFIG, full_text())] * 2)


def test_pages_encoded_alone_or_together_are_identical(kv_format: Format) -> None:
    _, k, v = full_text(seed=50)
    keys, values = pages_of(k), pages_of(v)
    first = (1 + torch.arange(16)) * PAGE
    layer = kv_format.layer(1)
    together, alone, some = (compressed_planes(kv_format, 17, layer=1) for _ in range(3))
    layer.encode(keys, values, first, together, torch.arange(16))
    for page in range(16):
        one = slice(page, page + 1)
        layer.encode(keys[one], values[one], first[one], alone, torch.tensor([page]))
    layer.encode(keys[3:10], values[3:10], first[3:10], some, torch.arange(3, 10))
    for a, b, c in zip(together, alone, some, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[3:10], c[3:10])
        assert is_unwritten(a[16])
        assert not is_unwritten(a[:16])
    both = layer.decode(together, torch.arange(16), first)
    last = layer.decode(together, torch.tensor([15]), first[15:])
    assert all(torch.equal(x[15:], y) for x, y in zip(both, last, strict=True))


def test_no_pages_are_encoded(kv_format: Format) -> None:
    planes = compressed_planes(kv_format, 2)
    none = torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0, 4, PAGE, 64, dtype=torch.bfloat16)
    kv_format.layer(0).encode(empty, empty, none, planes, none)
    keys, values = kv_format.layer(0).decode(planes, none, none)
    assert keys.shape == values.shape == empty.shape
    assert all(map(is_unwritten, planes))


def test_decoded_pages_are_close_to_the_exact_ones(kv_format: Format) -> None:
    """Half of the dimensions of these spectra have 86 % of the energy: an error of 0.37.

    The basis of K of `fdc` has to cover random queries, too, and `shard` keeps 3/16 of K.
    """
    _, k, v = full_text(seed=60)
    keys, values = round_trip(kv_format, pages_of(k), pages_of(v))
    assert keys.dtype == values.dtype == torch.float32
    assert (
        relative_error(keys, pages_of(k))
        < {"fdc": 0.65, "palu": 0.5, "shard": 0.85}[kv_format.name]
    )
    assert relative_error(values, pages_of(v)) < 0.45


def test_artifact_round_trip_and_other_models(kv_format: Format, tmp_path: Path) -> None:
    kind = type(kv_format)
    module = {"fdc": fdc, "palu": palu, "shard": shard}[kv_format.name]
    moments = [moments_of(CONFIG, full_text())] * 2
    path = tmp_path / "kv.safetensors"
    options = {"fdc": fdc.FdcOptions, "palu": palu.PaluOptions, "shard": shard.ShardOptions}
    made = module.calibrate(moments, options[kv_format.name](), HASH)
    made.save(path)
    loaded = kind.load(path, CONFIG, HASH)
    assert loaded.artifact_hash == made.hash
    assert loaded.planes(1, PAGE) == kind(CONFIG, made).planes(1, PAGE)
    with pytest.raises(KVFormatError, match="belongs to model model, not to other"):
        kind.load(path, CONFIG, "other")
    for changes in ({"num_layers": 3}, {"num_kv_heads": 2}, {"head_dim": 32}):
        with pytest.raises(KVFormatError):
            kind.load(path, replace(CONFIG, **changes), HASH)  # type: ignore[arg-type]
    for other in ({"format": "none"}, {"version": 99}):
        with pytest.raises(KVFormatError, match="not of"):
            kind(CONFIG, replace(made, **other), HASH)


@pytest.mark.parametrize("rank", [16, 40])
def test_fdc_is_exact_if_the_rank_suffices(rank: int) -> None:
    q, k, v = text = low_rank_text(rank, before_rope=False)
    made = fdc.calibrate([moments_of(CONFIG, text)] * 2, fdc.FdcOptions(removal_rate=1e-5), HASH)
    kv_format = fdc.FdcFormat(CONFIG, made, HASH)
    width = -(-rank // 16) * 16
    assert [plane.shape for plane in kv_format.planes(0, PAGE)] == [(4, PAGE, width)] * 2
    keys, values = round_trip(kv_format, pages_of(k), pages_of(v))
    assert relative_error(keys, pages_of(k)) < BF16
    assert relative_error(values, pages_of(v)) < BF16
    found, exact = (q @ one.repeat_interleave(2, 0).mT for one in (keys[0], k[:, :PAGE]))
    assert relative_error(found, exact) < 2 * BF16


def test_fdc_error_is_the_dropped_spectrum() -> None:
    """Measured on the calibration text itself; bf16 adds less than 1e-4 to the squared error."""
    _, k, v = text = full_text()
    moments = moments_of(CONFIG, text)
    both = fdc.calibrate([moments] * 2, fdc.FdcOptions(rank=32, share_r=False), HASH)
    keys, values = round_trip(fdc.FdcFormat(CONFIG, both, HASH), pages_of(k), pages_of(v))
    for found, exact, second in ((keys, k, moments.keys), (values, v, moments.values)):
        dropped = (
            torch.linalg.eigvalsh(second)[:, :32].sum() / second.diagonal(dim1=1, dim2=2).sum()
        )
        assert relative_error(found, pages_of(exact)) ** 2 == pytest.approx(
            float(dropped), rel=5e-3
        )


def test_fdc_shared_basis_covers_queries() -> None:
    """q and k lie in different subspaces; only the shared basis keeps q of both query heads."""
    basis = orthonormal(4, 64, 48, seed=8)
    q_basis, k_basis = basis[:, :, :32], basis[:, :, 32:]
    q = activations(q_basis.repeat_interleave(2, 0), 9) * 5
    k, v = activations(k_basis, 10), activations(k_basis, 11)
    moments = [moments_of(CONFIG, (q, k, v))] * 2
    widths = []
    for share in (True, False):
        options = fdc.FdcOptions(removal_rate=1e-5, share_r=share)
        found = fdc.FdcFormat(CONFIG, fdc.calibrate(moments, options, HASH)).layer(0).k_basis
        kept = q.view(4, -1, 64) @ found @ found.mT
        widths.append(found.shape[2])
        assert (relative_error(kept, q.view(4, -1, 64)) < 1e-4) is share
    assert widths == [48, 16]


def test_fdc_without_prc_is_exact_if_the_rank_before_rope_suffices() -> None:
    """RoPE raises the rank of these keys from 16, which only a basis before RoPE uses."""
    _, k, v = text = low_rank_text(16, before_rope=True)
    moments = [moments_of(CONFIG, text)] * 2
    errors = {}
    for prc in (True, False):
        made = fdc.calibrate(moments, fdc.FdcOptions(rank=16, share_r=False, prc=prc), HASH)
        assert made.options["prc"] is prc
        keys, values = round_trip(fdc.FdcFormat(CONFIG, made, HASH), pages_of(k), pages_of(v))
        errors[prc] = relative_error(keys, pages_of(k))
        assert relative_error(values, pages_of(v)) < BF16
    assert errors[False] < 1.5 * BF16
    assert errors[True] > 0.1


def test_fdc_bytes_per_token_with_and_without_padding() -> None:
    """Head 0 needs rank 16 and the others 64: the planes have 64 for all."""
    _, k, v = full_text()
    narrow = activations(orthonormal(1, 64, 16, seed=2), 1)
    k = torch.cat((narrow, k[1:]))
    moments = [moments_of(CONFIG, (k.repeat_interleave(2, 0), k, v))] * 2
    sizes = {}
    for adaptive in (True, False):
        options = fdc.FdcOptions(removal_rate=1e-4, adaptive=adaptive)
        made = fdc.FdcFormat(CONFIG, fdc.calibrate(moments, options, HASH))
        padded = sum(p.shape[0] * p.shape[2] * p.dtype.itemsize for p in made.planes(0, PAGE))
        sizes[adaptive] = padded, made.unpadded_bytes_per_token(0)
    assert sizes[True] == (1024, 2 * (16 + 3 * 64 + 4 * 64))
    assert sizes[False] == (1024, 1024)


@pytest.mark.parametrize("ranks", [[[32, 32, 32, 16], [48, 32, 32, 32]], [[0, 32, 32, 32]] * 2])
def test_fdc_rejects_ranks_that_do_not_fit_the_bases(ranks: list[list[int]]) -> None:
    made = fdc.calibrate([moments_of(CONFIG, full_text())] * 2, fdc.FdcOptions(rank=32), HASH)
    tensors = {**made.tensors, "k_ranks": torch.tensor(ranks)}
    with pytest.raises(KVFormatError, match="ranks"):
        fdc.FdcFormat(CONFIG, replace(made, tensors=tensors))


def test_palu_rejects_values_with_more_components_than_the_head() -> None:
    made = palu.calibrate([moments_of(CONFIG, full_text())] * 2, palu.PaluOptions(rank=32), HASH)
    tensors = {**made.tensors, "v_basis.0": made.tensors["v_basis.0"].repeat(1, 1, 4)}
    with pytest.raises(KVFormatError, match=r"'v_basis\.0' has rank 128, expected 1 to 64"):
        palu.PaluFormat(CONFIG, replace(made, tensors=tensors))


@pytest.mark.parametrize(("group_heads", "groups"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_palu_is_exact_if_the_rank_suffices(group_heads: int, groups: int) -> None:
    """Tolerance: bf16 of the full-precision keys and of the latents."""
    _, k, v = text = low_rank_text(16, before_rope=True)
    options = palu.PaluOptions(removal_rate=1e-4, group_heads=group_heads)
    kv_format = palu.PaluFormat(
        CONFIG, palu.calibrate([moments_of(CONFIG, text)] * 2, options, HASH)
    )
    assert kv_format.layer(0).k_basis.shape == (groups, 256 // groups, 64 // groups)
    assert [plane.shape for plane in kv_format.planes(0, PAGE)] == [(4, PAGE, 16)] * 2
    keys, values = round_trip(kv_format, pages_of(k), pages_of(v))
    assert relative_error(keys, pages_of(k)) < 1.5 * BF16
    assert relative_error(values, pages_of(v)) < 1.5 * BF16


def test_palu_groups_share_components_of_their_heads() -> None:
    """All heads have the same keys: a group of four needs a quarter of the latents."""
    same = activations(orthonormal(1, 64, 64, seed=2), 1).repeat(4, 1, 1)
    v = activations(orthonormal(4, 64, 16, seed=3), 2)
    k = rotated(same)
    moments = [moments_of(CONFIG, (k.repeat_interleave(2, 0), k, v))] * 2
    widths = {}
    for heads in (1, 4):
        made = palu.calibrate(moments, palu.PaluOptions(1e-4, group_heads=heads), HASH)
        kv_format = palu.PaluFormat(CONFIG, made)
        widths[heads] = kv_format.planes(0, PAGE)[0].shape[2]
        keys, _ = round_trip(kv_format, pages_of(k), pages_of(v))
        assert relative_error(keys, pages_of(k)) < 1.5 * BF16
    assert widths == {1: 64, 4: 16}


def test_shard_keys_lose_only_quantization_if_the_rank_suffices() -> None:
    """A uniform quantizer of step 0.4 σ has an error of 0.4 / √12 = 0.115 without clipping."""
    basis = orthonormal(256, 48, seed=2)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(4096, 48, generator=generator) @ basis.T + 3.0
    config = replace(CONFIG, context_length=4200)
    unrotated = tokens.view(-1, 4, 64).transpose(0, 1)
    k = PageRotation(config).apply(unrotated[None], torch.tensor([PAGE]))[0]
    moments = moments_of(config, (k.repeat_interleave(2, 0), k, k))
    kv_format = create("shard", [moments] * 2, config)
    keys, _ = round_trip(kv_format, pages_of(k), pages_of(k))
    undone = PageRotation(config).undo(keys, (1 + torch.arange(256)) * PAGE)
    found = undone.transpose(1, 2).flatten(2).flatten(0, 1) - 3.0
    assert relative_error(found, tokens - 3.0) == pytest.approx(0.4 / 12**0.5, rel=0.1)


def test_shard_sizes() -> None:
    moments = moments_of(CONFIG, full_text())
    kv_format = create("shard", [moments] * 2)
    k, v, norm = kv_format.planes(0, PAGE)
    assert (k.shape, v.shape, norm.shape) == ((4, PAGE, 6), (4, PAGE, 16), (4, PAGE, 1))
    assert (k.dtype, v.dtype, norm.dtype) == (torch.uint8, torch.uint8, torch.bfloat16)
    assert not any(plane.encodable for plane in (k, v, norm))
    large = KVMoments(8, 128)
    large.tokens = 1
    assert shard.calibrate([large], shard.ShardOptions(), "").tensors["k_basis.0"].shape == (
        1024,
        192,
    )


def test_shard_values_are_2_bit_codes() -> None:
    _, k, v = full_text()
    kv_format = create("shard", [moments_of(CONFIG, full_text())] * 2)
    _, values = round_trip(kv_format, pages_of(k), pages_of(v))
    expected = two_bits.dequantize(*two_bits.quantize(pages_of(v)))
    assert torch.equal(values, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("element", [0, 63])
def test_shard_decodes_non_finite_tokens_to_nan(bad: float, element: int) -> None:
    """K of a token is encoded for all heads together, and marks V of all heads, too."""
    kv_format = create("shard", [moments_of(CONFIG, full_text())] * 2)
    keys, values = (pages_of(x) for x in full_text(seed=70)[1:])
    k, v = round_trip(kv_format, keys, values)
    keys[1, 2, 3, element], values[2, 0, 15, element] = bad, bad
    k[1, :, 3], v[1, :, 3], v[2, 0, 15] = math.nan, math.nan, math.nan
    decoded = round_trip(kv_format, keys, values)
    torch.testing.assert_close(decoded, (k, v), rtol=0, atol=0, equal_nan=True)


def test_shard_stores_keys_as_nibbles_of_the_joined_heads() -> None:
    """Byte i of a token has coefficient i in its low nibble and i + rank / 2 in its high one.

    A token's bytes are contiguous in the page.
    """
    made = shard.calibrate([moments_of(CONFIG, full_text())] * 2, shard.ShardOptions(rank=8), HASH)
    tensors = {
        **made.tensors,
        "k_mean.0": torch.zeros(256),
        "k_basis.0": torch.eye(256)[:, :8],
        "k_scale.0": torch.full((8,), 0.5),
    }
    kv_format = shard.ShardFormat(CONFIG, replace(made, tensors=tensors))
    keys = torch.zeros(1, 4, PAGE, 64)
    keys[0, 0, :, :8] = torch.tensor([0.5, -0.5, 3.5, -3.5, 9.0, -9.0, 0.2, 1.0])
    planes = compressed_planes(kv_format, 1)
    position = torch.zeros(1, dtype=torch.int64)
    page = keys.bfloat16()
    # No RoPE at position 0: the first token is stored as it is.
    kv_format.layer(0).encode(page, page, position, planes, position)
    assert planes[0].flatten()[:4].tolist() == [0xF9, 0x17, 0x8F, 0xA1]


def test_shard_rejects_heads_without_a_hadamard_matrix() -> None:
    made = shard.calibrate([moments_of(CONFIG, full_text())] * 2, shard.ShardOptions(), HASH)
    with pytest.raises(KVFormatError, match="power of two"):
        shard.ShardFormat(replace(CONFIG, head_dim=80), made)
