"""Host memory of a rank that loads its part of a model of several hundred MB."""

import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from transformers import LlamaConfig

from runtime.checkpoint import Checkpoint, FactorPair, load_checkpoint, write_checkpoint
from runtime.checkpoint.assemble import named_tensors, nbytes
from runtime.checkpoint.hashed_files import HashedFiles
from runtime.checkpoint.huggingface_config import to_huggingface
from runtime.checkpoint.safetensors_file import ShardWriter
from runtime.checkpoint.weights import moved
from runtime.parallel.partition import Partition
from tests.runtime.checkpoint.gguf_samples import write_gguf
from tests.runtime.tiny import CONFIG as TINY
from tests.runtime.tiny import tiny_checkpoint

RANK, RANKS = 1, 2
LIMIT_S = 240
BUFFER_BYTES = 8 << 20
"""Memory for small tensors and for the conversion of a few rows."""
CONFIG = replace(
    TINY,
    vocab_size=24_000,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
)
LAYER_BYTES = 4 * (2 * 1024**2 + 2 * 256 * 1024 + 3 * 4096 * 1024)
"""One dense layer in fp32."""


@dataclass(frozen=True)
class Found:
    """Memory that the process of a rank measured.

    Attributes:
        peak: most anonymous memory while it loaded the model, above that before.
        part: bytes of the rank's part of the model in fp32.
    """

    peak: int
    part: int
    model_hash: str


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process. Pages of files are not part of it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10


@contextmanager
def watched(samples: list[int]) -> Iterator[None]:
    """Append the anonymous memory to ``samples`` every two milliseconds."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            samples.append(anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    stop.set()
    thread.join()
    samples.append(anonymous_bytes())


def load_second_rank(path: Path, known: HashedFiles, answer: Connection) -> None:
    """Load the part of a rank, and copy it to new memory as fp32, one layer after another."""
    device = torch.device("cpu")
    samples = [anonymous_bytes()]
    with watched(samples):
        checkpoint = load_checkpoint(
            path, dtype=None, part=lambda config: Partition.of(config, RANK, RANKS), known=known
        )
        ends = checkpoint.embedding, checkpoint.lm_head, checkpoint.final_norm
        held = [moved(ends, device, torch.float32, {})]
        for layer in checkpoint.layers:
            held.append(moved(layer, device, torch.float32, {}))
            del layer
    part = nbytes(checkpoint, torch.float32)
    answer.send(Found(max(samples) - samples[0], part, checkpoint.model_hash))


def in_new_process(path: Path, known: HashedFiles) -> Found:
    context = multiprocessing.get_context("spawn")
    answer, theirs = context.Pipe()
    process = context.Process(target=load_second_rank, args=(path, known, theirs))
    process.start()
    theirs.close()
    try:
        assert answer.poll(LIMIT_S), "the rank does not answer"
        found: Found = answer.recv()
    finally:
        process.kill()
        process.join()
    return found


def huggingface(checkpoint: Checkpoint, path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_huggingface(checkpoint.config)))
    with ShardWriter(path, shard_bytes=64 << 20) as writer:
        for name, tensor in named_tensors(checkpoint):
            writer.add(name, tensor.bfloat16())


def factorized(checkpoint: Checkpoint, path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(4096, 512, generator=generator)
    v = torch.randn(512, 1024, generator=generator)
    layers = tuple(replace(layer, up=FactorPair(u, v)) for layer in checkpoint.layers)
    write_checkpoint(replace(checkpoint, layers=layers), path)


def gguf_file(checkpoint: Checkpoint, path: Path) -> None:
    config = LlamaConfig(**to_huggingface(checkpoint.config))
    model = SimpleNamespace(config=config, state_dict=lambda: dict(named_tensors(checkpoint)))
    write_gguf(model, path, quantize=gguf.GGMLQuantizationType.F16)


@pytest.mark.long
@pytest.mark.parametrize("write", [huggingface, factorized, gguf_file])
def test_rank_holds_its_part_and_at_most_one_layer(
    write: Callable[[Checkpoint, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for the larger matrices of real models, glibc returns freed memory to the system at once.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    path = tmp_path / "model"
    write(tiny_checkpoint(config=CONFIG), path)
    known = load_checkpoint(path, dtype=None).hashed
    found = in_new_process(path, known)
    assert found.model_hash == known.model_hash
    assert found.part > 200e6
    assert found.peak < found.part + LAYER_BYTES + BUFFER_BYTES
