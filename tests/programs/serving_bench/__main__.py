"""``python -m tests.programs.serving_bench``: see `tests/programs/README.md`."""

import signal
import sys

from rich.console import Console

from loadgen.report import write_page
from services.common.errors import SettingsError
from tests.programs.serving_bench.arguments import cases_of, models_of, parser, systems_of
from tests.programs.serving_bench.bench import REPORT, Bench, Limits
from tests.programs.serving_bench.report import page, print_tables
from tests.programs.serving_bench.results import RESULTS, Results, manifest, merged
from tests.programs.serving_bench.tables import errors

STOPPED, FAILED = 130, 1
WIDTH = 160
"""Width of tables in a file, in characters."""


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = parser()
    own = arguments.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    if own.merge:
        document = merged(own.merge) | {"baseline": own.baseline}
        write_page(own.out / REPORT, page(document))
        print_tables(document, console)
        return 0
    # Both signals end what was started. A shell ignores SIGINT for its background jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        systems = systems_of(own)
        cases = cases_of(own)
        for model in models_of(own):
            console.print(f"model {model.name}: {model.ensure()}")
    except (ValueError, SettingsError) as error:
        arguments.error(str(error))
    results = Results(own.out / RESULTS, manifest(sys.argv[1:], own.commit), own.baseline)
    limits = Limits(own.limit, own.total_limit, own.most_lag)
    Bench(results, cases, console, limits=limits, keep_records=own.keep_records).run(systems)
    print_tables(results.document, console)
    console.print(f"results in {results.file}, report in {own.out / REPORT}")
    if results.document["stopped"]:
        return STOPPED
    return FAILED if any(map(errors, results.document["systems"])) else 0


if __name__ == "__main__":
    sys.exit(main())
