"""CUDA graphs of decode steps over stored and exact pages give the bits of their launches."""

from dataclasses import replace

import pytest
import torch

from runtime.core.limits import Limits
from runtime.engine import Add, Command, Engine
from runtime.kv.registry import COMPRESSED
from runtime.models.model import Model
from tests.runtime.replay.scripts import compare, play, request
from tests.runtime.tiny import CONFIG, Record, tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WIDE = replace(CONFIG, num_heads=4, head_dim=64, vocab_size=1300)


def script() -> list[list[Command]]:
    """Return requests whose sequences join at different steps and leave pages behind."""
    return [
        [Add(request(2 * number, length, 60, number, 1 + number % 2))]
        for number, length in enumerate((70, 150, 12, 95, 200))
    ]


def played(model: Model, pages: int, stored: int) -> Record:
    limits = Limits(max_running=6, max_waiting=64, step_tokens=64, chunk_tokens=32)
    engine = Engine(model, num_pages=pages, num_stored=stored, limits=limits, replay=True)
    engine.warm_up()
    record = play(engine, script())
    held = engine._scheduler.pages
    assert held.free == held.total
    return record


@pytest.mark.parametrize(("pages", "stored"), [(80, 80), (30, 80)], ids=["enough", "preempted"])
@pytest.mark.parametrize("name", ["fp8", "fp8-e5m2", "int4", "k4v2"])
def test_graphs_give_the_tokens_of_their_launches(
    name: str, pages: int, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in COMPRESSED
    model = Model(tiny_checkpoint(config=WIDE), device="cuda", dtype=torch.bfloat16, kv_format=name)
    assert model.kv_format.graph_safe
    found = played(model, pages, stored)
    for module in ("decode", "mixed"):
        monkeypatch.setattr(f"runtime.replay.{module}.capture", lambda run, pool: run)
    compare(found, played(model, pages, stored), set())
