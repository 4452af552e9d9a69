"""Comparison of factorized checkpoints with the dense model, and of runtimes for each of them.

There are two comparisons. The effect of factorization: the factorized and the dense model are
computed by the same kernels. The effect of a runtime and its precision: the output of a checkpoint
is compared with the output of the same checkpoint in fp32.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.assemble import nbytes
from runtime.errors import QualityError
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.offline.quality.attention import TeacherForced
from runtime.offline.quality.fidelity import Fidelity, compare_outputs
from runtime.offline.quality.generate import Float32KV, outputs_of
from runtime.offline.quality.measure import Environment, Inputs, Progress, logits_of
from runtime.offline.quality.metrics import Bootstrap, Summary, compare, summarize
from runtime.offline.quality.prompts import ChatEncoder, hash_of

FP32, SERVED, BF16, PEER = "fp32", "fp32, KV in bf16", "bf16", "transformers, bf16"
"""Runtimes: ours in fp32 (the reference); ours in fp32 with KV in bf16, as it serves on a CPU; ours
in bf16; and transformers in bf16 with its default cache."""
PAIR = f"{BF16} against {PEER}"

Outputs = list[list[int]]
Load = Callable[[torch.dtype], Checkpoint]
"""Function that reads a checkpoint in a dtype."""


@dataclass(frozen=True)
class CheckpointResult:
    """Quality of one checkpoint.

    Attributes:
        name: path or name of the checkpoint.
        method: method of the factorization, "dense" without one.
        keep: fraction of the linears' parameters that remains.
        nbytes: bytes of the checkpoint's weights in bf16.
        perplexity: perplexity on the texts, with exact bf16 KV.
        quality: teacher-forced, against the dense model; None for the dense model.
        outputs: greedy outputs in fp32 against those of the dense model; None for the dense model.
        runtimes: greedy outputs of `SERVED`, `BF16` and, if transformers is installed and supports
            the model, `PEER` against this checkpoint in fp32; and of `PAIR`.
    """

    name: str
    model_hash: str
    method: str
    keep: float
    nbytes: int
    inputs: Inputs
    bootstrap: Bootstrap
    environment: Environment
    perplexity: float
    quality: Summary | None
    outputs: Fidelity | None
    runtimes: dict[str, Fidelity]
    seconds: float


def measure_checkpoints(
    checkpoints: Mapping[str, Load],
    encoder: ChatEncoder,
    texts: Tensor,
    inputs: Inputs,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    bootstrap: Bootstrap | None = None,
    progress: Progress = lambda _: None,
) -> list[CheckpointResult]:
    """Measure checkpoints; the first one is the dense model.

    Args:
        texts: int64 `[texts, tokens]`.
        prompts: prompts of greedy outputs; without prompts, none are generated.

    Raises:
        QualityError: the checkpoints have different vocabularies.
    """
    bootstrap = bootstrap or Bootstrap()
    results: list[CheckpointResult] = []
    dense: Model | None = None
    dense_outputs: Outputs = []
    compared = partial(
        compare_outputs,
        decode=encoder.decode,
        prompts_hash=hash_of(prompts),
        max_tokens=max_tokens,
    )
    for name, load in checkpoints.items():
        started = time.monotonic()
        progress(f"{name}: teacher-forced")
        checkpoint = load(torch.float32)
        model = build_model(checkpoint)
        dense = dense or model
        summary = _teacher_forced(dense, model, texts, bootstrap)
        found: dict[str, Outputs] = {}
        if prompts:
            found = _outputs(model, name, load, prompts, max_tokens, progress)
            dense_outputs = dense_outputs or found[FP32]
        other = model is not dense
        results.append(
            CheckpointResult(
                name=name,
                model_hash=checkpoint.model_hash,
                method=checkpoint.factorization.method if checkpoint.factorization else "dense",
                keep=checkpoint.keep,
                nbytes=nbytes(checkpoint) // 2,
                inputs=inputs,
                bootstrap=bootstrap,
                environment=Environment.current(),
                perplexity=summary.perplexity,
                quality=summary if other else None,
                outputs=compared(dense_outputs, found[FP32]) if other and found else None,
                runtimes=_runtimes(found, compared),
                seconds=time.monotonic() - started,
            )
        )
    return results


def _runtimes(
    found: Mapping[str, Outputs], compared: Callable[[Outputs, Outputs], Fidelity]
) -> dict[str, Fidelity]:
    """Return the fidelity of each runtime's outputs to those in fp32, and of `PAIR`."""
    runtimes = {
        runtime: compared(found[FP32], found[runtime])
        for runtime in (SERVED, BF16, PEER)
        if runtime in found
    }
    if PEER in found:
        runtimes[PAIR] = compared(found[PEER], found[BF16])
    return runtimes


def _teacher_forced(dense: Model, model: Model, texts: Tensor, bootstrap: Bootstrap) -> Summary:
    """Compare a model with the dense one; both have exact bf16 KV and the same kernels."""
    if model.config.vocab_size != dense.config.vocab_size:
        raise QualityError(
            f"a checkpoint has {model.config.vocab_size} tokens in its vocabulary, the dense model "
            f"{dense.config.vocab_size}"
        )
    exact = TeacherForced(dense.config, None)
    scores = []
    for text in texts:
        baseline = logits_of(dense, text, exact)
        other = baseline
        if model is not dense:
            other = logits_of(model, text, TeacherForced(model.config, None))
        scores.append(compare(baseline, other, text))
    return summarize(scores, bootstrap)


def _outputs(
    model: Model,
    name: str,
    load: Load,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    progress: Progress,
) -> dict[str, Outputs]:
    """Return the outputs of one checkpoint by runtime, those in fp32 first."""
    progress(f"{name}: greedy outputs in {FP32}")
    outputs = {FP32: outputs_of(model, prompts, max_tokens, Float32KV(model.config))}
    progress(f"{name}: {SERVED}")
    outputs[SERVED] = outputs_of(model, prompts, max_tokens)
    progress(f"{name}: {BF16}")
    rounded = load(torch.bfloat16)
    outputs[BF16] = outputs_of(build_model(rounded, dtype=torch.bfloat16), prompts, max_tokens)
    if find_spec("transformers") is None:
        progress(f"{name}: {PEER}: skipped, because transformers is not installed")
        return outputs
    from runtime.offline.bench import peers

    try:
        peer = peers.build(rounded)
    except ValueError as error:
        progress(f"{name}: {PEER}: skipped: {error}")
        return outputs
    progress(f"{name}: {PEER}")
    ends = model.config.eos_token_ids
    outputs[PEER] = [peer_output(peer, prompt, max_tokens, ends) for prompt in prompts]
    return outputs


@torch.inference_mode()
def peer_output(
    peer: Any, prompt: Sequence[int], max_tokens: int, ends: Sequence[int]
) -> list[int]:
    """Return the greedy output of a transformers model for one prompt."""
    from runtime.offline.bench import peers

    tokens: list[int] = []
    forward = peers.cached(peer)
    step = list(prompt)
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in ends):
        tokens.append(int(forward(torch.tensor([step]))[0, -1].argmax()))
        step = tokens[-1:]
    return tokens
