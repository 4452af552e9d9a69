"""Headrace under load, disaggregated beside colocated: ``python -m tests.e2e.load_bench``.

Both deployments of the default model get the same requests at the same times, at a few rates and
with a few seeds, from the load generator as a user runs it. What comes out is a folder for each
sweep, and `report.html`, which puts the two side by side.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.e2e.deployment import Running, deployed

SIDES = {"colocated": ("--colocated",), "disaggregated": ()}
MOST_LAG_S = 0.1
"""On two cores the generator shares them with what it measures."""
_JSON = {f"HEADRACE_{role}_LOG_FORMAT": "json" for role in ("PREFILL", "DECODE")}
_LOADGEN = (sys.executable, "-m", "loadgen")


def measure(name: str, rates: str, seeds: int, seconds: float, out: Path) -> None:
    """A sweep of one deployment, into a folder of its name."""
    with deployed(*SIDES[name], environment=_JSON) as running:
        command = [
            *(*_LOADGEN, "sweep", f"{running.url}/v1", "--rates", rates, "--seeds", str(seeds)),
            *("--preset", "humaneval", "--scale", "0.3"),
            *("--ignore-eos", "--duration", str(seconds)),
            *("--most-lag", str(MOST_LAG_S)),
            *("--warm-up", str(seconds / 5), "--objective", "ttft=1", "--objective", "tpot=0.1"),
            *(part for url in _metrics(running) for part in ("--metrics", url)),
            *("--out", str(out / name)),
        ]
        subprocess.run(command, check=True)


def _metrics(running: Running) -> list[str]:
    """Of the gateway, and of every worker."""
    urls = [f"{running.url}/metrics"]
    for name in running.state.pids:
        if name.startswith(("prefill", "decode")):
            port = running.records(name, "ready")[-1]["metrics_port"]
            urls.append(f"http://127.0.0.1:{port}/metrics")
    return urls


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.load_bench")
    parser.add_argument("--rates", default="0.5,1,2,3", help="requests a second")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15, help="of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    own = parser.parse_args()
    for name in SIDES:
        measure(name, own.rates, own.seeds, own.seconds, own.out)
    folders = [str(own.out / name) for name in SIDES]
    subprocess.run([*_LOADGEN, "compare", *folders, "--out", str(own.out)], check=True)


if __name__ == "__main__":
    main()
