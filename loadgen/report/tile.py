"""Tiles: the most important metrics of a run, at the top of its report."""

from dataclasses import dataclass
from typing import Any

from loadgen.number import ms, percent, plain


@dataclass(frozen=True)
class Tile:
    """One metric with label, unit and note; ``bad`` marks a value that needs attention."""

    label: str
    value: str
    unit: str = ""
    note: str = ""
    bad: bool = False


_LATENCIES = (
    ("ttft", "Time to first token"),
    ("itl", "Inter-token latency"),
    ("e2e", "End to end"),
)


def of_run(document: dict[str, Any]) -> list[Tile]:
    """Return the tiles of a run."""
    throughput, in_flight = document["throughput"], document["in_flight"]
    tiles = []
    closed = document.get("concurrency") is not None
    for name, label in _LATENCIES:
        found = document["measures"].get(name) or {"p50": None, "p99": None}
        value = Tile(f"{label}, p50", ms(found["p50"]), "ms", f"p99 {ms(found['p99'])} ms")
        tiles.append(value if found["p50"] is not None else Tile(f"{label}, p50", "–"))
    if closed and (jct := document["measures"].get("e2e")) is not None:
        note = f"p50 {ms(jct['p50'])} ms, p99 {ms(jct['p99'])} ms"
        tiles[-1] = Tile("JCT, mean", ms(jct["mean"]), "ms", note)
    offered = f"of {plain(throughput['offered'])} {'sent' if closed else 'offered'}"
    tiles.append(Tile("Requests answered", plain(throughput["requests"]), "per second", offered))
    prompts = f"{plain(throughput['input_tokens'])} per second of prompts"
    tiles.append(Tile("Output tokens", plain(throughput["output_tokens"]), "per second", prompts))
    if (good := document["goodput"]) is not None:
        note = f"goodput {plain(good['requests'])} per second"
        tiles.append(Tile("Attainment", percent(good["attainment"]), "%", note))
    if (cached := document.get("cached")) is not None:
        note = f"mean per request {percent(cached['mean_fraction'])} %"
        tiles.append(Tile("Prompt tokens cached", percent(cached["fraction"]), "%", note))
    tiles.append(_failed(document["outcomes"]))
    maximum = f"maximum {in_flight['most']:,}"
    tiles.append(Tile("Requests in flight", plain(in_flight["mean"]), "", maximum))
    return tiles


def _failed(outcomes: dict[str, Any]) -> Tile:
    failed = sum(outcomes["failed"].values())
    total = outcomes["total"]
    share = failed / total if total else None
    note = f"{failed:,} of {total:,}"
    return Tile("Requests failed", percent(share), "%" if total else "", note, bad=failed > 0)
