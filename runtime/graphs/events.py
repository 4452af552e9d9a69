"""CUDA events between streams, named by numbers."""

import torch

_KEPT = 64


class Events:
    """The latest events of a device.

    Their numbers, unlike CUDA events, can be sent to another process: ranks that compute the same
    steps record the same events. One thread records, others may wait.

    Args:
        device: on a CPU there are no events, because work has completed when a call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event | None] = [None] * _KEPT
        self._latest = -1

    def record(self) -> int | None:
        """Record an event on the current stream and return its number; None on a CPU."""
        if self._device.type != "cuda":
            return None
        number = self._latest + 1
        event = torch.cuda.current_stream(self._device).record_event()
        self._events[number % _KEPT] = event
        self._latest = number
        return number

    def wait(self, number: int | None) -> None:
        """Let the current stream wait for an event; None: for nothing.

        Instead of an event that is not kept any more, it waits for the oldest one that is kept.
        """
        if number is None:
            return
        kept = max(number, self._latest - _KEPT + 1)
        event = self._events[kept % _KEPT]  # meanwhile, a later one may have replaced it
        if number > self._latest or event is None:
            raise ValueError(f"event {number} was not recorded; the latest is {self._latest}")
        event.wait()
