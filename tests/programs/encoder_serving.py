"""Texts/s of a deployment that computes embeddings, beside sentence-transformers and other servers.

``python -m tests.programs.encoder_serving`` sends lists of 32 texts to ``headrace up --encoder``,
from as many clients as ``--clients`` says, each of which sends its next list when it has the answer
to the one before, and counts the texts of the answers. sentence-transformers computes the same
lists without a server, one at a time, in a process of its own. On the CPU, the encoder worker and
sentence-transformers have one thread each.

The model is all-MiniLM-L6-v2, a folder, or ``bert-base``: random weights in the shape of BERT-base
with MiniLM's tokenizer. ``--write FOLDER`` only writes that model. ``--url`` measures a server that
already runs, such as another one that has OpenAI's API.
"""

import argparse
import base64
import http.client
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import transformers
from tokenizers import Tokenizer

from runtime.checkpoint import checkpoint_path
from tests.clients.environments import python_of
from tests.harness.deployment import deployed
from tests.programs.encoder_equality import MODEL, texts_of

TEXTS = 32
"""Number of texts in each list."""
_PROCESSES = 4
"""Maximum number of processes of clients."""
_TIMEOUT_S = 120.0


def write_bert_base(folder: Path) -> None:
    """Write a sentence encoder with random weights, mean pooling and MiniLM's tokenizer."""
    source = checkpoint_path(MODEL)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    transformers.logging.disable_progress_bar()
    transformers.set_seed(0)
    config = transformers.BertConfig()
    transformers.BertModel(config).save_pretrained(folder)
    pooling = folder / "1_Pooling" / "config.json"
    values = json.loads(pooling.read_text()) | {"word_embedding_dimension": config.hidden_size}
    pooling.write_text(json.dumps(values))


def lists_of(folder: Path, length: str, seed: int, lists: int) -> list[list[str]]:
    """Return lists of texts of a given number of tokens, or of 4 to 128 if it is ``mixed``."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    draw = random.Random(seed)
    lengths = [
        draw.randint(4, 128) if length == "mixed" else int(length) for _ in range(lists * TEXTS)
    ]
    texts = texts_of(tokenizer, lengths, seed)
    return [texts[at : at + TEXTS] for at in range(0, len(texts), TEXTS)]


def _send(url: str, bodies: Sequence[bytes], first: int, until: float, done: list[float]) -> None:
    """Send one body after the other, and add the times at which answers arrived to ``done``."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    at = first
    while time.monotonic() < until:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/embeddings", bodies[at % len(bodies)], headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"status {answer.status}: {content[:300]!r}")
        if at == first:
            rows = json.loads(content)["data"]
            sizes = {len(base64.b64decode(row["embedding"])) for row in rows}
            if len(rows) != TEXTS or len(sizes) != 1:
                raise RuntimeError(f"{len(rows)} embeddings of {sizes} bytes")
        done.append(time.monotonic())
        at += 1
    connection.close()


def _clients(
    url: str, bodies: Sequence[bytes], threads: int, until: float, out: Connection
) -> None:
    done: list[float] = []
    draw = random.Random(os.getpid())
    running = [
        threading.Thread(target=_send, args=(url, bodies, draw.randrange(len(bodies)), until, done))
        for _ in range(threads)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    out.send(done)


def texts_per_s(
    url: str, model: str, lists: list[list[str]], clients: int, seconds: float
) -> float:
    """Return the texts/s that clients get from a server, after a first quarter of the time."""
    bodies = [
        json.dumps({"model": model, "input": each, "encoding_format": "base64"}).encode()
        for each in lists
    ]
    context = multiprocessing.get_context("fork")
    start = time.monotonic()
    until = start + seconds * 4 / 3
    count = min(clients, _PROCESSES)
    ends = []
    for index in range(count):
        here, there = context.Pipe(duplex=False)
        threads = clients // count + (index < clients % count)
        context.Process(
            target=_clients, args=(url, bodies, threads, until, there), daemon=True
        ).start()
        there.close()
        ends.append(here)
    times: list[float] = [at for end in ends for at in end.recv()]
    begin = start + seconds / 3
    return sum(begin <= at < until for at in times) * TEXTS / seconds


def peer_texts_per_s(
    python: Path, folder: Path, lists: list[list[str]], device: str, dtype: str
) -> float:
    """Return the texts/s of sentence-transformers for the same lists."""
    with tempfile.TemporaryDirectory() as scratch:
        given = {
            "folder": str(folder),
            "task": "embed",
            "texts": [text for each in lists for text in each],
            "dtype": dtype,
            "device": device,
            "batch": TEXTS,
            "call_texts": TEXTS,
            "repeats": 3,
            "out": str(Path(scratch) / "results.safetensors"),
            "max_tokens": 512,
        }
        ended = subprocess.run(
            [str(python), str(Path(__file__).with_name("encoder_peer.py"))],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            input=json.dumps(given),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return len(lists) * TEXTS / float(json.loads(ended.stdout)["seconds"])


@contextmanager
def _server(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """Give the URL and the model's name of the server that is measured."""
    if arguments.url:
        yield arguments.url, arguments.served or str(folder)
        return
    flags = ["--model", "none", "--encoder", str(folder), "--device", arguments.device]
    with deployed(*flags, "--gateways", str(arguments.gateways)) as running:
        yield running.url, running.model


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _measure(arguments: argparse.Namespace, folder: Path) -> None:
    lists = {
        length: lists_of(folder, length, arguments.seed, arguments.lists)
        for length in arguments.lengths.split(",")
    }
    peers = dict.fromkeys(lists, 0.0)
    if not arguments.url and not arguments.no_peer:
        python = arguments.peer_python or python_of("sentence-transformers")
        dtype = "bfloat16" if arguments.device == "cuda" else "float32"
        for length, each in lists.items():
            peers[length] = peer_texts_per_s(python, folder, each, arguments.device, dtype)
            _print(f"{length} tokens: sentence-transformers {peers[length]:.0f} texts/s")
    with _server(arguments, folder) as (url, model):
        for length, each in lists.items():
            for clients in map(int, arguments.clients.split(",")):
                own = texts_per_s(url, model, each, clients, arguments.seconds)
                ratio = f", ratio {own / peers[length]:.2f}" if peers[length] else ""
                _print(f"{length} tokens, {clients} clients: {own:.0f} texts/s{ratio}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.encoder_serving")
    parser.add_argument("--model", default=MODEL, help="name, folder or bert-base")
    parser.add_argument("--write", type=Path, help="only write bert-base to this folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", default="16,64,mixed", help="tokens of texts")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--lists", type=int, default=8, help="number of different lists")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--url", help="server that already runs")
    parser.add_argument("--served", help="name of its model; default: the folder")
    parser.add_argument("--no-peer", action="store_true", help="without sentence-transformers")
    parser.add_argument("--peer-python", type=Path, help="interpreter with sentence-transformers")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.write:
        write_bert_base(arguments.write)
    elif arguments.model == "bert-base":
        with tempfile.TemporaryDirectory() as scratch:
            write_bert_base(Path(scratch))
            _measure(arguments, Path(scratch))
    else:
        folder = Path(arguments.model)
        _measure(arguments, folder if folder.is_dir() else checkpoint_path(arguments.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
