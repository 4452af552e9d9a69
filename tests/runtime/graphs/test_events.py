"""Events are named by numbers, of which the latest are kept."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

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
    with pytest.raises(ValueError, match="event 200 was not recorded"):
        events.wait(200)


def test_cpu_has_no_events() -> None:
    events = Events(torch.device("cpu"))
    assert events.record() is None
    events.wait(None)
