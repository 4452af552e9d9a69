"""Compare disaggregated and colocated serving under load: ``python -m tests.programs.load_bench``.

Both deployments serve the default model and receive the same requests at the same times, at several
rates and with several seeds. The load generator writes a folder for each sweep, and `report.html`,
which compares the two.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.harness.deployment import deployed

SIDES = {"colocated": ("--colocated",), "disaggregated": ()}
MAX_LAG_S = 0.1
"""Larger than the default, because the load generator shares two cores with the deployment."""
_JSON = {f"HEADRACE_{role}_LOG_FORMAT": "json" for role in ("PREFILL", "DECODE")}
_LOADGEN = (sys.executable, "-m", "loadgen")


def measure(name: str, rates: str, seeds: int, seconds: float, out: Path) -> None:
    """Run a sweep against one deployment and write the results to the folder ``out/name``."""
    with deployed(*SIDES[name], environment=_JSON) as running:
        command = [
            *(*_LOADGEN, "sweep", f"{running.url}/v1", "--rates", rates, "--seeds", str(seeds)),
            *("--preset", "humaneval", "--scale", "0.3"),
            *("--ignore-eos", "--duration", str(seconds)),
            *("--most-lag", str(MAX_LAG_S)),
            *("--warm-up", str(seconds / 5), "--objective", "ttft=1", "--objective", "tpot=0.1"),
            *(part for url in running.metrics_urls().values() for part in ("--metrics", url)),
            *("--out", str(out / name)),
        ]
        subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.load_bench")
    parser.add_argument("--rates", default="0.5,1,2,3", help="requests/s, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15, help="duration of each run, seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    own = parser.parse_args()
    for name in SIDES:
        measure(name, own.rates, own.seeds, own.seconds, own.out)
    folders = [str(own.out / name) for name in SIDES]
    subprocess.run([*_LOADGEN, "compare", *folders, "--out", str(own.out)], check=True)


if __name__ == "__main__":
    main()
