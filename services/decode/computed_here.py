"""Choice of prompts that a decode worker completes itself, without their prefill workers."""

import time
from collections.abc import Collection
from dataclasses import replace

from headrace.v1 import prefill_pb2
from runtime.pages.sent import SentTokens
from services.decode.prompt_times import FetchedPrompt, PromptSize, PromptTimes, is_faster_here
from services.worker.lifecycle import Worker
from services.worker.streams import Stream


class ComputedHere:
    """Chooses prompts to complete by the measured times of both paths, and measures these times.

    The last tokens of such a prompt are computed in chunks beside running sequences, whose steps
    then take longer. The number of tokens that wait to be computed is therefore bounded. Prompts of
    which less than half is cached, such as those that only share a short system prompt, are left to
    prefill workers.

    Args:
        compute_tokens: maximum number of tokens, over all streams, that wait to be computed here; 0
            to compute none.
    """

    def __init__(self, worker: Worker, compute_tokens: int) -> None:
        self._worker = worker
        self._compute_tokens = compute_tokens
        self._times = PromptTimes()

    def tokens_of(self, stream: Stream, streams: Collection[Stream]) -> int:
        """Return how many tokens of a new stream this worker should compute; 0 to fetch their KV.

        Args:
            streams: open streams of this worker.
        """
        if stream.scores is not None:  # every prompt token is computed
            return 0
        waiting = sum(s.may_compute for s in streams if not s.decoding_since)
        waiting = max(waiting, self._worker.engine.load.pending_prompt_tokens)
        most = self._compute_tokens - waiting
        measured = self._times.measured(time.perf_counter())
        if most <= 0 or measured is None:
            return 0
        left = self._worker.engine.uncached_tokens(stream.request)
        if left is None or left > min(most, len(stream.request.tokens) / 2):
            return 0
        size = PromptSize(
            len(stream.request.tokens),
            left,
            waiting_here=waiting,
            waiting_there=sum(
                len(s.request.tokens) - s.asked_from
                for s in streams
                if s.transfer and not s.stages.prefill and _prefill_of(s) == _prefill_of(stream)
            ),
        )
        return left if is_faster_here(size, measured, self._worker.engine.inter_token_s) else 0

    def watch(self, sent: SentTokens) -> "FetchWatch":
        """Return a watch of a fetch of these tokens, which starts now."""
        return FetchWatch(self._times, sent)

    def start(self, stream: Stream) -> None:
        """Record that the engine computes the prompt of a stream, and report it to routers."""
        self._worker.metrics.prefixes.computed_here.inc()
        self._worker.report_computed_here(stream.start.request.placement_id)

    def complete(self, stream: Stream) -> None:
        """Record that the engine has computed the prompt of a stream.

        More of it may have been cached than when the stream was admitted. Call this before the
        first token is sent.
        """
        sent = self._worker.sent_tokens(stream.start.request)
        cached = stream.cached_tokens or 0
        computed = sent.computed - cached
        self._times.add_computed(computed, stream.stages.prefill, time.perf_counter())
        self._worker.count_saved(replace(sent, first=cached))


class FetchWatch:
    """Measures the time of one fetch."""

    def __init__(self, times: PromptTimes, sent: SentTokens) -> None:
        self._times = times
        self._sent = sent
        self._began = time.perf_counter()
        self._prompt: FetchedPrompt | None = None

    def take_first(self, message: prefill_pb2.FirstTokens) -> None:
        """Record the arrival of the first tokens."""
        computed = self._sent.computed
        self._prompt = FetchedPrompt(
            computed,
            min(message.reused_tokens, computed),
            computed - self._sent.first,
            queue_s=message.queue_s,
            prefill_s=message.prefill_s,
            first_s=time.perf_counter() - self._began,
        )

    def complete(self) -> None:
        """Record the arrival of all KV."""
        if self._prompt is not None:
            now = time.perf_counter()
            rest_s = now - self._began - self._prompt.first_s
            self._times.add_fetched(replace(self._prompt, rest_s=rest_s), now)


def _prefill_of(stream: Stream) -> str:
    return stream.start.prefill.worker_id
