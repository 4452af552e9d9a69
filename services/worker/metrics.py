"""Metrics that prefill and decode workers share; the transfer adds its own to the registry."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from services.common.metrics import STEP_SECONDS, MetricFactory


class WorkerMetrics:
    """The metrics of one worker process.

    Attributes:
        registry: everything that the worker's ``/metrics`` endpoint serves.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make = MetricFactory(self.registry)
        self.requests = make.counter("requests", "sequences ended", "endpoint", "status")
        self.stages = make.seconds("request_stage", "time of a sequence in each stage", "stage")
        self.running = make.gauge("num_requests_running", "sequences in the batch")
        self.waiting = make.gauge("num_requests_waiting", "sequences waiting")
        self.queue_tokens = make.gauge("queue_tokens", "tokens accepted and not yet finished")
        self.pages_total = make.gauge("kv_pages", "KV pages", "kind")
        self.pages_free = make.gauge("kv_pages_free", "free KV pages", "kind")
        self.cache_usage = make.gauge(
            "kv_cache_usage_perc", "share of KV pages in use, 0 to 1", "kind"
        )
        self.prompt_tokens = make.counter("prompt_tokens", "prompt tokens accepted")
        self.generation_tokens = make.counter("generation_tokens", "tokens sampled")
        self.steps = make.counter("engine_steps", "steps of the engine")
        self.busy_seconds = make.counter("engine_busy_seconds", "time spent in engine steps")
        self.plan_seconds = make.seconds(
            "engine_plan",
            "time in which a step takes commands and is scheduled",
            buckets=STEP_SECONDS,
        )
        self.info = make.gauge(
            "worker_info",
            "always 1; the labels name the model and its kernels",
            *("model", "products", "attention", "kernel_plan"),
        )
        self._steps, self._busy_s = 0, 0.0

    def observe_load(self, *, running: int, waiting: int, queue_tokens: int) -> None:
        """Set the load gauges."""
        self.running.set(running)
        self.waiting.set(waiting)
        self.queue_tokens.set(queue_tokens)

    def observe_pages(self, kind: str, free: int, total: int) -> None:
        """Set the gauges of the KV pages of one kind: ``exact`` or ``stored``.

        Only compressed KV formats have stored pages.
        """
        self.pages_total.labels(kind).set(total)
        self.pages_free.labels(kind).set(free)
        self.cache_usage.labels(kind).set(1 - free / total)

    def observe_plans(self, seconds: Iterable[float]) -> None:
        """Record the durations of plans; see `EngineThread.take_plan_times`."""
        for duration in seconds:
            self.plan_seconds.observe(duration)

    def observe_steps(self, steps: int, busy_s: float) -> None:
        """Advance the step counters to these totals since the start."""
        self.steps.inc(steps - self._steps)
        self.busy_seconds.inc(busy_s - self._busy_s)
        self._steps, self._busy_s = steps, busy_s
