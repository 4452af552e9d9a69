"""CUDA events between streams."""

import torch


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the current stream, for which other streams can wait; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
