"""From what a user names to a workload, its times and the target's tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from loadgen.arrivals import Arrivals, Constant, Gamma, Poisson, Ramp
from loadgen.errors import UsageError
from loadgen.workload import (
    PRESETS,
    Lengths,
    LocalTokenizer,
    MooncakeTrace,
    PromptFile,
    PromptWriter,
    RemoteTokenizer,
    SharedPrefix,
    ShareGPT,
    Synthetic,
    Tokenizer,
    Workload,
    parse_lengths,
    preset,
)


class Process(StrEnum):
    """When requests come."""

    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    RAMP = "ramp"
    TRACE = "trace"


class Format(StrEnum):
    """Of a file of requests."""

    PROMPTS = "prompts"
    MOONCAKE = "mooncake"
    SHAREGPT = "sharegpt"


@dataclass(frozen=True)
class Source:
    """What to ask, as a user says it.

    Attributes:
        preset: of `PRESETS`; ``inputs`` and ``outputs`` go before its own.
        inputs, outputs: lengths, as `parse_lengths` has them.
        file, format: a file of requests instead.
        scale: of a preset's lengths.
        prefix_tokens, prefix_groups: of a prefix that prompts share.
        token_ids: prompts are token ids, not text.
    """

    preset: str | None = None
    inputs: str | None = None
    outputs: str | None = None
    file: Path | None = None
    format: Format = Format.PROMPTS
    scale: float = 1.0
    prefix_tokens: int = 0
    prefix_groups: int = 1
    token_ids: bool = False

    def workload(self, tokenizer: Tokenizer) -> Workload:
        """Raises UsageError for what does not go together, and for a file that is none."""
        writer = PromptWriter(tokenizer, token_ids=self.token_ids)
        if self.file is not None:
            return self._of_file(self.file, tokenizer, writer)
        named = preset(self.preset, self.scale) if self.preset else None
        inputs = _lengths(self.inputs, None if named is None else named.inputs)
        outputs = _lengths(self.outputs, None if named is None else named.outputs)
        if inputs is None or outputs is None:
            raise UsageError(
                f"what is to be asked? a preset ({', '.join(PRESETS)}), a file, or lengths of "
                "prompts and answers, such as --input fixed:128 --output fixed:32"
            )
        prefix = None
        if self.prefix_tokens:
            prefix = SharedPrefix(self.prefix_tokens, self.prefix_groups)
        return Synthetic(inputs, outputs, writer, prefix)

    def _of_file(self, file: Path, tokenizer: Tokenizer, writer: PromptWriter) -> Workload:
        if self.preset or self.inputs or self.prefix_tokens:
            raise UsageError("a file has its own prompts: no preset, lengths or prefix beside it")
        if self.format is Format.MOONCAKE:
            return MooncakeTrace(file, writer)
        if self.format is Format.SHAREGPT:
            return ShareGPT(file, tokenizer)
        return PromptFile(file, tokenizer, parse_lengths(self.outputs) if self.outputs else None)


@dataclass(frozen=True)
class Timing:
    """When to ask; `Process` says which of these count."""

    process: Process = Process.POISSON
    rate: float | None = None
    to_rate: float | None = None
    burstiness: float = 1.0
    duration_s: float | None = None

    def arrivals(self) -> Arrivals | None:
        """None: a trace's own times.

        Raises:
            UsageError: a number is missing.
        """
        if self.process is Process.TRACE:
            return None
        rate = _given(self.rate, "--rate", self.process)
        if self.process is Process.RAMP:
            return Ramp(
                rate,
                _given(self.to_rate, "--to-rate", self.process),
                _given(self.duration_s, "--duration", self.process),
            )
        if self.process is Process.GAMMA:
            return Gamma(rate, self.burstiness)
        made: Callable[[float], Arrivals]
        made = Poisson if self.process is Process.POISSON else Constant
        return made(rate)


def open_tokenizer(
    file: Path | None, base: str | None, model: str, headers: dict[str, str]
) -> Tokenizer:
    """The target's: from a file, or asked of the target at ``base``.

    Raises:
        UsageError: neither is there.
    """
    if file is not None:
        return LocalTokenizer(file)
    if base is None:
        raise UsageError("a gRPC target does not tokenize: name a tokenizer.json, or its HTTP URL")
    return RemoteTokenizer(base, model=model, headers=headers)


def _lengths(text: str | None, other: Lengths | None) -> Lengths | None:
    return parse_lengths(text) if text else other


def _given(value: float | None, flag: str, process: Process) -> float:
    if value is None:
        raise UsageError(f"{process} arrivals need {flag}")
    return value
