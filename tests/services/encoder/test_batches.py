"""Batches formed by tokens: order, sizes and bounded overtaking."""

import random

from services.encoder.batches import FILL, OVERTAKING, BatchQueue

FULL = 64


def queue_of(*calls: tuple[str, list[int]]) -> BatchQueue[str]:
    queue: BatchQueue[str] = BatchQueue(FULL)
    for call, lengths in calls:
        queue.add(call, lengths)
    return queue


def drain(queue: BatchQueue[str]) -> list[list[tuple[str, int]]]:
    batches = []
    while batch := queue.take():
        batches.append([(item.call, item.tokens) for item in batch])
    return batches


def test_batches_are_full_and_hold_every_input_once() -> None:
    rng = random.Random(0)
    calls = [(str(n), [rng.randint(1, 40) for _ in range(rng.randint(1, 9))]) for n in range(50)]
    batches = drain(queue_of(*calls))
    flat = sorted(pair for batch in batches for pair in batch)
    assert flat == sorted((name, tokens) for name, lengths in calls for tokens in lengths)
    sizes = [sum(tokens for _, tokens in batch) for batch in batches]
    assert max(sizes) <= FULL
    assert sum(sizes) / len(sizes) > FULL / 2


def test_input_longer_than_a_batch_is_a_batch_of_its_own() -> None:
    assert drain(queue_of(("a", [500]), ("b", [500]))) == [[("a", 500)], [("b", 500)]]


def test_short_input_does_not_wait_for_long_ones() -> None:
    queue = queue_of(("long", [60, 60, 60]))
    queue.add("short", [5])
    assert drain(queue)[0] == [("short", 5)]


def test_short_call_does_not_wait_for_a_long_list() -> None:
    queue = queue_of(("list", [8] * 100))
    assert [item.call for item in queue.take()] == ["list"] * 8
    queue.add("single", [8])
    assert "single" in [item.call for item in queue.take()]


def test_list_that_takes_its_part_does_not_starve() -> None:
    """Newer short calls precede an input only until the bound on overtaking is reached."""
    queue = queue_of(("long", [60]), ("short", [8]))
    served = 0
    while not any(item.call == "long" for item in queue.take()):
        served += 8
        queue.add("short", [8])
    assert 0 < served <= OVERTAKING * 60 + FULL


def test_inputs_of_similar_length_go_together() -> None:
    batches = drain(queue_of(("a", [4, 30, 5, 28, 6])))
    assert batches[0] == [("a", 4), ("a", 5), ("a", 6)]
    assert batches[1:] == [[("a", 28), ("a", 30)]]


def test_small_batch_is_filled_with_longer_inputs() -> None:
    assert drain(queue_of(("a", [1]), ("b", [FULL // FILL - 1])))[0] == [("a", 1), ("b", 7)]
    assert drain(queue_of(("a", [1]), ("b", [FULL // FILL])))[0] == [("a", 1)]


def test_dropped_inputs_are_not_computed() -> None:
    queue = queue_of(("a", [10]))
    items = queue.add("b", [20, 30])
    assert (queue.tokens, queue.waiting) == (60, 3)
    queue.drop(items)
    queue.drop(items)
    assert (queue.tokens, queue.waiting) == (10, 1)
    assert drain(queue) == [[("a", 10)]]
    assert (queue.tokens, queue.waiting, queue.computed) == (0, 0, 10)
    queue.drop(items)
    assert queue.tokens == 0
