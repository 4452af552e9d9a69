"""Comparison with guidellm: ``python -m tests.loadgen.peer --guidellm COMMAND``.

guidellm 0.8 must be installed in a separate environment. ``--tokenizer`` is a folder readable by
transformers, which guidellm uses to generate prompts. Both tools send 200 requests to the synthetic
server, at a constant rate of 10 per second. They do so twice: with unlimited slots, and with too
few slots, so that the queue grows. The medians of both tools are compared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.files import SUMMARY
from tests.loadgen.synthetic import MODEL, Behaviour, serving

REQUESTS, RATE, INPUT, OUTPUT = 200, 10, 20, 32
CASES = {
    "a slot per request": Behaviour(ttft_s=0.05, itl_s=0.02),
    "6 slots": Behaviour(ttft_s=0.05, itl_s=0.02, concurrency=6),
}
_BACKEND = "validate_backend=false,request_format=/v1/completions"
MEASURES = {
    "ttft_from_send": ("time_to_first_token_ms", 1e-3),
    "itl": ("inter_token_latency_ms", 1e-3),
    "e2e_from_send": ("request_latency", 1.0),
}
"""Our names of measures, mapped to guidellm's name and guidellm's unit in seconds."""


def ours(url: str, folder: Path) -> dict[str, float]:
    """Return medians of our load generator, in seconds."""
    command = [
        *(sys.executable, "-m", "loadgen", "run", f"{url}/v1", "--arrivals", "constant"),
        *("--rate", str(RATE), "--requests", str(REQUESTS), "--input", f"fixed:{INPUT}"),
        *("--output", f"fixed:{OUTPUT}", "--out", str(folder)),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    measures = json.loads((folder / SUMMARY).read_text())["measures"]
    return {name: float(measures[name]["p50"]) for name in MEASURES}


def guidellm(command: str, tokenizer: Path, url: str, folder: Path) -> dict[str, float]:
    """Return medians of guidellm, in seconds."""
    report = folder / "guidellm.json"
    subprocess.run(
        [
            *(command, "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},model={MODEL},{_BACKEND}"),
            *("--profile", f"kind=constant,rate={RATE}"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"),
            *("--output", f"kind=json,path={report}"),
        ],
        check=True,
    )  # fmt: skip
    benchmark: dict[str, Any] = json.loads(report.read_text())["benchmarks"][0]
    metrics = benchmark["metrics"]
    return {
        name: scale * float(metrics[theirs]["successful"]["median"])
        for name, (theirs, scale) in MEASURES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.loadgen.peer")
    parser.add_argument("--guidellm", default="guidellm", help="command of guidellm")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer")
    own = parser.parse_args()
    table = Table("server", "median", "ours, ms", "guidellm, ms", "ratio")
    for case, behaviour in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            with serving(behaviour) as server:
                mine = ours(server.url, Path(folder))
            with serving(behaviour) as server:
                other = guidellm(own.guidellm, own.tokenizer, server.url, Path(folder))
        for name in MEASURES:
            numbers = (f"{1e3 * found[name]:,.1f}" for found in (mine, other))
            table.add_row(case, name, *numbers, f"{mine[name] / other[name]:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
