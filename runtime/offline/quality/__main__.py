"""Measure the quality of compressed KV formats and of factorized checkpoints.

python -m runtime.offline.quality --format SPEC ... [--model NAME] [--out FOLDER]
python -m runtime.offline.quality --checkpoint PATH ... [--model NAME] [--out FOLDER]
python -m runtime.offline.quality --against FILE FILE ... [--out FOLDER]
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from runtime.checkpoint import checkpoint_path, load_checkpoint
from runtime.errors import QualityError, RuntimeFault
from runtime.kv.compressed import CompressedFormat
from runtime.kv.registry import CALIBRATED, COMPRESSED
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.offline.compress.text import cut_rows, docstrings, documentation
from runtime.offline.compress.tokenizer import text_tokenizer
from runtime.offline.quality.checkpoint_report import checkpoint_tables
from runtime.offline.quality.checkpoints import measure_checkpoints
from runtime.offline.quality.fidelity import Fidelity, compare_outputs
from runtime.offline.quality.formats import EXACT, format_factory
from runtime.offline.quality.generate import Generator
from runtime.offline.quality.measure import Inputs, Progress, Result, describe, measure
from runtime.offline.quality.metrics import Bootstrap
from runtime.offline.quality.needles import TASKS, NeedleScore, measure_needles, samples_of
from runtime.offline.quality.prompts import ChatEncoder, chats, continuations, hash_of
from runtime.offline.quality.report import load, markdown, save, tables

TEXTS = {"documentation": lambda: documentation()[1], "docstrings": docstrings}
"""Text held out from calibration, and text of another kind than the calibration text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, 2 for errors in its arguments."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    given = [arguments.format, arguments.checkpoint, arguments.against]
    if not any(given):
        parser.error("one of --format, --checkpoint and --against is required")
    if arguments.checkpoint and (arguments.format or arguments.against):
        parser.error("--checkpoint cannot be combined with --format or --against")
    console, log = Console(highlight=False), Console(highlight=False, stderr=True)
    try:
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
        if arguments.checkpoint:
            _checkpoints(arguments, console, log)
        else:
            _formats(arguments, console, log)
    except (RuntimeFault, OSError) as error:
        log.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def _formats(arguments: argparse.Namespace, console: Console, log: Console) -> None:
    if arguments.out is not None:
        from runtime.offline.quality.plot import draw  # matplotlib is an optional dependency
    results = [load(path) for path in arguments.against]
    if arguments.format:
        results += _measure(arguments, log)
    shown = tables(results)
    for table in shown:
        console.print(table)
    if arguments.out is not None:
        for result in results[len(arguments.against) :]:
            save(result, arguments.out / f"{_file_name(result.spec)}.json")
        text = "\n\n".join(markdown(table) for table in shown)
        (arguments.out / "quality.md").write_text(text + "\n", encoding="utf-8")
        draw(results, arguments.out / "quality.svg")


def _checkpoints(arguments: argparse.Namespace, console: Console, log: Console) -> None:
    names = [arguments.model, *arguments.checkpoint]
    if len(set(names)) < len(names):
        raise QualityError("the dense model and the checkpoints must be different")
    paths = {name: checkpoint_path(name) for name in names}
    encoder, texts, inputs = _inputs(arguments, paths[arguments.model], "")
    results = measure_checkpoints(
        {name: partial(load_checkpoint, path) for name, path in paths.items()},
        encoder,
        texts,
        inputs,
        _prompts(arguments, encoder),
        arguments.output_tokens,
        bootstrap=Bootstrap(seed=arguments.seed),
        progress=lambda stage: log.print(stage, markup=False),
    )
    shown = checkpoint_tables(results)
    for table in shown:
        console.print(table)
    if arguments.out is not None:
        content = json.dumps([asdict(result) for result in results], indent=1)
        (arguments.out / "checkpoints.json").write_text(content + "\n", encoding="utf-8")
        text = "\n\n".join(markdown(table) for table in shown)
        (arguments.out / "checkpoints.md").write_text(text + "\n", encoding="utf-8")


def _measure(arguments: argparse.Namespace, log: Console) -> list[Result]:
    """Measure all formats of ``--format``: teacher-forced, greedy outputs, retrieval."""
    factories = {spec: format_factory(spec) for spec in arguments.format}

    def progress(stage: str) -> None:
        log.print(stage, markup=False)

    path = checkpoint_path(arguments.model)
    checkpoint = load_checkpoint(path, dtype=torch.float32)
    formats = {
        spec: create(checkpoint.config, checkpoint.model_hash) for spec, create in factories.items()
    }
    encoder, texts, inputs = _inputs(arguments, path, checkpoint.model_hash)
    model = build_model(checkpoint)
    results = measure(
        model,
        formats,
        texts,
        inputs,
        window=arguments.window,
        eviction=arguments.eviction,
        bootstrap=Bootstrap(seed=arguments.seed),
        progress=progress,
    )
    lossy = {spec: compressed for spec, compressed in formats.items() if compressed is not None}
    if lossy and arguments.window and not arguments.eviction:
        outputs = _outputs(arguments, model, encoder, lossy, progress)
        needles = _needles(arguments, model, encoder, lossy, progress)
        return [_with_parts(result, outputs, needles) for result in results]
    return results


def _outputs(
    arguments: argparse.Namespace,
    model: Model,
    encoder: ChatEncoder,
    formats: Mapping[str, CompressedFormat],
    progress: Progress,
) -> dict[str, Fidelity]:
    """Return the fidelity of greedy outputs by spec; the noise floor has the key `EXACT`."""
    prompts = _prompts(arguments, encoder)
    if not prompts:
        return {}
    progress(f"{len(prompts)} prompts and their outputs with exact KV")
    generator = Generator(model, prompts, arguments.output_tokens)
    compared = partial(
        compare_outputs,
        generator.exact(),
        decode=encoder.decode,
        prompts_hash=hash_of(prompts),
        max_tokens=arguments.output_tokens,
    )
    found = {EXACT: compared(generator.served())}
    for spec, compressed in formats.items():
        progress(f"greedy outputs with {spec}")
        found[spec] = compared(generator.compressed(compressed))
    return found


def _needles(
    arguments: argparse.Namespace,
    model: Model,
    encoder: ChatEncoder,
    formats: Mapping[str, CompressedFormat],
    progress: Progress,
) -> dict[str, list[NeedleScore]]:
    """Return the scores of all tasks and lengths by spec."""
    found: dict[str, list[NeedleScore]] = {spec: [] for spec in formats}
    limit = model.context_length
    lengths = [length for length in arguments.lengths if length <= limit]
    for length in arguments.lengths:
        if length > limit:
            progress(f"retrieval from {length} tokens: skipped, the model's context is {limit}")
    for task in TASKS:
        for length in lengths:
            progress(f"{task}, {length} tokens")
            scores = measure_needles(
                *(model, encoder, formats, task, length),
                samples=samples_of(task, length, arguments.samples),
                seed=arguments.seed,
            )
            for spec, score in scores.items():
                found[spec].append(score)
    return found


def _with_parts(
    result: Result, outputs: Mapping[str, Fidelity], needles: Mapping[str, list[NeedleScore]]
) -> Result:
    if result.spec not in needles:
        return result
    return replace(
        result,
        outputs=outputs.get(result.spec),
        outputs_noise=outputs.get(EXACT),
        needles=tuple(needles[result.spec]),
    )


def _inputs(
    arguments: argparse.Namespace, path: Path, model_hash: str
) -> tuple[ChatEncoder, Tensor, Inputs]:
    """Return the encoder of a model, the texts, and their description."""
    encoder = ChatEncoder(text_tokenizer(path))
    ids = encoder.encode(TEXTS[arguments.text]())
    texts = cut_rows(ids, arguments.tokens, arguments.texts)
    return encoder, texts, describe(arguments.model, model_hash, arguments.text, texts)


def _prompts(arguments: argparse.Namespace, encoder: ChatEncoder) -> list[list[int]]:
    """Return prompts: passages of documentation to continue, and as many chats about docstrings."""
    count, tokens = arguments.prompts, arguments.prompt_tokens
    return [
        *continuations(encoder, documentation()[1], count - count // 2, tokens),
        *chats(encoder, docstrings(), count // 2, tokens),
    ]


def _file_name(spec: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in spec)


def _share(value: str) -> float:
    """Return a share of at least 0 and below 1; argparse reports other values."""
    share = float(value)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 0 and below 1")
    return share


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.quality", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--format",
        nargs="+",
        default=[],
        metavar="SPEC",
        help=f"{', '.join((EXACT, *COMPRESSED))}, name:PATH with a calibration "
        f"({', '.join(CALIBRATED)}), module:Class with a classmethod create(config), "
        "or module:function(config)",
    )
    add(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="PATH",
        help="compare factorized checkpoints with the dense --model",
    )
    add("--model", default="smollm2-135m", help="model name or path")
    add("--text", choices=list(TEXTS), default="documentation")
    add("--tokens", type=int, default=1536, help="tokens of a text")
    add("--texts", type=int, default=4, help="maximum number of texts")
    add(
        "--no-window",
        dest="window",
        action="store_false",
        help="store the sinks and the recent tokens, too; only for teacher-forced figures",
    )
    add(
        "--eviction",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="evict this share of the first half of each text, and score the second half; only for "
        "teacher-forced figures",
    )
    add("--prompts", type=int, default=20, help="prompts for greedy outputs; 0 for none")
    add("--prompt-tokens", type=int, default=512, help="tokens of a prompt")
    add("--output-tokens", type=int, default=96, help="maximum tokens of a greedy output")
    add(
        "--lengths",
        type=int,
        nargs="*",
        default=[1024, 2048, 4096, 8192],
        help="tokens of the contexts for retrieval; no number for none",
    )
    add("--samples", type=int, default=4, help="maximum questions for each task, length and depth")
    add("--seed", type=int, default=0, help="seed of the bootstrap and of the retrieval tasks")
    add("--out", type=Path, metavar="FOLDER", help="write JSON, Markdown and a plot here")
    add(
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
