"""Measurement of compressed formats against the same model with exact bf16 KV."""

import hashlib
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.config import ModelConfig
from runtime.errors import QualityError
from runtime.kv.compressed import CompressedFormat
from runtime.kv.format import KVFormat
from runtime.kv.pages import pages_for
from runtime.models.model import Model
from runtime.quality.attention import TeacherForced, stored_pages
from runtime.quality.fidelity import Fidelity
from runtime.quality.formats import EXACT
from runtime.quality.metrics import Bootstrap, Scores, Summary, compare, summarize
from runtime.quality.needles import NeedleScore

Progress = Callable[[str], None]
"""Callback with the name of the text that is computed next."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a measurement; results are comparable only if these are equal.

    Attributes:
        model: name or path of the model, as given.
        model_hash: hash of its weights.
        text: name of the text.
        texts, tokens: number of texts, and tokens of each.
        text_hash: sha256 of the token ids, 16 hex digits.
    """

    model: str
    model_hash: str
    text: str
    texts: int
    tokens: int
    text_hash: str


@dataclass(frozen=True)
class Environment:
    """Versions that may change the last digits of a result."""

    torch: str
    python: str
    instructions: str
    threads: int

    @staticmethod
    def current() -> "Environment":
        return Environment(
            torch=torch.__version__,
            python=platform.python_version(),
            instructions=torch.backends.cpu.get_cpu_capability(),
            threads=torch.get_num_threads(),
        )


@dataclass(frozen=True)
class Result:
    """Quality and size of one format.

    Attributes:
        spec: name by which the format was created.
        name, version, artifact_hash: see `CompressedFormat`.
        window: whether the sinks and the window stayed exact.
        bytes_per_token: bytes of a stored token in all layers, scales included.
        dense_bytes_per_token: the same of bf16 K and V.
        stored_positions: number of scored positions that attend at least one stored page.
        dense_perplexity: perplexity of the baseline.
        quality: the format against the baseline.
        noise: exact bf16 KV with another attention kernel against the baseline. It differs in the
            order of summation only.
        outputs, outputs_noise: the same for greedy outputs; None if none were generated.
        needles: retrieval, for each task and length.
        seconds: elapsed seconds of the teacher-forced passes, without loading the model.
    """

    spec: str
    name: str
    version: int
    artifact_hash: str
    window: bool
    page_size: int
    bytes_per_token: float
    dense_bytes_per_token: float
    stored_positions: int
    inputs: Inputs
    bootstrap: Bootstrap
    environment: Environment
    dense_perplexity: float
    quality: Summary
    noise: Summary
    seconds: float
    outputs: Fidelity | None = None
    outputs_noise: Fidelity | None = None
    needles: tuple[NeedleScore, ...] = ()


@torch.inference_mode()
def measure(
    model: Model,
    formats: Mapping[str, CompressedFormat | None],
    texts: Tensor,
    inputs: Inputs,
    *,
    window: bool = True,
    bootstrap: Bootstrap | None = None,
    progress: Progress = lambda _: None,
) -> list[Result]:
    """Measure formats by teacher-forced passes. The passes of the baseline are shared.

    Args:
        model: model on the CPU with KV format `dense`, which is the second kernel of the noise
            floor.
        formats: the formats by spec; None is exact KV.
        texts: int64 `[texts, tokens]`.
        inputs: description of the model and the texts, see `describe`.
        progress: called before each text.

    Raises:
        QualityError: a text does not fit into the model's context, or logits are not finite.
        KVFormatError: the format decodes tensors of a wrong shape, or values that are not finite.
    """
    started = time.monotonic()
    bootstrap = bootstrap or Bootstrap()
    tokens = texts.shape[1]
    if not 2 <= tokens <= model.context_length:
        raise QualityError(f"texts of {tokens} tokens: expected 2 to {model.context_length}")
    exact = TeacherForced(model.config, None, window=window)
    tested: dict[str, KVFormat] = {
        spec: TeacherForced(model.config, compressed, window=window)
        for spec, compressed in formats.items()
    }
    scores, noise = _scores(model, exact, tested, texts, progress)
    size = model.page_size
    stored = sum(bool(stored_pages(n, size, window=window)) for n in range(1, tokens))
    floor, seconds = summarize(noise, bootstrap), time.monotonic() - started
    return [
        Result(
            spec=spec,
            name=compressed.name if compressed else EXACT,
            version=compressed.version if compressed else 0,
            artifact_hash=compressed.artifact_hash if compressed else "",
            window=window,
            page_size=size,
            bytes_per_token=bytes_per_token(compressed or exact, model.config, size),
            dense_bytes_per_token=bytes_per_token(exact, model.config, size),
            stored_positions=0 if compressed is None else stored * len(texts),
            inputs=inputs,
            bootstrap=bootstrap,
            environment=Environment.current(),
            dense_perplexity=perplexity(noise),
            quality=summarize(scores[spec], bootstrap),
            noise=floor,
            seconds=seconds,
        )
        for spec, compressed in formats.items()
    ]


def _scores(
    model: Model,
    exact: KVFormat,
    tested: Mapping[str, KVFormat],
    texts: Tensor,
    progress: Progress,
) -> tuple[dict[str, list[Scores]], list[Scores]]:
    """Return the scores of each text, for each format and for the model's own attention kernel."""
    scores: dict[str, list[Scores]] = {spec: [] for spec in tested}
    noise: list[Scores] = []
    for number, text in enumerate(texts):
        progress(f"text {number + 1} of {len(texts)}")
        baseline = logits_of(model, text, exact)
        noise.append(compare(baseline, logits_of(model, text, model.kv_format), text))
        for spec, kv_format in tested.items():
            scores[spec].append(compare(baseline, logits_of(model, text, kv_format), text))
    return scores, noise


def logits_of(model: Model, text: Tensor, kv_format: KVFormat) -> Tensor:
    """Return the logits after every token of a text, fp32 `[n, vocab]` on the model's device.

    They are computed in one forward pass.

    Args:
        text: int64 `[n]`.
        kv_format: format with the planes of `dense`, which replaces the model's for this pass.
    """
    pages = pages_for(len(text), model.page_size)
    device = model.device
    batch = Batch.of([SequenceSlice(text.tolist(), 0, list(range(pages)))], device)
    batch = replace(batch, logit_rows=torch.arange(len(text), device=device))
    own, model.kv_format = model.kv_format, kv_format
    try:
        return model.forward(batch, model.new_cache(pages))
    finally:
        model.kv_format = own


def bytes_per_token(
    kv_format: CompressedFormat | KVFormat, config: ModelConfig, page_size: int
) -> float:
    """Return the bytes of one token in the planes of all layers."""
    planes = [
        plane for layer in range(config.num_layers) for plane in kv_format.planes(layer, page_size)
    ]
    return sum(math.prod(plane.shape) * plane.dtype.itemsize for plane in planes) / page_size


def perplexity(texts: Sequence[Scores]) -> float:
    """Return the baseline's perplexity."""
    return math.exp(torch.cat([text.baseline_nll for text in texts]).mean())


def describe(model: str, model_hash: str, text: str, tokens: Tensor) -> Inputs:
    """Return the description of texts ``tokens``, int64 `[texts, tokens]`."""
    digest = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()[:16]
    return Inputs(model, model_hash, text, tokens.shape[0], tokens.shape[1], digest)
