"""Bounds on the batch, the queue and the tokens of an engine step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one engine.

    Attributes:
        max_running: number of batch slots. Each choice of a request takes one slot.
        max_waiting: maximum number of requests that wait for batch slots or pages.
        step_tokens: maximum number of tokens computed in one step: one for each running sequence,
            the others prompt tokens. If prompts wait, a step may exceed it to compute one page of
            them.
        chunk_tokens: maximum number of prompt tokens of one sequence computed in one step, a
            multiple of the page size.
    """

    max_running: int
    max_waiting: int
    step_tokens: int = 512
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "step_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.chunk_tokens > self.step_tokens:
            raise ValueError(
                f"chunk_tokens ({self.chunk_tokens}) must be at most "
                f"step_tokens ({self.step_tokens})"
            )
