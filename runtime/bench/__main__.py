"""``python -m runtime.bench TABLE …``: run the benchmark named by the first argument."""

import sys
from importlib import import_module

TABLES = (
    *("engine", "step", "decode", "prefill", "mixed", "plan", "host", "compress"),
    *("kv", "kv-bytes", "kv-prefill"),
)


def main() -> None:
    table = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in TABLES else "engine"
    import_module("runtime.bench." + table.replace("-", "_")).main()


if __name__ == "__main__":
    main()
