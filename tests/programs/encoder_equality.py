"""Embeddings and scores compared with sentence-transformers, on the CPU.

``python -m tests.programs.encoder_equality`` computes 1,000 texts of 1 to 512 tokens with
all-MiniLM-L6-v2, in fp32 and in bf16, and pairs of them with a cross encoder that has its weights
and a random head. `encoder_peer` computes the same in fp32 in an environment of its own, with the
versions of ``tests/clients/requirements/sentence-transformers.txt``. The cosine distance of
embeddings must be at most 1e-5 in fp32 and 1e-3 in bf16. Scores must differ by at most as much, or
by no more than those of sentence-transformers in the same dtype do from its own in fp32. In fp32,
results must be bitwise equal in batches of any composition.

``--speed`` measures lists of 32 texts instead, once for each length of ``--lengths``, where
``mixed`` are 32 lengths of 4 to 128 tokens. Each side has one thread, and texts/s are those of its
CPU time, on which other processes have less influence.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from runtime.checkpoint import checkpoint_path
from runtime.encoder import Encoder, EncoderInput, EncoderTask, load_encoder
from runtime.offline.compress.text import documentation
from tests.clients.environments import python_of

MODEL = "all-minilm-l6-v2"
LONGEST = 512
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-3}
_PEER_S = 3600.0
Text = str | tuple[str, str]


def texts_of(tokenizer: Tokenizer, lengths: Sequence[int], seed: int) -> list[str]:
    """Return parts of Python's documentation with about the given numbers of tokens.

    Lengths include the two special tokens. Truncation makes them exact where words have several
    tokens.
    """
    draw = random.Random(seed)
    words = documentation()[0].split()
    found = []
    for length in lengths:
        at = draw.randrange(len(words) - LONGEST)
        part = words[at : at + max(length - 2, 0)]
        while len(part) > 1 and len(tokenizer.encode(" ".join(part)).ids) > length:
            part = part[: len(part) * 9 // 10]
        found.append(" ".join(part))
    return found


def inputs_of(tokenizer: Tokenizer, texts: Sequence[Text]) -> list[EncoderInput]:
    """Tokenize texts, truncated to the longest input."""
    return [
        EncoderInput(tuple(encoding.ids), tuple(encoding.type_ids))
        for encoding in tokenizer.encode_batch(list(texts))
    ]


def peer_results(
    folder: Path, task: EncoderTask, texts: Sequence[Text], dtype: str, *, batch: int, repeats: int
) -> tuple[Tensor, float]:
    """Return the results of sentence-transformers, and the CPU seconds of the fastest pass."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "results.safetensors"
        given: dict[str, Any] = {"folder": str(folder), "task": task, "texts": texts}
        given |= {"dtype": dtype, "batch": batch, "repeats": repeats, "out": str(out)}
        given |= {"max_tokens": LONGEST, "device": "cpu", "call_texts": 0}
        command = [
            str(python_of("sentence-transformers")),
            str(Path(__file__).with_name("encoder_peer.py")),
        ]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        ended = subprocess.run(
            command,
            env=environment,
            input=json.dumps(given),
            stdout=subprocess.PIPE,
            text=True,
            timeout=_PEER_S,
            check=True,
        )
        return load_file(out)["results"], float(json.loads(ended.stdout)["cpu_seconds"])


def write_cross_encoder(folder: Path) -> None:
    """Write a cross encoder with the weights of MiniLM and a random head of one label."""
    source = checkpoint_path(MODEL)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.set_seed(0)
    model = transformers.BertForSequenceClassification.from_pretrained(
        source, num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        model.classifier.weight.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(source / name, folder)


def difference(task: EncoderTask, found: Tensor, expected: Tensor) -> float:
    """Return the largest cosine distance of embeddings, or difference of scores."""
    if task is EncoderTask.EMBED:
        return float((1 - torch.cosine_similarity(found.double(), expected.double())).max())
    return float((found.flatten() - expected.flatten()).abs().max())


def in_batches(encoder: Encoder, inputs: Sequence[EncoderInput], batch: int) -> Tensor:
    """Return the scores or embeddings of all inputs, computed in batches of their order."""
    parts = [encoder.encode(inputs[at : at + batch]) for at in range(0, len(inputs), batch)]
    return encoder.activation(torch.cat(parts))


def bits_equal(encoder: Encoder, inputs: Sequence[EncoderInput], seed: int) -> bool:
    """Return whether shuffled batches of random sizes, and batches of one, give the same bits."""
    draw = random.Random(seed)
    expected = torch.cat([encoder.encode([each]) for each in inputs])
    order = draw.sample(range(len(inputs)), len(inputs))
    at = 0
    while at < len(order):
        part = order[at : at + draw.randint(1, 64)]
        if not torch.equal(encoder.encode([inputs[index] for index in part]), expected[part]):
            return False
        at += len(part)
    return True


def compare(
    folder: Path, tokenizer: Tokenizer, texts: Sequence[Text], dtypes: Sequence[str], seed: int
) -> bool:
    """Compare one model and print the differences; return whether all are small."""
    inputs = inputs_of(tokenizer, texts)
    passed = True
    for dtype in dtypes:
        bound = BOUNDS[dtype]
        encoder = load_encoder(folder, dtype=getattr(torch, dtype), max_tokens=LONGEST)
        found = in_batches(encoder, inputs, 32)
        expected, _ = peer_results(folder, encoder.task, texts, "float32", batch=32, repeats=1)
        worst = difference(encoder.task, found, expected)
        if encoder.task is EncoderTask.CLASSIFY and dtype != "float32":
            rounded, _ = peer_results(folder, encoder.task, texts, dtype, batch=32, repeats=1)
            peer = difference(encoder.task, rounded, expected)
            _print(f"{encoder.task} {dtype}: sentence-transformers, largest difference {peer:.1e}")
            bound = max(bound, peer)
        passed &= worst <= bound
        _print(f"{encoder.task} {dtype}: {len(texts)} texts, largest difference {worst:.1e}")
        if dtype == "float32":
            equal = bits_equal(encoder, inputs, seed)
            passed &= equal
            _print(f"{encoder.task} {dtype}: bits in any batch {'equal' if equal else 'DIFFER'}")
    return passed


def speed(folder: Path, tokenizer: Tokenizer, lengths: Sequence[str], seed: int) -> None:
    """Print texts/s of lists of 32 texts on one thread, with tokenization, of both."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = load_encoder(folder, max_tokens=LONGEST)
    for length in lengths:
        draw = random.Random(seed)
        each = [draw.randint(4, 128) if length == "mixed" else int(length) for _ in range(32)]
        texts = texts_of(tokenizer, each, seed)
        seconds = []
        for _ in range(5):
            start = time.process_time()
            in_batches(encoder, inputs_of(tokenizer, texts), 32)
            seconds.append(time.process_time() - start)
        _, peer = peer_results(folder, encoder.task, texts, "float32", batch=32, repeats=5)
        own = min(seconds)
        _print(
            f"{length} tokens: {32 / own:.0f} texts/s, sentence-transformers {32 / peer:.0f}, "
            f"ratio {peer / own:.2f}"
        )


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.encoder_equality")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--tasks", default="embed,classify")
    parser.add_argument("--dtypes", default=",".join(BOUNDS), help="bf16 takes hours on some CPUs")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--speed", action="store_true", help="measure speed instead")
    parser.add_argument("--lengths", default="16,64,256,mixed", help="token counts of --speed")
    arguments = parser.parse_args()
    folder = checkpoint_path(MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    if arguments.speed:
        speed(folder, tokenizer, arguments.lengths.split(","), arguments.seed)
        return 0
    draw = random.Random(arguments.seed)
    lengths = [draw.randint(1, LONGEST) for _ in range(arguments.texts)]
    texts = texts_of(tokenizer, lengths, arguments.seed)
    dtypes, tasks = arguments.dtypes.split(","), arguments.tasks.split(",")
    passed = True
    if EncoderTask.EMBED in tasks:
        passed &= compare(folder, tokenizer, texts, dtypes, arguments.seed)
    if EncoderTask.CLASSIFY in tasks:
        halves = [text[: len(text) // 2] for text in texts]
        pairs = list(zip(halves, reversed(halves), strict=True))
        with tempfile.TemporaryDirectory() as scratch:
            write_cross_encoder(Path(scratch))
            passed &= compare(Path(scratch), tokenizer, pairs, dtypes, arguments.seed)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
