"""Numbered events: points in the work of a device that other streams and processes wait for."""

import threading

import torch

from runtime.errors import EventTimeout

_KEPT = 64
WAIT_S = 10.0
"""Maximum seconds that `Events.wait` waits until an event is recorded."""


class Events:
    """The latest events of a device.

    Their numbers, unlike CUDA events, can be sent to another process: ranks that compute the same
    steps record the same events. One thread records, others may wait. A number may reach a rank
    before the step that records it, because they take different paths.

    Args:
        device: on a CPU an event is only a number, because work has completed when a call returns.
        wait_s: see `WAIT_S`.
    """

    def __init__(self, device: torch.device, wait_s: float = WAIT_S) -> None:
        self._device = device
        self._wait_s = wait_s
        self._events: list[torch.cuda.Event | None] = [None] * _KEPT
        self._latest = -1
        self._recorded = threading.Condition()

    def record(self) -> int:
        """Record an event on the current stream and return its number."""
        number = self._latest + 1
        if self._device.type == "cuda":
            event = torch.cuda.current_stream(self._device).record_event()
            self._events[number % _KEPT] = event
        with self._recorded:
            self._latest = number
            self._recorded.notify_all()
        return number

    def wait(self, number: int | None) -> None:
        """Block until an event is recorded, then let the current stream wait for it.

        None returns at once. For an event that is no longer kept, the stream waits for the oldest
        one that is kept, which was recorded later.

        Raises:
            EventTimeout: the event was not recorded in time.
        """
        if number is None:
            return
        with self._recorded:
            if not self._recorded.wait_for(lambda: number <= self._latest, self._wait_s):
                raise EventTimeout(
                    f"event {number} was not recorded in {self._wait_s} s; the latest is "
                    f"{self._latest}"
                )
        kept = max(number, self._latest - _KEPT + 1)
        event = self._events[kept % _KEPT]  # meanwhile, a later one may have replaced it
        if event is not None:
            event.wait()
