"""Send mutated messages to every port: ``python -m tests.programs.fuzzing``."""

import argparse
import asyncio
import sys

from tests.programs.fuzzing.campaign import PORTS, attack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="messages to each port")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", choices=sorted(PORTS), action="append", help="default: all")
    arguments = parser.parse_args()
    failed = False
    for name in arguments.port or PORTS:
        report = asyncio.run(attack(name, arguments.messages, arguments.seed))
        print(report, flush=True)  # noqa: T201
        failed |= bool(report.faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
