"""RoPE over pages, moments, bases, ranks and artifact files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import RopeConfig
from runtime.errors import CalibrationError, KVFormatError
from runtime.kv.calibration import (
    Artifact,
    KVMoments,
    RankChoice,
    spectral_basis,
    truncated_basis,
)
from runtime.kv.calibration.bases import removal_rank
from runtime.kv.calibration.projection import project_pages
from runtime.kv.rotation import PageRotation
from runtime.layers.rope import cos_sin_table
from runtime.offline.compress.kv_moments import kv_moments
from tests.runtime.kv.lowrank import CONFIG, activations, moments_of, orthonormal, relative_error
from tests.runtime.tiny import CONFIG as TINY
from tests.runtime.tiny import tiny_checkpoint

YARN = RopeConfig(scaling="yarn", factor=4.0, original_context=175, attention_factor=1.14)


@pytest.mark.parametrize("rope", [RopeConfig(), YARN])
def test_rope_is_undone_and_redone(rope: RopeConfig) -> None:
    """Tolerance: two fp32 rotations, each with a relative error of about 1e-7."""
    config = replace(CONFIG, rope=rope)
    rotation = PageRotation(config)
    x = torch.randn(3, 4, 16, 64, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([16, 0, 684])
    rotated = rotation.apply(x, first)
    cos, sin = cos_sin_table(config, 700)
    a, b = x[2, 1, 15, :32], x[2, 1, 15, 32:]
    expected = torch.cat((a * cos[699] - b * sin[699], b * cos[699] + a * sin[699]))
    assert torch.equal(rotated[2, 1, 15], expected)
    assert relative_error(rotation.undo(rotated, first), x) < 3e-7
    again = rotation.apply(rotation.undo(rotated, first), first)
    assert relative_error(again, rotated) < 5e-7


def test_moments_in_pieces_are_those_of_all_tokens() -> None:
    parts = [
        tuple(
            torch.randn(h, 48, 64, generator=torch.Generator().manual_seed(h + s))
            for h in (8, 4, 4)
        )
        for s in (0, 100)
    ]
    texts = [(q, k, v) for q, k, v in parts]
    moments = moments_of(CONFIG, *texts)
    q, k, v = (torch.stack(x).double() for x in zip(*texts, strict=True))
    assert moments.tokens == 96
    for head in range(4):
        rows = q[:, 2 * head : 2 * head + 2].flatten(0, 2)
        torch.testing.assert_close(moments.queries[head], rows.T @ rows)
        torch.testing.assert_close(
            moments.keys[head], k[:, head].flatten(0, 1).T @ k[:, head].flatten(0, 1)
        )
        torch.testing.assert_close(
            moments.values[head], v[:, head].flatten(0, 1).T @ v[:, head].flatten(0, 1)
        )
    first = torch.full((2,), 16)
    before = (
        PageRotation(CONFIG)
        .undo(k.float(), first)
        .double()
        .transpose(1, 2)
        .flatten(2)
        .flatten(0, 1)
    )
    torch.testing.assert_close(moments.unrotated_keys, before.T @ before)
    torch.testing.assert_close(moments.unrotated_sum, before.sum(0))


def test_model_moments_cover_every_layer_and_all_tokens_after_the_first_page() -> None:
    checkpoint = tiny_checkpoint()
    tokens = torch.randint(TINY.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    layers = list(kv_moments(checkpoint, tokens))
    assert [moments.tokens for moments in layers] == [3 * 24] * 2
    alone = [list(kv_moments(checkpoint, row[None])) for row in tokens]
    for index, moments in enumerate(layers):
        for name in ("queries", "keys", "values", "unrotated_keys", "unrotated_sum"):
            total = sum(getattr(one[index], name) for one in alone)
            torch.testing.assert_close(getattr(moments, name), total)
        # RoPE does not change norms, and k before RoPE is the same k.
        traces = moments.keys.diagonal(dim1=1, dim2=2).sum()
        torch.testing.assert_close(traces, moments.unrotated_keys.trace(), rtol=1e-5, atol=0.0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(layers[0].values, layers[1].values)


def test_values_of_evenly_spaced_tokens_are_kept() -> None:
    """The spacing does not depend on how texts are divided into calls."""
    length, every = 45, 7
    v = torch.arange(2 * 29.0).view(2, 1, 29, 1).expand(2, 4, 29, 64)  # token numbers
    v = torch.cat((torch.full((2, 4, length - 29, 64), 999.0), v), 2)  # the first 16 are skipped
    q = torch.zeros(2, 8, length, 64)
    rotation = PageRotation(CONFIG)
    kept = []
    for calls in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        moments = KVMoments.of(CONFIG, sample_every=every)
        for rows in calls:
            moments.add(q[rows], v[rows], v[rows], rotation)
        kept.append(torch.cat(moments.value_samples, 1))
    expected = torch.arange(0, 58, every).bfloat16()[None, :, None].expand(4, -1, 64)
    assert all(torch.equal(found, expected) for found in kept)
    assert not KVMoments.of(CONFIG).value_samples


def test_dropped_energy_is_the_dropped_spectrum() -> None:
    """The squared error of a projection is the sum of the dropped squared singular values."""
    x = torch.randn(4, 300, 64, generator=torch.Generator().manual_seed(1)).double()
    x = x * torch.linspace(2, 0.1, 64)
    spectra, _ = spectral_basis(x.mT @ x)
    basis, ranks = truncated_basis(x.mT @ x, RankChoice(0.0, rank=48))
    assert ranks == [48] * 4
    wide = basis.double()
    error = (x @ wide @ wide.mT - x).square().sum((1, 2))
    torch.testing.assert_close(error, spectra[:, 48:].square().sum(1), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("rate", "rank"), [(0.0, 4), (0.09, 4), (0.1, 3), (0.29, 3), (0.3, 2), (0.59, 2), (0.6, 1)]
)
def test_removal_rate_bounds_the_sum_of_dropped_singular_values(rate: float, rank: int) -> None:
    assert removal_rank(torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).double(), rate) == rank


def test_ranks_are_multiples_of_16_and_adapt_to_heads() -> None:
    second = torch.eye(64).double().repeat(3, 1, 1)
    second[0, 17:] = 0  # rank 17
    second[1, 1:] = 0  # rank 1
    basis, ranks = truncated_basis(second, RankChoice(1e-6, adaptive=True))
    assert ranks == [32, 16, 64]
    assert basis.shape == (3, 64, 64)
    assert not basis[0, :, 32:].any()
    assert basis[0, :, :32].any(0).all()
    # 17 + 1 + 64 values of 1: without the last 33 of head 2, 33 / 82 are dropped.
    assert truncated_basis(second, RankChoice(33 / 82 + 1e-9))[1] == [32] * 3
    assert truncated_basis(second, RankChoice(31 / 82 - 1e-9))[1] == [48] * 3
    assert truncated_basis(second, RankChoice(0.5, rank=33, adaptive=True))[1] == [48] * 3


@pytest.mark.parametrize(("rate", "rank"), [(-0.1, None), (1.0, None), (0.1, 0)])
def test_rank_choices_out_of_range_are_rejected(rate: float, rank: int | None) -> None:
    with pytest.raises(KVFormatError, match=r"not in|not positive"):
        RankChoice(rate, rank)


def test_projected_pages_do_not_depend_on_other_pages() -> None:
    x = activations(orthonormal(4, 64, 64, seed=0), 0, tokens=11 * 16).view(4, 11, 16, 64)
    pages = x.transpose(0, 1)
    basis = orthonormal(4, 64, 48, seed=1)
    together = project_pages(pages, basis)
    assert torch.equal(together[5], project_pages(pages[5:6], basis)[0])
    torch.testing.assert_close(together, pages @ basis)
    assert project_pages(pages[:0], basis).shape == (0, 4, 16, 48)


def artifact(**changes: object) -> Artifact:
    fields: dict[str, object] = {
        "format": "fdc",
        "version": 1,
        "model_hash": "m",
        "options": {"rank": 48, "adaptive": True},
        "tensors": {"b.0": torch.ones(2, 3), "b.1": torch.arange(3), "a": torch.zeros(1)},
    }
    return Artifact(**{**fields, **changes})  # type: ignore[arg-type]


def test_artifact_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    written = artifact()
    written.save(path)
    found = Artifact.load(path)
    assert found.hash == written.hash
    assert (found.format, found.version, found.model_hash) == ("fdc", 1, "m")
    assert found.options == written.options
    assert found.tensors.keys() == written.tensors.keys()
    assert all(torch.equal(found.tensors[name], written.tensors[name]) for name in found.tensors)


def test_artifact_hash_depends_on_every_part() -> None:
    parts = artifact(), artifact(format="x"), artifact(version=2), artifact(model_hash="n")
    others = artifact(options={}), artifact(tensors={"b.0": torch.ones(2, 3) * 2})
    assert len({found.hash for found in (*parts, *others)}) == 6
    assert artifact().hash == artifact().hash


@pytest.mark.parametrize("content", [b"", b"no", b"\x02" + b"\0" * 7 + b"{}", b"\xff" * 64])
def test_files_that_are_no_artifacts_are_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(KVFormatError, match="is not a calibration"):
        Artifact.load(path)
    with pytest.raises(CalibrationError, match="cannot read the calibration"):
        Artifact.load(tmp_path / "missing")


def test_artifact_tensors_are_checked() -> None:
    found = artifact()
    assert found.tensor("b.0", (2, None)).shape == (2, 3)
    for name, shape in (("none", (2, 3)), ("b.0", (2, 4)), ("b.0", (2,)), ("b.1", (3,))):
        with pytest.raises(KVFormatError):
            found.tensor(name, shape)
    broken = artifact(tensors={"b.0": torch.full((2,), torch.nan)})
    with pytest.raises(KVFormatError, match="NaN"):
        broken.tensor("b.0", (2,))
    with pytest.raises(KVFormatError, match="2 layers, but this model 3"):
        found.check_layers(3, "b")


def test_empty_moments_have_the_shape_of_the_model() -> None:
    moments = KVMoments.of(CONFIG)
    assert moments.keys.shape == (4, 64, 64)
    assert moments.unrotated_keys.shape == (256, 256)
