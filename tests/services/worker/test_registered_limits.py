"""Limits from the worker that loads the model to the gateway: each is computed once."""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from runtime.checkpoint.assemble import named_tensors
from runtime.core.request import MAX_LOGPROBS, FinishReason
from runtime.engine import Add
from services.common.placement import PROTOCOL, Placement, Registration, Role
from services.gateway.limits import ModelLimits
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from services.router.app import build_dispatcher
from services.router.readiness import readiness
from services.router.settings import RouterSettings
from services.worker.loading import Loaded, load_worker
from services.worker.settings import WorkerSettings
from tests.runtime.offline.convert.samples import save_folder
from tests.runtime.tiny import drive, request_of, tiny_checkpoint
from tests.services.router.samples import beat, place_request
from tests.services.tiny_model import save_tiny_model, save_tokenizer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}


def registration(loaded: Loaded, max_waiting: int = 256) -> Registration:
    return Registration(
        protocol=PROTOCOL,
        worker_id="c0",
        epoch="e1",
        role=Role.COLOCATED,
        address="127.0.0.1:5000",
        model=loaded.identity.model,
        compatibility=loaded.identity.compatibility,
        pages_total=loaded.identity.compatibility.page_plan.by_name(
            loaded.engine.scheduler.pages.total
        ),
        page_bytes={"kv": 4096},
        max_running=loaded.rank.sizes.limits.max_running,
        max_waiting=max_waiting,
        heartbeat_s=0.25,
    )


def test_router_places_what_the_worker_queues(tmp_path: Path) -> None:
    """A larger ``backlog`` of the router would end in refusals."""
    settings = {"model": str(save_tiny_model(tmp_path / "tiny")), "device": "cpu", "codec": "raw"}
    given = WorkerSettings.model_validate({**settings, "max_running": 2, "max_waiting": 3})
    loaded = load_worker(given, decodes=True)
    router = build_dispatcher(RouterSettings.model_validate({"backlog": 64}), 0.0)
    router.register(registration(loaded, given.max_waiting), 0.0)
    router.heartbeat(beat("c0", pages_free=loaded.engine.scheduler.pages.total), 0.1)
    answers = [router.submit(place_request(40, 8), 0.1).answer for _ in range(9)]
    placed = [answer for answer in answers if isinstance(answer, Placement)]
    record = drive(loaded.engine, *(Add(request_of(str(n), 40)) for n in range(len(placed))))
    assert len(placed) == 2 + 3
    assert not record.refused


def test_evicted_tokens_make_space_for_output(tmp_path: Path) -> None:
    """64 of 150 prompt tokens are evicted from a worker with pages for 160 tokens."""
    settings = {"model": str(save_tiny_model(tmp_path / "tiny")), "device": "cpu", "codec": "raw"}
    given = WorkerSettings.model_validate({**settings, "kv_tokens": 160, "kv_eviction": 0.5})
    loaded = load_worker(given, decodes=True)
    router = build_dispatcher(RouterSettings.model_validate({}), 0.0)
    router.register(registration(loaded), 0.0)
    router.heartbeat(beat("c0", pages_free=loaded.engine.scheduler.pages.total), 0.1)
    answer = router.submit(place_request(150, 250, required_tokens=1), 0.1).answer
    assert isinstance(answer, Placement)
    assert answer.max_tokens == 160 + 1 - (150 - 64)
    record = drive(loaded.engine, Add(request_of("r", 150, answer.max_tokens)))
    assert len(record.output("r")) == answer.max_tokens
    assert record.finished == {("r", 0): FinishReason.LENGTH}


def test_replayed_output_is_not_evicted(tmp_path: Path) -> None:
    """A prompt of 100 tokens is too short for an eviction; with 60 replayed ones, it still is."""
    settings = {"model": str(save_tiny_model(tmp_path / "tiny")), "device": "cpu", "codec": "raw"}
    given = WorkerSettings.model_validate({**settings, "kv_tokens": 160, "kv_eviction": 0.5})
    loaded = load_worker(given, decodes=True)
    router = build_dispatcher(RouterSettings.model_validate({}), 0.0)
    router.register(registration(loaded), 0.0)
    router.heartbeat(beat("c0", pages_free=loaded.engine.scheduler.pages.total), 0.1)
    request = place_request(140, 250, required_tokens=1, replayed_tokens=40)
    answer = router.submit(request, 0.1).answer
    assert isinstance(answer, Placement)
    assert answer.max_tokens == 160 + 1 - 140


@pytest.mark.parametrize(
    ("config", "kv_tokens", "expected"),
    [
        ({}, 1024, 400),
        ({}, 160, 161),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, 1024, 64),
        ({"rope_parameters": YARN}, 1024, 800),
        ({"rope_parameters": YARN}, 640, 641),
    ],
)
def test_gateway_limits_are_those_of_the_worker(
    tmp_path: Path, config: dict[str, Any], kv_tokens: int, expected: int
) -> None:
    """A request without ``max_tokens`` fills what the gateway advertises."""
    checkpoint = tiny_checkpoint()
    folder = tmp_path / "tiny"
    save_folder(checkpoint, named_tensors(checkpoint), folder)
    save_tokenizer(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    values = {"model": str(folder), "device": "cpu", "codec": "raw", "kv_tokens": kv_tokens}
    loaded = load_worker(WorkerSettings.model_validate(values), decodes=True)
    router = build_dispatcher(RouterSettings.model_validate({}), 0.0)
    router.register(registration(loaded), 0.0)
    router.heartbeat(beat("c0", pages_free=loaded.engine.scheduler.pages.total), 0.1)

    given = {"model": str(folder), "max_logprobs": 100, "max_body_bytes": 4 * 400}
    settings = GatewaySettings.model_validate(given)
    limits = ModelLimits(settings)
    (found,) = readiness(router.fleet.snapshots(0.1))
    with structlog.testing.capture_logs() as logs:
        limits.update(found)
        limits.update(found)
    warnings = [line["prompt_bytes"] for line in logs]  # ids of up to 3 digits, and commas
    assert warnings == ([4 * expected] if expected > 400 else [])
    assert (limits.context_length, limits.max_logprobs) == (expected, MAX_LOGPROBS)
    assert ServedModel.load(settings).identity.mismatch(loaded.identity.model) is None

    answer = router.submit(place_request(40, expected, required_tokens=1), 0.1).answer
    assert isinstance(answer, Placement)
    assert answer.max_tokens == expected - 40
    record = drive(loaded.engine, Add(request_of("r", 40, answer.max_tokens)))
    assert len(record.output("r")) == answer.max_tokens
    assert record.finished == {("r", 0): FinishReason.LENGTH}
