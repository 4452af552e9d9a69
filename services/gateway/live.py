"""State of the deployment for the live page: load of the workers, transfers, recent requests.

The state contains no prompt, no output and no address of a worker or router.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge

from services.common.encoder_placement import EncoderList
from services.common.listings import WorkerList, WorkerView
from services.common.metrics import service_version
from services.common.placement import Role
from services.gateway.encoding.models import ServedEncoder
from services.gateway.gateway import Gateway
from services.gateway.keys import Tenant

PERIOD_S = 0.9
"""Time for which the state of the workers is reused, seconds; shorter than the page's interval."""
MAX_WORKERS = 64
"""Workers that the state lists; totals include all of them."""
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.2, 10.0
"""Bounds on the time between the two measurements of a rate, in seconds."""
_SILENT_S = 2.0
"""Time in seconds without a heartbeat after which a worker's rate is unknown."""


class TransferredKV(NamedTuple):
    """KV that workers transferred: bytes, or bytes/s. See `Heartbeat`."""

    raw: float = 0
    wire: float = 0
    faster_raw: float = 0


_NO_KV = TransferredKV()


@dataclass(frozen=True)
class _Measurement:
    """KV that a worker has transferred until ``at``, and its rates then."""

    at: float
    moved: TransferredKV
    rates: TransferredKV = _NO_KV


class TransferRates:
    """Transfer rates of workers, from the byte counts of consecutive states."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], _Measurement] = {}

    def update(self, workers: Sequence[WorkerView], now: float) -> list[TransferredKV]:
        """Return the rates of each worker.

        A rate is 0 in the first state with a worker, and while there are no heartbeats.

        Args:
            now: time at which a router returned ``workers``, seconds.
        """
        self._last = {(w.worker_id, w.epoch): self._measure(w, now) for w in workers}
        return [
            _NO_KV if worker.silent_s > _SILENT_S else measured.rates
            for worker, measured in zip(workers, self._last.values(), strict=True)
        ]

    def _measure(self, worker: WorkerView, now: float) -> _Measurement:
        """Return the measurement of a worker's last heartbeat."""
        at = now - worker.silent_s
        moved = _moved(worker)
        last = self._last.get((worker.worker_id, worker.epoch))
        if last is None or abs(at - last.at) > _MAX_INTERVAL_S:
            return _Measurement(at, moved)
        if (elapsed := at - last.at) < _MIN_INTERVAL_S:
            # The same heartbeat: its computed time varies with the duration of the router's call.
            return last
        added = zip(moved, last.moved, strict=True)
        return _Measurement(
            at, moved, TransferredKV(*(max(0.0, (a - b) / elapsed) for a, b in added))
        )


class LiveState:
    """The state for all viewers of one gateway. They share one call to a router per `PERIOD_S`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._id = secrets.token_hex(4)
        self._rates = TransferRates()
        self._collecting = asyncio.Lock()
        self._fleet: dict[str, Any] = {}
        self._until = float("-inf")

    async def describe(self, tenant: Tenant | None) -> dict[str, Any]:
        """Return the state of the deployment, and the recent requests of a tenant."""
        loop = asyncio.get_running_loop()
        async with self._collecting:
            if loop.time() >= self._until:
                self._fleet = await self._collect()
                self._until = loop.time() + PERIOD_S
        now = time.monotonic()
        metrics = self._gateway.metrics
        requests = self._gateway.recent.of(tenant.name if tenant else None)
        return {
            **self._fleet,
            "gateway": {
                "id": self._id,
                "version": service_version(),
                "requires_key": self._gateway.keys.required,
                "serves_metrics": self._gateway.settings.metrics_port is None,
                "at_s": round(now, 3),
                "running": _value(metrics.running),
                "generation_tokens": _value(metrics.generation_tokens),
            },
            "requests": requests.describe(now),
        }

    async def _collect(self) -> dict[str, Any]:
        """Return the state of router and workers."""
        model = self._gateway.model
        not_ready = await self._gateway.not_ready()
        listed = await self._gateway.router.workers()
        encoder = self._gateway.encoder
        encoders = await self._gateway.router.encoders(encoder.name) if encoder else None
        return {
            "model": {
                "name": model.name,
                "context_length": self._gateway.limits.context_length,
                "generates": model.generates,
            },
            "encoder": None if encoder is None else _describe_encoder(encoder, encoders),
            "not_ready": not_ready,
            "router": None if listed is None else {"waiting": listed.waiting},
            **self._describe_workers(listed or WorkerList(workers=[])),
        }

    def _describe_workers(self, listed: WorkerList) -> dict[str, Any]:
        # Workers that are not ready come first, so that the list has them in any case.
        workers = sorted(
            (w for w in listed.workers if w.model == self._gateway.model.name),
            key=lambda worker: (worker.state == "ready", worker.worker_id),
        )
        rates = self._rates.update(workers, asyncio.get_running_loop().time())
        described = [_describe(w, rate) for w, rate in zip(workers, rates, strict=True)]
        return {
            "workers": sorted(described[:MAX_WORKERS], key=lambda worker: str(worker["name"])),
            "workers_total": len(workers),
            "queue_tokens": sum(worker["queue_tokens"] for worker in described),
            "kv": _describe_kv(workers, rates),
        }


def _describe_encoder(encoder: ServedEncoder, listed: EncoderList | None) -> dict[str, Any]:
    """Return what the page shows of the encoder and its workers, those that are not ready first."""
    workers = sorted(
        (w for w in (listed.workers if listed else ()) if w.model.name == encoder.name),
        key=lambda worker: (worker.state == "ready", worker.worker_id),
    )
    described = [
        {
            "name": worker.worker_id,
            "state": worker.state,
            "queue_tokens": worker.queue_tokens,
            "tokens_s": round(worker.tokens_per_s),
            "running": worker.running,
            "waiting": worker.waiting,
        }
        for worker in workers
    ]
    return {
        "name": encoder.name,
        "max_tokens": encoder.facts.max_tokens if encoder.facts else None,
        "router_waiting": listed.waiting if listed else 0,
        "workers": sorted(described[:MAX_WORKERS], key=lambda worker: str(worker["name"])),
        "workers_total": len(workers),
    }


def _describe_kv(workers: Sequence[WorkerView], rates: Sequence[TransferredKV]) -> dict[str, Any]:
    """Return the KV that decode workers received, and the share sent raw because it was faster."""
    moved = [_moved(worker) for worker in workers]
    received = _sum(moved, workers, Role.DECODE)
    receiving = _sum(rates, workers, Role.DECODE)
    sending = _sum(rates, workers, Role.PREFILL)
    sent = sending if sending.raw else _sum(moved, workers, Role.PREFILL)
    return {
        "raw_bytes": received.raw,
        "wire_bytes": received.wire,
        "raw_s": round(receiving.raw),
        "wire_s": round(receiving.wire),
        "faster_raw_share": round(sent.faster_raw / sent.raw, 4) if sent.raw else 0.0,
        "compressible": any(w.compatibility and w.compatibility.codec != "raw" for w in workers),
    }


def _sum(kv: Sequence[TransferredKV], workers: Sequence[WorkerView], role: Role) -> TransferredKV:
    """Return the sum of ``kv`` over the workers of a role."""
    of_role = [own for own, worker in zip(kv, workers, strict=True) if worker.role is role]
    return TransferredKV(*map(sum, zip(*of_role, strict=True))) if of_role else _NO_KV


def _moved(worker: WorkerView) -> TransferredKV:
    """Return the KV that a worker has transferred since its start."""
    return TransferredKV(worker.kv_raw_bytes, worker.kv_wire_bytes, worker.kv_faster_raw_bytes)


def _describe(worker: WorkerView, rate: TransferredKV) -> dict[str, Any]:
    """Return what the page shows of a worker; its reason may contain addresses."""
    return {
        "name": worker.worker_id,
        "role": worker.role,
        "state": worker.state,
        "kv_format": worker.compatibility.kv_format if worker.compatibility else None,
        "kv_eviction": worker.compatibility.kv_eviction if worker.compatibility else 0.0,
        "queue_tokens": worker.queue_tokens + worker.promised_tokens,
        "running": worker.running,
        "waiting": worker.waiting,
        "kv_usage": round(_kv_usage(worker), 4),
        "wire_s": round(rate.wire),
    }


def _value(metric: Counter | Gauge) -> float:
    """Return the value of a metric without labels."""
    return next(sample.value for family in metric.collect() for sample in family.samples)


def _kv_usage(worker: WorkerView) -> float:
    """Return the share of KV pages in use, 0 to 1: that of the fullest page group."""
    free = worker.pages_free
    used = (1 - min(free[group], total) / total for group, total in worker.pages_total.items())
    return max(used)
