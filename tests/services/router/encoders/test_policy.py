"""Choice of an encoder worker: a pure function of the workers."""

from collections import Counter
from random import Random

import pytest

from services.router.capacity import WorkerHealth
from services.router.choice import PolicyName
from services.router.encoders.policy import EncoderSnapshot, place_inputs
from tests.services.router.encoders.samples import BATCH, encoder


def worker(name: str, queue: int = 0, **values: object) -> EncoderSnapshot:
    known = {"health": WorkerHealth.READY, "max_queue_tokens": 1000, "batch_tokens": BATCH}
    return EncoderSnapshot(
        worker_id=name,
        model=encoder(),
        queue_tokens=queue,
        **{**known, **values},  # type: ignore[arg-type]
    )


def place(*workers: EncoderSnapshot, tokens: int = 10, exclude: tuple[str, ...] = ()) -> str | None:
    found = place_inputs(
        tokens, workers, PolicyName.SHORTEST_QUEUE, Random(0), backlog_s=0.25, exclude=exclude
    )
    return found.worker_id if found else None


def test_shortest_queue_in_tokens_is_chosen() -> None:
    assert place(worker("a", 30), worker("b", 20), worker("c", 25)) == "b"


def test_ties_are_broken_at_random() -> None:
    tied = [worker("a"), worker("b")]
    rng = Random(1)
    counts: Counter[str] = Counter()
    for _ in range(200):
        found = place_inputs(10, tied, PolicyName.SHORTEST_QUEUE, rng, backlog_s=0.25)
        assert found is not None
        counts[found.worker_id] += 1
    assert min(counts.values()) > 60


@pytest.mark.parametrize(
    "health", [h for h in WorkerHealth if h not in (WorkerHealth.READY, WorkerHealth.UNMATCHED)]
)
def test_workers_that_are_not_ready_get_nothing(health: WorkerHealth) -> None:
    assert place(worker("a", health=health)) is None
    assert place(worker("a", health=health), worker("b", 50)) == "b"


def test_excluded_workers_get_nothing() -> None:
    assert place(worker("a"), worker("b", 50), exclude=("a",)) == "b"
    assert place(worker("a"), exclude=("a",)) is None


def test_worker_with_a_backlog_gets_nothing() -> None:
    """Two batches are the least backlog; a fast worker has a longer one."""
    assert place(worker("a", 2 * BATCH - 1)) == "a"
    assert place(worker("a", 2 * BATCH)) is None
    assert place(worker("a", 2 * BATCH, tokens_per_s=2000.0)) == "a"
    assert place(worker("a", 500, tokens_per_s=2000.0)) is None


def test_limit_of_the_worker_is_kept_unless_it_is_idle() -> None:
    assert place(worker("a", 1, max_queue_tokens=50), tokens=49) == "a"
    assert place(worker("a", 1, max_queue_tokens=50), tokens=50) is None
    assert place(worker("a", 0, max_queue_tokens=50), tokens=500) == "a"


def test_round_robin_uses_the_least_recently_used_worker() -> None:
    workers = [worker("a", 0, last_placement=7), worker("b", 90, last_placement=3)]
    found = place_inputs(10, workers, PolicyName.ROUND_ROBIN, Random(0), backlog_s=0.25)
    assert found is workers[1]
