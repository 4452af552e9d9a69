"""Measure the quality of a compressed KV format, and compare results.

python -m runtime.quality --format SPEC [--model NAME] [--tokens N] [--json FILE]
python -m runtime.quality --against FILE FILE ...
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from runtime.checkpoint import load_checkpoint, resolve_model
from runtime.compress.text import cut_rows, docstrings, documentation
from runtime.compress.tokenizer import text_tokenizer
from runtime.errors import RuntimeFault
from runtime.kv.registry import CALIBRATED, COMPRESSED
from runtime.models.model import Model
from runtime.quality.formats import EXACT, format_factory
from runtime.quality.measure import Result, describe, measure
from runtime.quality.metrics import Bootstrap
from runtime.quality.report import comparison_table, load, result_table, save

TEXTS = {"documentation": lambda: documentation()[1], "docstrings": docstrings}
"""Text held out from calibration, and text of another kind than the calibration text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, 2 for errors in its arguments."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.format is None and not arguments.against:
        parser.error("one of --format and --against is required")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json: there is no folder {arguments.json.parent}")
    console, log = Console(highlight=False), Console(highlight=False, stderr=True)
    try:
        results = [load(path) for path in arguments.against]
        if arguments.format is not None:
            result = _measure(arguments, log)
            console.print(result_table(result))
            if arguments.json is not None:
                save(result, arguments.json)
            results.append(result)
        if arguments.against:
            console.print(comparison_table(results))
    except (RuntimeFault, OSError) as error:
        log.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def _measure(arguments: argparse.Namespace, log: Console) -> Result:
    create = format_factory(arguments.format)
    path = resolve_model(arguments.model)
    checkpoint = load_checkpoint(path, dtype=torch.float32)
    compressed = create(checkpoint.config, checkpoint.model_hash)
    texts = _texts(path, arguments.text, arguments.tokens, arguments.texts)
    return measure(
        Model(checkpoint),
        arguments.format,
        compressed,
        texts,
        describe(arguments.model, checkpoint.model_hash, arguments.text, texts),
        window=arguments.window,
        bootstrap=Bootstrap(seed=arguments.seed),
        progress=lambda stage: log.print(stage, markup=False),
    )


def _texts(path: Path, name: str, tokens: int, count: int) -> Tensor:
    return cut_rows(text_tokenizer(path).encode(TEXTS[name]()).ids, tokens, count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime.quality", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--format",
        metavar="SPEC",
        help=f"{', '.join((EXACT, *COMPRESSED))}, name:PATH with a calibration "
        f"({', '.join(CALIBRATED)}), module:Class with a classmethod create(config), "
        "or module:function(config)",
    )
    parser.add_argument("--model", default="smollm2-135m", help="model name or path")
    parser.add_argument("--text", choices=list(TEXTS), default="documentation")
    parser.add_argument("--tokens", type=int, default=1536, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=4, help="maximum number of texts")
    parser.add_argument(
        "--no-window",
        dest="window",
        action="store_false",
        help="store the sinks and the recent tokens, too",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="compare with results in JSON files",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
