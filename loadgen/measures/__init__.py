"""Measures of a run, one per file, computed from its records."""

from loadgen.measures.base import Measure, Window
from loadgen.measures.cached import Cached
from loadgen.measures.e2e import E2E, E2E_SENT
from loadgen.measures.failures import Outcomes, failures_in_words
from loadgen.measures.goodput import Goodput, Objective
from loadgen.measures.in_flight import InFlight
from loadgen.measures.itl import ITL
from loadgen.measures.lag import LAG
from loadgen.measures.normalized import NORMALIZED
from loadgen.measures.throughput import Throughput
from loadgen.measures.tpot import TPOT
from loadgen.measures.ttft import TTFT, TTFT_SENT
from loadgen.measures.turns import Turn, turns_of

MEASURES = (TTFT, ITL, TPOT, E2E, NORMALIZED, TTFT_SENT, E2E_SENT, LAG)
"""All per-request measures."""
BY_NAME = {measure.name: measure for measure in MEASURES}

__all__ = [
    "BY_NAME",
    "E2E",
    "E2E_SENT",
    "ITL",
    "LAG",
    "MEASURES",
    "NORMALIZED",
    "TPOT",
    "TTFT",
    "TTFT_SENT",
    "Cached",
    "Goodput",
    "InFlight",
    "Measure",
    "Objective",
    "Outcomes",
    "Throughput",
    "Turn",
    "Window",
    "failures_in_words",
    "turns_of",
]
