"""Metrics of encoder workers; names without ``encoder`` are those of all workers."""

from services.common.metrics import STEP_SECONDS
from services.encoder.encoding_thread import EncodingThread
from services.worker.process_metrics import ProcessMetrics, drain


class EncoderMetrics(ProcessMetrics):
    """The metrics of one encoder worker."""

    def __init__(self) -> None:
        super().__init__()
        make = self.make
        self.running = make.gauge("encoder_inputs_running", "Inputs in the current batch.")
        self.waiting = make.gauge("encoder_inputs_waiting", "Inputs that wait for a batch.")
        self.calls = make.counter("encoder_calls", "Calls of gateways by result.", "result")
        for result in ("ok", "overloaded", "cancelled"):
            self.calls.labels(result)
        self.inputs = make.counter("encoder_inputs", "Inputs that were computed.")
        self.tokens = make.counter("encoder_tokens", "Tokens of the inputs that were computed.")
        self.batches = make.counter("encoder_batches", "Batches that were computed.")
        self.busy_seconds = make.counter("encoder_busy_seconds", "Seconds spent in batches.")
        self.batch_seconds = make.seconds(
            "encoder_batch", "Seconds of a batch.", buckets=STEP_SECONDS
        )
        self.queue_seconds = make.seconds(
            "encoder_queue", "Mean seconds of the inputs of a call before their batch."
        )
        self.not_finite = make.counter(
            "encoder_not_finite", "Inputs whose output was NaN or infinite."
        )
        self.stalled = make.gauge(
            "encoder_stalled_seconds",
            "Seconds since the encoding thread made progress in its batch, 0 without one.",
        )
        self.info = make.gauge(
            "encoder_info",
            "Always 1; the labels name the worker, its model, its task and its kernels.",
            *("worker", "model", "task", "backend"),
        )
        self._seen = (0, 0, 0, 0)
        self._busy_s = 0.0

    def observe(self, thread: EncodingThread) -> None:
        """Set the gauges to the load of the thread; advance the counters and histograms."""
        load = thread.load
        self.queue_tokens.set(load.queue_tokens)
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.stalled.set(thread.stalled_s)
        now = (load.batches, load.inputs, load.tokens, thread.not_finite)
        counters = (self.batches, self.inputs, self.tokens, self.not_finite)
        for counter, value, seen in zip(counters, now, self._seen, strict=True):
            counter.inc(value - seen)
        self._seen = now
        self.busy_seconds.inc(load.busy_s - self._busy_s)
        self._busy_s = load.busy_s
        drain(thread.batch_times, self.batch_seconds)
        drain(thread.queue_times, self.queue_seconds)
