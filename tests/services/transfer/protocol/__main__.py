"""Search all cases: ``python -m tests.services.transfer.protocol``."""

import sys
import time

from tests.services.transfer.protocol.bugs import BUGS
from tests.services.transfer.protocol.cached_bugs import CACHED_BUGS
from tests.services.transfer.protocol.cases import CASES
from tests.services.transfer.protocol.search import search


def main() -> None:
    """Print the result of each case, then the trace of each bug."""
    for case in CASES:
        start = time.process_time()
        result = search(case.bounds, case.max_states, report=_report)
        _show(f"{case.name}: {result} ({time.process_time() - start:.0f} s)")
    for bug in (*BUGS, *CACHED_BUGS):
        with bug.present():
            _show(f"\nbug: {bug.name}\n{search(bug.bounds)}")


def _report(found: int, left: int) -> None:
    sys.stderr.write(f"{found} states found, {left} to expand\n")


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
