"""Events are named by numbers, of which the latest are kept."""

import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch

from runtime.errors import EventTimeout
from runtime.graphs.events import Events


class Stream:
    """Records events that report which of them is waited for."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waited: list[int] = []

    def record_event(self) -> Any:
        number, self.recorded = self.recorded, self.recorded + 1

        class Event:
            def wait(_) -> None:
                self.waited.append(number)

        return Event()


def test_wait_is_for_the_event_or_the_oldest_one_that_is_kept() -> None:
    stream = Stream()
    events = Events(torch.device("cuda"))
    with patch("torch.cuda.current_stream", lambda _: stream):
        assert [events.record() for _ in range(200)] == list(range(200))
    for number in (199, 140, 136, 135, 0):
        events.wait(number)
    assert stream.waited == [199, 140, 136, 136, 136]
    events.wait(None)
    assert len(stream.waited) == 5


def test_events_on_a_cpu_are_numbers() -> None:
    events = Events(torch.device("cpu"))
    assert [events.record() for _ in range(70)] == list(range(70))
    for number in (69, 0, None):
        events.wait(number)


def test_wait_blocks_until_the_event_is_recorded() -> None:
    events = Events(torch.device("cpu"))
    order: list[str] = []

    def wait() -> None:
        events.wait(1)
        order.append("waited")

    waiting = threading.Thread(target=wait)
    waiting.start()
    events.record()
    order.append("recorded")
    events.record()
    waiting.join(30)
    assert order == ["recorded", "waited"]


def test_event_that_is_never_recorded_times_out() -> None:
    events = Events(torch.device("cpu"), wait_s=0.01)
    events.record()
    with pytest.raises(EventTimeout, match=r"event 1 was not recorded in 0\.01 s; the latest is 0"):
        events.wait(1)
