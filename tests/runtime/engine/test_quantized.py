"""Engines with calibrated codes of K and V, or of latents: output equals a plain loop."""

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.engine import Add
from runtime.models.build import build_model
from tests.runtime.engine.by_hand import GREEDY, SEEDED, all_free
from tests.runtime.engine.test_compressed import output_by_hand
from tests.runtime.kv.calibrated import QUANTIZED, quantized_spec
from tests.runtime.tiny import drive, engine_of, request_of, tiny_checkpoint


@pytest.mark.few(1)
@pytest.mark.parametrize("name", QUANTIZED)
def test_output_equals_a_plain_loop(name: str, tmp_path: Path) -> None:
    model = build_model(tiny_checkpoint(), kv_format=quantized_spec(name, tmp_path))
    requests = [
        request_of(f"r{length}", length, 60, sampling=sampling)
        for length, sampling in ((30, GREEDY), (79, SEEDED), (150, SEEDED))
    ]
    engine = engine_of(model, stored=64)
    together = drive(engine, *map(Add, requests))
    for request in requests:
        expected = output_by_hand(model, request)
        assert drive(engine, Add(replace(request, id="alone"))).tokens["alone", 0] == expected
        assert together.tokens[request.id, 0] == expected
    assert all_free(engine)
    exact = drive(engine_of(build_model(tiny_checkpoint())), Add(requests[-1])).tokens["r150", 0]
    assert together.tokens["r150", 0] != exact, "stored pages change the output"
