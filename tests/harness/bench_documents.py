"""Results documents of the serving benchmark, for tests of its report."""

from typing import Any

from loadgen.measures import Window
from tests.loadgen.made_runs import document_of, records_of

STAGES = {
    "queue": 0.001,
    "prefill": 0.012,
    "kv_bytes": 2**28,
    "wire_bytes": 2**27,
    "segments": {"raw": 32},
}


def results_of(*names: str, rates: tuple[float, ...] = (4.0, 12.0, 24.0)) -> dict[str, Any]:
    """Return a document of these systems; each is slower than the one before."""
    return {
        "manifest": {"started": "2026-01-01", "commit": "abc", "gpus": ["GPU"], "arguments": []},
        "systems": [_system(name, 1.0 + at, rates) for at, name in enumerate(names)],
        "stopped": False,
    }


def _system(name: str, slower: float, rates: tuple[float, ...]) -> dict[str, Any]:
    singles: list[dict[str, Any]] = [
        {"tokens": tokens, "first": slower * tokens * 1e-5, "second": slower * tokens * 2e-5}
        | {"gap": slower * 4e-3, "stages": STAGES}
        for tokens in (512, 2048)
    ]
    probes = [(8.0, True), (16.0, False), (11.3, True)]
    passed, failed = (None, 16.0) if slower > 2 else (11.3, 16.0)
    gaps = {"p50": 4e-3, "p99": 5e-3}
    arrived = {"requests": 12.0, "tokens": 24_000.0}
    return {
        "name": name,
        "ready_s": 12.0,
        "flags": ["--colocated"],
        "settings": {"HEADRACE_X": "1"},
        "cases": {
            "single": [*singles, {"tokens": 32_000, "error": "too long"}],
            "cached": [_cached(slower), {"tokens": 32_000, "shared": 7424, "error": "too long"}],
            "load": [_load(rate, int(24 / slower)) for rate in rates],
            "search": [
                {"answer": 128, "rate": rate, "attainment": 0.95 if ok else 0.5}
                | {"passed": passed, "failed": failed, "gave_up": not ok}
                | {"passed_goodput": None if passed is None else 10.7}
                for rate, ok in probes
            ],
            "hang-ups": [
                {"answer": 128, "rate": 11.3, "round": number, "attainment": 0.97, "passes": True}
                | {"overload": _load(22.6, 8), "run": _load(11.3, 24)}
                for number in (1, 2)
            ],
            "interference": [
                {"streams": 32, "quiet": gaps, "busy": gaps, "arrived": arrived},
                {"streams": 128, "error": "time limit"},
            ],
        },
    }


def _load(rate: float, slots: int) -> dict[str, Any]:
    summary = document_of(records_of(rate, 30, slots=slots, failing=0.05), Window(5, 25))
    return {"answer": 128, "rate": rate, "seed": 0, "summary": summary, "stages": STAGES}


def _cached(slower: float) -> dict[str, Any]:
    cold = {"first": 0.4 * slower, "second": 0.5 * slower, "cached_tokens": None}
    warm = {"first": 0.04 * slower, "second": 0.1 * slower, "cached_tokens": 7424}
    ratios = {"first": 0.1, "second": 0.2}
    return {"tokens": 7900, "shared": 7424, "cold": cold, "warm": warm, "ratio": ratios}
