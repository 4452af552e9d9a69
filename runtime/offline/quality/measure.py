"""Measurement of compressed formats against the same model with exact bf16 KV, the baseline."""

import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.config import ModelConfig
from runtime.core.plan import Chunk
from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.errors import QualityError
from runtime.kv.compressed import CompressedFormat
from runtime.kv.eviction import check_eviction
from runtime.kv.format import KVFormat
from runtime.models.model import Model
from runtime.offline.quality.attention import TeacherForced, stored_pages
from runtime.offline.quality.fidelity import Fidelity
from runtime.offline.quality.formats import EXACT
from runtime.offline.quality.metrics import Bootstrap, Scores, Summary, compare, summarize
from runtime.offline.quality.needles import NeedleScore
from runtime.pages.eviction import evicted_tokens, vacated_pages
from runtime.pages.plan import PageCount, pages_for
from runtime.steps.eviction import PromptEviction

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
        first_scored: first position of each text that is scored.
        text_hash: sha256 of the token ids, 16 hex digits.
    """

    model: str
    model_hash: str
    text: str
    texts: int
    tokens: int
    text_hash: str
    first_scored: int = 0


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
        dense_bytes_per_token: bytes of a token's bf16 K and V in all layers.
        stored_positions: number of scored positions that attend to at least one stored page.
        dense_perplexity: perplexity of the baseline.
        quality: the format against the baseline.
        noise: exact bf16 KV with another attention kernel against the baseline. The kernels differ
            in the order of summation only.
        outputs, outputs_noise: ``quality`` and ``noise`` of greedy outputs; None if none were
            generated.
        needles: retrieval, for each task and length.
        seconds: elapsed seconds of the teacher-forced passes, without loading the model.
        eviction: fraction of the tokens of the first half of each text that was evicted before the
            second half was computed; 0 for none.
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
    eviction: float = 0.0


@torch.inference_mode()
def measure(
    model: Model,
    formats: Mapping[str, CompressedFormat | None],
    texts: Tensor,
    inputs: Inputs,
    *,
    window: bool = True,
    eviction: float = 0.0,
    bootstrap: Bootstrap | None = None,
    progress: Progress = lambda _: None,
) -> list[Result]:
    """Measure formats by teacher-forced passes. The passes of the baseline are shared.

    Args:
        model: model on the CPU with KV format `dense`, whose kernel computes `Result.noise`.
        formats: the formats by spec; None is exact KV.
        texts: int64 `[texts, tokens]`.
        inputs: description of the model and the texts, see `describe`.
        eviction: if not 0, the first half of each text is a prompt of which this fraction of the
            tokens is evicted, and only the second half is scored.
        progress: called before each text.

    Raises:
        QualityError: a text does not fit into the model's context, or logits are not finite.
        KVFormatError: a format decodes malformed values, or does not support eviction.
    """
    started, size = time.monotonic(), model.page_size
    bootstrap = bootstrap or Bootstrap()
    _check(model, formats, texts.shape[1], eviction)
    inputs = replace(inputs, first_scored=inputs.tokens // 2 if eviction else 0)
    exact = TeacherForced(model.config, None, window=window)
    tested: dict[str, KVFormat] = {
        spec: TeacherForced(model.config, compressed, window=window)
        for spec, compressed in formats.items()
    }
    scores, noise = _scores(model, exact, tested, texts, eviction, progress)
    stored = _stored_positions(inputs, eviction, size, window=window)
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
            eviction=eviction,
        )
        for spec, compressed in formats.items()
    ]


def _check(
    model: Model, formats: Mapping[str, CompressedFormat | None], tokens: int, eviction: float
) -> None:
    """Raise an error of `measure` for texts of ``tokens`` tokens, or for the formats."""
    if not 2 <= tokens <= model.context_length:
        raise QualityError(f"texts of {tokens} tokens: expected 2 to {model.context_length}")
    for compressed in formats.values():
        if eviction and compressed is not None:
            check_eviction(compressed)


def _stored_positions(inputs: Inputs, eviction: float, page_size: int, *, window: bool) -> int:
    """Return the number of scored positions of a text that attend to stored pages."""
    evicted = evicted_tokens(inputs.first_scored, eviction, page_size)
    lengths = range(inputs.first_scored + 1 - evicted, inputs.tokens - evicted)
    return sum(bool(stored_pages(length, page_size, window=window)) for length in lengths)


def _scores(
    model: Model,
    exact: KVFormat,
    tested: Mapping[str, KVFormat],
    texts: Tensor,
    eviction: float,
    progress: Progress,
) -> tuple[dict[str, list[Scores]], list[Scores]]:
    """Return the scores of each text, for each format and for the model's own attention kernel."""
    scores: dict[str, list[Scores]] = {spec: [] for spec in tested}
    noise: list[Scores] = []
    first = texts.shape[1] // 2 if eviction else 0
    for number, text in enumerate(texts):
        progress(f"text {number + 1} of {len(texts)}")
        baseline, scored = logits_of(model, text, exact)[first:], text[first:]
        noise.append(compare(baseline, logits_of(model, text, model.kv_format)[first:], scored))
        for spec, kv_format in tested.items():
            if eviction:
                found = logits_after_eviction(model, text, exact, kv_format, eviction)
            else:
                found = logits_of(model, text, kv_format)
            scores[spec].append(compare(baseline, found, scored))
    return scores, noise


def logits_of(model: Model, text: Tensor, kv_format: KVFormat) -> Tensor:
    """Return the logits after every token of a text, fp32 `[n, vocab]` on the model's device.

    They are computed in one forward pass.

    Args:
        text: int64 `[n]`.
        kv_format: format with the planes of `dense`, which replaces the model's for this pass.
    """
    pages = pages_for(len(text), model.page_size)
    piece = SequenceSlice(text.tolist(), 0, list(range(pages)))
    with _replaced(model, kv_format):
        cache = model.new_cache(PageCount(pages))
        return model.forward(_with_all_logits(piece, model.device), cache)


def logits_after_eviction(
    model: Model, text: Tensor, exact: KVFormat, kv_format: KVFormat, eviction: float
) -> Tensor:
    """Return the logits after every token of the second half of a text, fp32 `[n, vocab]`.

    The first half is computed as a prompt, from which tokens are evicted.

    Args:
        text: int64 `[t]`.
        exact, kv_format: formats of the first and of the second half, with the planes of `dense`.
        eviction: fraction of the tokens of the first half to evict.
    """
    tokens = text.tolist()
    prompt = len(text) // 2
    size = model.page_size
    pages = pages_for(len(text), size)
    used = pages_for(prompt, size)
    sequence = SequenceState(
        Request("text", tuple(tokens), prompt, SamplingParams(), len(text) - prompt),
        *(0, 0, tokens[:prompt], len(text)),
        page_tables=[list(range(used))],
        evicts=evicted_tokens(prompt, eviction, size),
    )
    vacated = vacated_pages(prompt, sequence.evicts, size)
    chunk = Chunk(SequenceGroup(Purpose.HOLD, [sequence]), 0, prompt, vacated)
    batch = Batch.of([SequenceSlice(sequence.tokens, 0, sequence.page_tables[0])], model.device)
    cache = model.new_cache(PageCount(pages))
    evictions = PromptEviction(model, cache)
    log = evictions.log([chunk])
    with _replaced(model, exact):
        model.forward(replace(batch, queries=log), cache)
    evictions.evict([chunk], log)
    [kept] = chunk.completed
    held = [*kept.page_tables[0], *range(used, pages)]
    piece = SequenceSlice(tokens[prompt:], prompt, held, evicted=kept.evicted)
    with _replaced(model, kv_format):
        return model.forward(_with_all_logits(piece, model.device), cache)


def _with_all_logits(piece: SequenceSlice, device: torch.device) -> Batch:
    batch = Batch.of([piece], device)
    return replace(batch, logit_rows=torch.arange(len(piece.tokens), device=device))


@contextmanager
def _replaced(model: Model, kv_format: KVFormat) -> Iterator[None]:
    """Replace the KV format of a model."""
    own, model.kv_format = model.kv_format, kv_format
    try:
        yield
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
