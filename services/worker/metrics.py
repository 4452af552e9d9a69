"""Metrics that prefill and decode workers share; the transfer adds its own to the registry."""

from collections.abc import Mapping

from runtime.engine.prefixes import PrefixCounts
from runtime.pages.plan import PagePlan
from services.common.metrics import STEP_SECONDS, MetricFactory
from services.worker.engine_thread import EngineThread
from services.worker.grammars import Grammars
from services.worker.process_metrics import ProcessMetrics, drain


class WorkerMetrics(ProcessMetrics):
    """The metrics of one prefill or decode worker."""

    def __init__(self) -> None:
        super().__init__()
        make = self.make
        self.streams = make.counter(
            "worker_streams", "Gateway streams that have ended on this worker."
        )
        self.stages = make.seconds(
            "worker_stage",
            "Seconds of a sequence in each stage before its decode.",
            "stage",
        )
        self.running = make.gauge("num_requests_running", "Sequences in the batch.")
        self.waiting = make.gauge("num_requests_waiting", "Sequences that wait for the batch.")
        self.pages_total = make.gauge("kv_pages", "KV pages of a page group.", "group")
        self.pages_free = make.gauge("kv_pages_free", "KV pages that are free.", "group")
        self.cache_usage = make.gauge(
            "kv_cache_usage_perc", "Share of the KV pages in use, from 0 to 1.", "group"
        )
        self.prefixes = PrefixMetrics(make)
        self.prompt_tokens = make.counter(
            "worker_prompt_tokens", "Prompt tokens of the streams that this worker accepted."
        )
        self.generation_tokens = make.counter(
            "worker_generation_tokens", "Tokens that this worker sampled or passed on."
        )
        self.not_finite = make.counter(
            "worker_not_finite", "Requests that ended because their logits were NaN or infinite."
        )
        self.given_back = make.counter(
            "worker_prefills_given_back",
            "Prefills that this decode worker gave back and requested again later, because a step "
            "had no pages for their KV.",
        )
        self.steps = make.counter("engine_steps", "Steps of the engine.")
        self.busy_seconds = make.counter("engine_busy_seconds", "Seconds spent in engine steps.")
        self.ranks = RankMetrics(make)
        self.plan_seconds = make.seconds(
            "engine_plan",
            "Seconds in which a step takes commands and is scheduled.",
            buckets=STEP_SECONDS,
        )
        self.inter_token_seconds = make.seconds(
            "worker_inter_token_latency",
            "Seconds of each step that decoded sequences: the time between two of their tokens.",
        )
        self.info = make.gauge(
            "worker_info",
            "Always 1; the labels name the worker, its model, its KV format and its kernels.",
            *("worker", "model", "kv_format", "matmul", "attention", "kernel_plan"),
        )
        self.grammars = GrammarMetrics(make)
        self._steps = 0
        self._busy_s = 0.0

    def observe_stages(self, **seconds: float) -> None:
        """Add the seconds of a sequence in the stages with these names."""
        for stage, duration_s in seconds.items():
            self.stages.labels(stage).observe(duration_s)

    def observe(self, engine: EngineThread) -> None:
        """Set the gauges to the load of the engine; advance the counters and histograms."""
        load = engine.load
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.queue_tokens.set(load.queue_tokens)
        free = engine.page_plan.by_name(load.pages_free)
        for group, pages in engine.page_plan.by_name(engine.pages_total).items():
            self.pages_total.labels(group).set(pages)
            self.pages_free.labels(group).set(free[group])
            self.cache_usage.labels(group).set(1 - free[group] / pages)
        self.prefixes.observe(engine.page_plan, load.prefixes)
        self.steps.inc(load.steps - self._steps)
        self.busy_seconds.inc(load.busy_s - self._busy_s)
        self._steps = load.steps
        self._busy_s = load.busy_s
        drain(engine.plan_times, self.plan_seconds)
        drain(engine.decode_times, self.inter_token_seconds)


class GrammarMetrics:
    """Metrics of the grammars of constrained requests."""

    def __init__(self, make: MetricFactory) -> None:
        self._hits = make.counter(
            "worker_grammar_cache_hits",
            "Constrained requests whose grammar this worker had compiled before.",
        )
        self._seconds = make.seconds(
            "worker_grammar_compile", "Seconds of each compilation of a grammar."
        )
        self._before = 0

    def observe(self, grammars: Grammars) -> None:
        """Advance the metrics to the counts of the grammars."""
        self._hits.inc(grammars.hits - self._before)
        self._before = grammars.hits
        while grammars.compile_times:
            self._seconds.observe(grammars.compile_times.popleft())


class PrefixMetrics:
    """Metrics of the prefix cache.

    Attributes:
        computed_here: counts prompts that a decode worker computes itself.
    """

    def __init__(self, make: MetricFactory) -> None:
        self._cached = make.gauge(
            "kv_pages_cached",
            "KV pages that are free, and whose content later prompts can reuse.",
            "group",
        )
        self._queried = make.counter(
            "prefix_cache_queries", "Tokens of the prompts that were searched in the cache."
        )
        self._reused = make.counter(
            "prefix_cache_hits",
            "Tokens of these prompts whose KV was in the cache: a prefill worker does not compute "
            "them, a decode worker does not fetch them.",
        )
        self._evicted = make.counter(
            "prefix_cache_evictions", "Cached KV pages that were evicted to be reused.", "group"
        )
        self.computed_here = make.counter(
            "worker_prompts_computed_here",
            "Prompts with a prefill worker whose last tokens this decode worker computed itself, "
            "because it had the KV of the others.",
        )
        self._before = PrefixCounts()

    def observe(self, plan: PagePlan, counts: PrefixCounts) -> None:
        """Advance the counters to the counts of an engine."""
        before, self._before = self._before, counts
        self._queried.inc(counts.queried_tokens - before.queried_tokens)
        self._reused.inc(counts.reused_tokens - before.reused_tokens)
        for group, pages in plan.by_name(counts.evicted.minus(before.evicted)).items():
            self._evicted.labels(group).inc(pages)
        for group, pages in plan.by_name(counts.cached).items():
            self._cached.labels(group).set(pages)


class RankMetrics:
    """Gauges of each rank of a worker."""

    def __init__(self, make: MetricFactory) -> None:
        self._stalled = make.gauge(
            "worker_stalled_seconds",
            "Seconds since a thread of a rank made progress in its current step, 0 without work.",
            *("thread", "rank"),
        )
        self._weight_bytes = make.gauge(
            "worker_weight_bytes", "Size of the weights of a rank in bytes.", "rank"
        )
        self._device_bytes = make.gauge(
            "worker_device_bytes",
            "Bytes that a rank had allocated on its GPU when it was ready, 0 on a CPU.",
            "rank",
        )

    def set_memory(self, rank: int, *, weight_bytes: int, device_bytes: int) -> None:
        """Set the gauges of the memory of a rank."""
        self._weight_bytes.labels(rank).set(weight_bytes)
        self._device_bytes.labels(rank).set(device_bytes)

    def set_stalled(self, stalled_s: Mapping[tuple[str, int], float]) -> None:
        """Set the seconds without progress, by thread and rank."""
        for (thread, rank), seconds in stalled_s.items():
            self._stalled.labels(thread, rank).set(seconds)
