"""Compilation ahead of the warm-up: its record, and faults that must not stop the worker."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from runtime.kernels import compile_pool
from runtime.kernels.compile_pool import CompilePool
from runtime.kernels.launches import KernelSource
from runtime.models.model import Model
from services.worker import compile_ahead as module
from services.worker.compile_ahead import compile_ahead
from services.worker.settings import WorkerSettings
from services.worker.sizes import WorkerSizes
from tests.runtime.tiny import tiny_model

SETTINGS = WorkerSettings.model_validate({"model": "tiny", "device": "cpu"})
SIZES = WorkerSizes(max_running=4, step_tokens=32, chunk_tokens=32, slots=2, slot_bytes=1 << 16)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Model:
    """A model on the CPU that claims to be replayable, as one on a GPU is."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(Model, "replayable", property(lambda _: True))
    pool: Callable[[], CompilePool] = lambda: CompilePool(1, command=[sys.executable, "-c", ""])  # noqa: E731
    monkeypatch.setattr(compile_pool, "CompilePool", pool)
    return tiny_model()


def events(model: Model, sizes: WorkerSizes = SIZES, *, decodes: bool = True) -> list[str]:
    with capture_logs() as logs:
        compile_ahead(model, SETTINGS, sizes, {}, decodes=decodes)
    return [log["event"] for log in logs]


def records(tmp_path: Path) -> int:
    return len(list(tmp_path.glob("triton/headrace-*.compiled")))


def test_each_kind_of_worker_is_compiled_once(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert events(model) == ["compiling", "compiled ahead"]
    assert events(model) == []
    assert events(model, decodes=False) == ["compiling", "compiled ahead"]
    assert events(model, replace(SIZES, max_running=5)) == ["compiling", "compiled ahead"]
    assert records(tmp_path) == 3


def test_models_that_are_not_replayed_are_not_compiled_ahead(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "replayable", property(lambda _: False))
    assert events(model) == []


@pytest.mark.parametrize("error", [RuntimeError("bug"), torch.OutOfMemoryError("full")])
def test_failed_search_for_kernels_is_logged_and_does_not_stop_the_start(
    error: Exception, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(module, "_launch_all", fail)
    assert events(model) == ["kernels are not compiled in parallel"]
    assert records(tmp_path) == 0


def test_kernels_that_were_not_compiled_are_tried_again_at_the_next_start(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_kernel(*_: object, **__: object) -> None:
        pool.submit(KernelSource("m", "k", False, "", {}, {}, {}, None, {}))

    with CompilePool(1, command=[sys.executable, "-c", ""]) as pool:
        monkeypatch.setattr(compile_pool, "CompilePool", lambda: pool)
        monkeypatch.setattr(module, "_launch_all", with_kernel)
        found = events(model)
    assert found[-2:] == ["kernels left to the warm-up", "compiled ahead"]
    assert records(tmp_path) == 0
