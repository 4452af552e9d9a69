"""``python -m runtime.offline.bench TABLE …``: run the benchmark named by the first argument."""

import sys
from importlib import import_module

TABLES = (
    *("engine", "step", "decode", "prefill", "mixed", "plan", "host", "compress", "tp", "channel"),
    *("collectives", "bases", "prefix", "encoder"),
    *("kv", "kv-bytes", "kv-prefill"),
)


def main() -> None:
    """Run one benchmark: `engine`, unless the first argument names another one."""
    table = "engine"
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        table = sys.argv.pop(1)
        if table not in TABLES:
            sys.exit(f"no benchmark {table!r}; benchmarks are {', '.join(TABLES)}")
    try:
        import_module("runtime.offline.bench." + table.replace("-", "_")).main()
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        sys.exit(f"benchmark {table} needs Triton: pip install triton")


if __name__ == "__main__":
    main()
