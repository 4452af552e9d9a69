"""Workers of several ranks that cannot start: `headrace up` says why, and nothing is left.

`tests/services/worker/ranks/test_start.py` tests the errors of a single worker.
"""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from services.local.supervisor import MAX_START_FAILURES
from tests.harness.belongings import is_running
from tests.harness.deployment import deployed
from tests.harness.points import Points
from tests.harness.reference import model_folder
from tests.services.worker.ranks import faulty_format

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

LIMIT_S = 300.0
"""Time limit of a start on a busy machine."""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of temporary files; check that neither they nor processes are left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert not list(folder.iterdir())
    assert not list(processes_with("TMPDIR", str(folder)))


def processes_with(variable: str, value: str) -> Iterator[psutil.Process]:
    """Return the running processes that were started with a variable in their environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == value and is_running(process):
                yield process


def error_of(*flags: str, environment: dict[str, str] | None = None) -> str:
    """Return what `headrace up` prints when it ends, with single spaces."""
    with (
        pytest.raises(RuntimeError, match="`headrace up` ended") as raised,
        deployed("--colocated", "--codec", "raw", *flags, environment=environment),
    ):
        pass
    return " ".join(str(raised.value).split())


def test_more_ranks_than_query_heads_are_refused(temporary: Path) -> None:
    error = error_of("--model", str(model_folder("cpu")), "--tp", "5")
    assert "5 ranks, but the model has only 4 query heads" in error
    assert "decode-0 exited with code 2" in error


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param("memory", "rank 1: not enough GPU memory for", marks=pytest.mark.campaign),
        ("SIGKILL", f"decode-0 exited with code 1; it exited {MAX_START_FAILURES} times"),
    ],
)
def test_rank_that_cannot_start_ends_the_deployment(
    temporary: Path, fault: str, expected: str
) -> None:
    flags = ("--model", str(model_folder("cpu")), "--tp", "2", "--kv-format", faulty_format.SPEC)
    error = error_of(*flags, environment={faulty_format.VARIABLE: fault})
    assert expected in error
    if fault == "SIGKILL":
        assert "rank 1 was ended by SIGKILL" in error


@pytest.mark.campaign
def test_checkpoint_that_is_replaced_between_the_ranks_is_refused(
    temporary: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder("cpu"), model)
    points = Points(tmp_path / "points")
    (tmp_path / "points").mkdir()
    points.hold("loading", ["decode-0.1"])
    with ThreadPoolExecutor(1) as pool:
        replacing = pool.submit(replace_weights, model, points)
        error = error_of("--model", str(model), "--tp", "2", environment=points.environment)
    replacing.result()
    assert "rank 1: cannot serve" in error
    assert "ranks of the worker read different files" in error


def replace_weights(model: Path, points: Points) -> None:
    """Replace the weights with a copy when the first rank has hashed them, and the other waits."""
    deadline = time.monotonic() + LIMIT_S
    while not points.has_reached("loading"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (weights,) = model.glob("*.safetensors")
    copy = weights.with_suffix(".copy")
    shutil.copy(weights, copy)
    copy.replace(weights)
    points.release()
