"""Overlap of bases, and sums of moments."""

import pytest
import torch

from runtime.kv.calibration import Artifact
from runtime.kv.fdc import FdcOptions, calibrate
from tests.programs.fdc_stability import overlap, sum_of_moments
from tests.runtime.kv.lowrank import CONFIG, QKV, activations, moments_of, orthonormal


def text(seed: int) -> QKV:
    q, k, v = (
        activations(orthonormal(heads, 64, 64, seed=heads), seed + heads, 128)
        for heads in (8, 4, 4)
    )
    return q, k, v


def artifact(basis: torch.Tensor) -> Artifact:
    return Artifact("fdc", 2, "", {}, {"k_basis.0": basis})


def test_overlap_is_one_for_the_same_subspace_and_the_shared_share_otherwise() -> None:
    identity = torch.eye(4)
    first, second = identity[:, :2], identity[:, 1:3]
    rotated = first @ torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    pair = artifact(torch.stack([first, first]))
    found = overlap(pair, artifact(torch.stack([rotated, second])), "k")
    assert found.mean == pytest.approx(0.75)
    assert found.least == pytest.approx(0.5)


def test_added_moments_are_those_of_both_texts() -> None:
    one, other, both = (
        [moments_of(CONFIG, *texts)] * 2 for texts in ((text(0),), (text(9),), (text(0), text(9)))
    )
    total = sum_of_moments(one, other, CONFIG)
    options = FdcOptions(rank=32)
    sum_of_both, together = (calibrate(layers, options, "") for layers in (total, both))
    assert overlap(sum_of_both, together, "k").least == pytest.approx(1)
    assert overlap(sum_of_both, together, "v").least == pytest.approx(1)
    assert total[0].tokens == both[0].tokens
    assert overlap(sum_of_both, calibrate(one, options, ""), "v").mean < 0.99
