"""Kernel plans: files, choice of tiles, and models that use a plan."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import Dense, FactorPair
from runtime.errors import PlanError
from runtime.gemm.model import build_gemm_model
from runtime.gemm.plan import KernelPlan, LargeTile, Tile, choice_key, group_key, large_tile
from runtime.models.build import build_model
from runtime.models.kernel_plan_hash import kernel_plan_hash
from runtime.parallel.partition import Scheme
from tests.runtime.tiny import tiny_checkpoint

PAIRS = (9, 5, 8, 12, 17, 11, 24)
SHAPES = ((96, 16), (32, 8), (32, 8))


def test_saved_plan_loads_back_equal(tmp_path: Path) -> None:
    tile = Tile(16, 32, 128, 4, 4, 5)
    large = LargeTile(2, 64, 3)
    plan = KernelPlan(
        {
            choice_key("PLAIN", 16, SHAPES): tile,
            choice_key("PLAIN", 512, SHAPES): large,
            "other": None,
        },
        frozenset("ab"),
        "a GPU",
    )
    plan.save(tmp_path / "plan.json")
    read = KernelPlan.load(tmp_path / "plan.json")
    assert read == plan
    assert read.hash == plan.hash != KernelPlan().hash
    assert read.tile("PLAIN", 9, SHAPES) == tile
    assert read.tile("PLAIN", 500, SHAPES) == large
    replace(plan, scheme=Scheme.BASE).save(tmp_path / "base.json")
    assert KernelPlan.load(tmp_path / "base.json") == replace(plan, scheme=Scheme.BASE)


def test_plan_files_without_a_scheme_keep_their_hash(tmp_path: Path) -> None:
    """The file is one that earlier versions wrote."""
    fields = {"forced": False, "device": "a GPU", "dense": ["a"], "choices": {"x": None}}
    text = json.dumps(fields, sort_keys=True, indent=1)
    (tmp_path / "plan.json").write_text(text + "\n")
    plan = KernelPlan.load(tmp_path / "plan.json")
    assert plan.scheme is Scheme.LOW_RANK
    assert plan.hash == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert plan.hash != replace(plan, scheme=Scheme.BASE).hash


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"choices": {"a": {"b": 1}}, "dense": []}'),
        '{"choices": {}, "dense": [], "device": "", "forced": false, "scheme": "none"}',
    ],
)
def test_invalid_plan_file_raises_plan_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match="is not a kernel plan"):
        KernelPlan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError):
        KernelPlan.load(tmp_path / "none.json")


def test_choice_applies_up_to_its_bucket_and_the_last_bucket_is_unbounded() -> None:
    tile = LargeTile(2, 128)
    plan = KernelPlan(
        {choice_key("PLAIN", 32, SHAPES): None, choice_key("RESIDUAL", 8192, SHAPES[:1]): tile}
    )
    assert plan.tile("PLAIN", 16, SHAPES) is not None  # the default
    assert plan.tile("PLAIN", 17, SHAPES) is None
    assert plan.tile("PLAIN", 33, SHAPES) is not None
    assert plan.tile("RESIDUAL", 2048, SHAPES[:1]) is None
    assert plan.tile("RESIDUAL", 2049, SHAPES[:1]) == tile
    assert plan.tile("RESIDUAL", 1 << 20, SHAPES[:1]) == tile


def test_large_tile_of_llama_7b_is_the_one_measured_fastest_on_an_h200() -> None:
    assert large_tile("GATED", 2048, ((11008, 4096),) * 2) == LargeTile(2, 256)
    assert large_tile("PLAIN", 2048, ((2992, 4096),)) == LargeTile(2, 128)
    assert large_tile("PLAIN", 2048, ((1496, 11008),)) == LargeTile(2, 256)
    assert large_tile("PLAIN", 2048, ((1024, 4096),)) == LargeTile(2, 128)
    assert large_tile("PLAIN", 512, ((1496, 11008),)) == LargeTile(1, 128)
    assert large_tile("PLAIN", 128, ((1496, 11008),)) == LargeTile(1, 128, 4)
    assert large_tile("RESIDUAL", 128, ((4096, 1024),)) == LargeTile(1, 128)
    assert large_tile("PLAIN", 512, ((1492, 4096),)) is None  # rows must be multiples of eight


def test_plan_multiplies_out_the_factor_pairs_that_it_names() -> None:
    checkpoint = tiny_checkpoint(ranks=PAIRS, bias=True)
    name = group_key(checkpoint.layers[0], ("gate", "up"))
    assert name == "gate 80x17x48 up 80x11x48"
    made = KernelPlan(dense=frozenset([name])).multiply_out(checkpoint)
    for layer, before in zip(made.layers, checkpoint.layers, strict=True):
        assert isinstance(layer.q, FactorPair)
        assert isinstance(layer.gate, Dense)
        assert isinstance(before.gate, FactorPair)
        assert layer.gate.bias is before.gate.bias
        u, v = before.gate.u.bfloat16().float(), before.gate.v.bfloat16().float()
        assert torch.equal(layer.gate.weight, (u @ v).bfloat16())
    dense_q = tiny_checkpoint(ranks=(None, *PAIRS[1:]))
    assert group_key(dense_q.layers[0], ("q", "k", "v")) is None


def test_model_uses_its_plan_and_hashes_it() -> None:
    checkpoint = tiny_checkpoint(ranks=PAIRS)
    name = group_key(checkpoint.layers[0], ("o",))
    plan = KernelPlan(dense=frozenset([name or ""]))
    models = [build_gemm_model(checkpoint, device="cpu", plan=one) for one in (None, plan)]
    every = [build_model(checkpoint), *models]
    assert len({kernel_plan_hash(model) for model in every}) == 3
    first, second = ([p.shapes for p in model.grouped_gemms()] for model in models)
    assert len(first) == 2 * 8
    assert len(second) == 2 * 7
    assert ((48, 96),) in second
