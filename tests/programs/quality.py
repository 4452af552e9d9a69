"""Logits and greedy text of a model compared with transformers in fp32, with the same weights.

``python -m tests.programs.quality [--model NAME|PATH] [--device cuda]`` continues 20 prompts of
real text by 64 tokens greedily, with an engine configured as in a worker. The reference then
computes the logits of each text in one forward pass. A text counts as equal if every generated
token has the largest reference logit; the reference would then have generated the same text.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from rich.console import Console
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import load_checkpoint
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import Request, SamplingParams
from runtime.engine import Add, Engine, LocalExecutor
from runtime.gemm.model import build_fastest_model
from runtime.models.model import Model
from runtime.offline.bench import peers
from runtime.offline.compress import documentation
from runtime.pages.plan import PAGE_SIZE, PageCount
from services.common.model_source import resolve_model
from services.tokenizer.loading import load_tokenizer

PROMPTS, MAX_PROMPT_TOKENS, OUTPUT = 20, 300, 64


@dataclass
class Agreement:
    """Agreement of logits with the reference, accumulated over all positions of all texts.

    Attributes:
        differences: sum of squared differences of the logits.
        sizes: sum of squares of the reference's logits.
        same: number of positions with the same best token.
        rows: relative error of each position.
    """

    differences: float = 0.0
    sizes: float = 0.0
    same: int = 0
    positions: int = 0
    rows: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """RMS of the differences relative to the RMS of the reference's logits.

        A few positions, such as the first of a text, contribute most of this error.
        """
        return float((self.differences / self.sizes) ** 0.5)

    @property
    def typical(self) -> float:
        """Median over positions of the relative error of one position."""
        return median(self.rows)

    @property
    def top1(self) -> float:
        """Fraction of positions whose best token equals the reference's."""
        return self.same / self.positions

    def add(self, got: Tensor, expected: Tensor) -> None:
        """Add the logits of `n` positions, both fp32 `[n, vocab]`."""
        self.differences += float((got - expected).square().sum())
        self.sizes += float(expected.square().sum())
        self.same += int((got.argmax(1) == expected.argmax(1)).sum())
        self.positions += len(got)
        self.rows += ((got - expected).norm(dim=1) / expected.norm(dim=1)).tolist()

    def __str__(self) -> str:
        return (
            f"logits differ by {self.error:.2%} (rms; {self.typical:.2%} at the median position), "
            f"top-1 equal at {self.top1:.2%}"
        )


@dataclass(frozen=True)
class Quality:
    """Result of a comparison with the reference.

    Attributes:
        ours: agreement of our logits.
        bf16: agreement of the logits of transformers in bf16, for comparison.
        equal: number of equal texts.
        gaps: for each other text, the reference's best logit minus its logit of the generated
            token, at the first difference.
    """

    ours: Agreement
    bf16: Agreement
    equal: int
    gaps: tuple[float, ...]


def prompts_of(model: str, count: int) -> list[list[int]]:
    """Return prompts of real text, from 1 to `MAX_PROMPT_TOKENS` tokens long."""
    text = load_tokenizer(resolve_model(model)).encode(documentation()[1])
    lengths = [15 * (number + 1) % MAX_PROMPT_TOKENS + 1 for number in range(count)]
    return [text[400 * n : 400 * n + length] for n, length in enumerate(lengths)]


def continuations(model: Model, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Continue all prompts greedily in one batch, and return them with their continuations."""
    plan = model.layout.plan
    pages = PageCount.total(plan.computed(len(prompt) + OUTPUT + 1) for prompt in prompts)
    limits = Limits(max_running=len(prompts), max_waiting=len(prompts))
    options = EngineOptions(pages, limits, replay=model.replayable)
    engine = Engine(LocalExecutor(model, options))
    texts = [list(prompt) for prompt in prompts]
    commands = [
        Add(Request(str(number), tuple(prompt), len(prompt), SamplingParams(), max_tokens=OUTPUT))
        for number, prompt in enumerate(prompts)
    ]
    output = engine.step(commands)
    while True:
        for request_id, token in output.tokens:
            texts[int(request_id)].append(token.token)
        if not engine.has_work:
            return texts
        output = engine.step([])


def logits_of(model: Model, tokens: list[int]) -> Tensor:
    """Return the logits after every token, computed by one prefill: `[n, vocab]`."""
    pages = model.layout.plan.computed(len(tokens))
    batch = Batch.of([SequenceSlice(tokens, 0, list(range(pages[0])))], model.device)
    batch = replace(batch, logit_rows=torch.arange(len(tokens), device=model.device))
    return model.forward(batch, model.new_cache(pages))


@torch.inference_mode()
def measure(name: str, device: str, count: int = PROMPTS) -> Quality:
    """Measure a model in the dtype that a worker on this device uses."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    checkpoint = load_checkpoint(resolve_model(name), dtype=torch.float32)
    model = build_fastest_model(checkpoint, device=device, dtype=dtype, page_size=PAGE_SIZE)
    reference = peers.build(checkpoint).to(device)
    rounded = peers.build(load_checkpoint(resolve_model(name), dtype=torch.bfloat16)).to(device)
    prompts = prompts_of(name, count)
    ours = Agreement()
    bf16 = Agreement()
    gaps = []
    for prompt, text in zip(prompts, continuations(model, prompts), strict=True):
        tokens = torch.tensor([text], device=device)
        expected = reference(tokens).logits[0].float()
        ours.add(logits_of(model, text), expected)
        bf16.add(rounded(tokens).logits[0].float(), expected)
        generated = tokens[0, len(prompt) :]
        after = expected[len(prompt) - 1 : -1]
        behind = after.amax(1) - after.gather(1, generated[:, None])[:, 0]
        gaps += behind[behind > 0][:1].tolist()
    return Quality(ours, bf16, len(prompts) - len(gaps), tuple(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.quality")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    found = measure(args.model, args.device)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{args.model} on {args.device}, against transformers in fp32")
    console.print(f"ours: {found.ours}")
    console.print(f"transformers in bf16: {found.bf16}")
    console.print(f"greedy texts of {OUTPUT} tokens: {found.equal} of {PROMPTS} equal")
    if found.gaps:
        gaps = ", ".join(f"{gap:.3f}" for gap in found.gaps)
        console.print(
            f"at the first difference of the others, the reference's best logit leads by {gaps}"
        )


if __name__ == "__main__":
    main()
