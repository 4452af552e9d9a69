"""CUDA graphs of decode steps over stored and exact pages give the bits of their launches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.engine import Add, Command, Engine, LocalExecutor
from runtime.gemm.model import build_fastest_model
from runtime.kv.names import LOWRANK
from runtime.kv.registry import COMPRESSED
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.offline.bench.kv_formats import fdc_artifact, palu_artifact, shard_artifact
from tests.runtime.steps.scripts import compare, play, request
from tests.runtime.tiny import CONFIG, Record, checkpoint_for, pages_of, tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WIDE = replace(CONFIG, num_heads=4, head_dim=64, vocab_size=1300)
FUSED = [name for name, create in COMPRESSED.items() if getattr(create(WIDE), "fused", False)]


_CALIBRATIONS = {
    "fdc": fdc_artifact(WIDE, (48, 32)),
    "fdc-prefill": fdc_artifact(WIDE, (48, 32), compressed_prefill=True),
    "palu": palu_artifact(WIDE, (48, 32), WIDE.num_kv_heads),
    "shard": shard_artifact(WIDE),
}


def script() -> list[list[Command]]:
    """Return requests whose sequences join at different steps and leave pages behind."""
    return [
        [Add(request(2 * number, length, 60, number, 1 + number % 2))]
        for number, length in enumerate((70, 150, 12, 95, 200))
    ]


def played(model: Model, pages: int, stored: int, kv_eviction: float = 0.0) -> Record:
    limits = Limits(max_running=6, max_waiting=64, step_tokens=64, chunk_tokens=32)
    count = pages_of(model.layout, pages, stored)
    options = EngineOptions(count, limits, kv_eviction=kv_eviction, replay=True)
    engine = Engine(LocalExecutor(model, options))
    engine.warm_up()
    record = play(engine, script())
    held = engine.scheduler.pages
    assert held.free == held.total
    return record


def created(name: str, folder: Path) -> Model:
    """Return a model with a format, which has a random calibration if it needs one."""
    checkpoint = checkpoint_for(name, WIDE)
    spec = name
    if name in _CALIBRATIONS:
        path = folder / "calibration"
        replace(_CALIBRATIONS[name], model_hash=checkpoint.model_hash).save(path)
        spec = f"{name.partition('-')[0]}:{path}"
    return build_model(checkpoint, device="cuda", dtype=torch.bfloat16, kv_format=spec)


@pytest.mark.parametrize(("pages", "stored"), [(80, 80), (30, 80)], ids=["enough", "preempted"])
@pytest.mark.parametrize("name", [*FUSED, *_CALIBRATIONS, LOWRANK])
def test_graphs_give_the_tokens_of_their_launches(
    name: str, pages: int, stored: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = created(name, tmp_path)
    assert model.kv_format.graph_safe
    found = played(model, pages, stored)
    monkeypatch.setattr("runtime.graphs.capture.capture", lambda run, pool: run)
    compare(found, played(model, pages, stored), set())


@pytest.mark.parametrize("name", ["dense", "int4"])
def test_graphs_give_the_tokens_of_their_launches_after_an_eviction(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU, both formats use the megakernel."""
    model = build_fastest_model(
        tiny_checkpoint(config=WIDE), device="cuda", dtype=torch.bfloat16, kv_format=name
    )
    stored = 80 * model.layout.plan.encodes
    found = played(model, 80, stored, 0.5)
    exact = played(model, 80, stored)
    assert found.tokens["r8", 0][0] == exact.tokens["r8", 0][0]
    assert found.tokens["r8", 0] != exact.tokens["r8", 0]
    monkeypatch.setattr("runtime.graphs.capture.capture", lambda run, pool: run)
    compare(found, played(model, 80, stored, 0.5), set())
