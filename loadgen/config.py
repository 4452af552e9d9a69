"""Configuration of a run: workload, arrivals, requests and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from loadgen.arrivals import Arrivals, Constant, Gamma, Poisson, Ramp
from loadgen.errors import UsageError
from loadgen.faults import Fault
from loadgen.measures import Objective
from loadgen.objectives import Requirement
from loadgen.schedule import Cancellations, Limits
from loadgen.target.base import Endpoint
from loadgen.validity import MAX_LAG_S
from loadgen.workload import (
    PRESETS,
    Chats,
    Lengths,
    MooncakeTrace,
    PrefixGroups,
    PromptFile,
    PromptWriter,
    SharedPrefix,
    ShareGPT,
    Synthetic,
    Tokenizer,
    Workload,
    parse_lengths,
    preset,
)


class Process(StrEnum):
    """Arrival process."""

    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    RAMP = "ramp"
    TRACE = "trace"


class FileFormat(StrEnum):
    """Format of a file of requests."""

    PROMPTS = "prompts"
    MOONCAKE = "mooncake"
    SHAREGPT = "sharegpt"
    SHARED_PREFIX = "shared-prefix"


_GENERATED = (FileFormat.MOONCAKE, FileFormat.SHARED_PREFIX)
"""Formats whose prompts are generated."""


@dataclass(frozen=True)
class WorkloadConfig:
    """Prompts and lengths.

    Attributes:
        preset: name in `PRESETS`; ``inputs`` and ``outputs`` override its lengths.
        inputs, outputs: length distributions, in the syntax of `parse_lengths`.
        file: file with requests; None to generate prompts.
        format: format of ``file``.
        scale: factor by which the preset's lengths are multiplied.
        prefix_tokens, prefix_groups: length and number of prefixes shared by prompts; system
            prompts of chats.
        token_ids: whether prompts are token ids instead of text.
        prefix_skew: exponent of Zipf's law for the choice of a prefix; 0 chooses all equally often.
        turns: distribution of the turns of chats, in the syntax of `parse_lengths`; None for single
            requests.
        think_s: mean seconds from the end of an answer to the next turn.
        cold: whether the beginning of each prompt is unique, so that no prefix cache holds a part.
        variant: runs of one seed with different variants have the same lengths and prefixes, but
            otherwise different words, so that a prefix cache does not hold prompts of other runs.

    Raises:
        UsageError: if an option of chats or of prefixes is given without them.
    """

    preset: str | None = None
    inputs: str | None = None
    outputs: str | None = None
    file: Path | None = None
    format: FileFormat = FileFormat.PROMPTS
    scale: float = 1.0
    prefix_tokens: int = 0
    prefix_groups: int = 1
    token_ids: bool = False
    prefix_skew: float = 0.0
    turns: str | None = None
    think_s: float = 0.0
    cold: bool = False
    variant: int = 0

    def __post_init__(self) -> None:
        if self.turns is None and self.think_s:
            raise UsageError("--think is the time between turns of chats: give --turns")
        if not self.prefix_tokens and (self.prefix_groups != 1 or self.prefix_skew):
            raise UsageError("--prefix-groups and --prefix-skew need --prefix-tokens")

    def open(self, tokenizer: Tokenizer) -> Workload:
        """Return the workload.

        Raises:
            UsageError: if settings contradict each other, or the file cannot be used.
        """
        writer = PromptWriter(tokenizer, token_ids=self.token_ids)
        if self.file is not None:
            return self._from_file(self.file, tokenizer, writer)
        named = preset(self.preset, self.scale) if self.preset else None
        inputs = _lengths(self.inputs, None if named is None else named.inputs)
        outputs = _lengths(self.outputs, None if named is None else named.outputs)
        if inputs is None or outputs is None:
            raise UsageError(
                f"no workload: give --preset ({', '.join(PRESETS)}), --file, or both lengths, "
                "such as --input fixed:128 --output fixed:32"
            )
        prefix = None
        if self.prefix_tokens:
            prefix = SharedPrefix(self.prefix_tokens, self.prefix_groups, self.prefix_skew)
        if self.turns is None:
            return Synthetic(inputs, outputs, writer, prefix, cold=self.cold, variant=self.variant)
        return Chats(
            parse_lengths(self.turns),
            *(inputs, outputs, writer, prefix),
            think_s=self.think_s,
            cold=self.cold,
            variant=self.variant,
        )

    def _from_file(self, file: Path, tokenizer: Tokenizer, writer: PromptWriter) -> Workload:
        if self.preset or self.inputs or self.prefix_tokens or self.turns:
            raise UsageError(
                "--file cannot be combined with --preset, --input, --prefix-tokens or --turns"
            )
        if self.cold and self.format not in _GENERATED:
            raise UsageError(
                f"--cold changes generated prompts, and those of --format {self.format} are sent "
                "unchanged"
            )
        if self.format is FileFormat.MOONCAKE:
            return MooncakeTrace(file, writer, cold=self.cold, variant=self.variant)
        if self.format is FileFormat.SHARED_PREFIX:
            return PrefixGroups.read(file, writer, cold=self.cold, variant=self.variant)
        if self.format is FileFormat.SHAREGPT:
            return ShareGPT(file, tokenizer)
        return PromptFile(file, tokenizer, parse_lengths(self.outputs) if self.outputs else None)


@dataclass(frozen=True)
class ArrivalConfig:
    """Arrival process and its parameters; each process uses only some of them.

    Attributes:
        process: None if it was not chosen; then arrivals are a Poisson process.
    """

    process: Process | None = None
    rate: float | None = None
    to_rate: float | None = None
    burstiness: float = 1.0
    duration_s: float | None = None

    def open(self) -> Arrivals | None:
        """Return the arrival process, or None if a trace gives the times.

        Raises:
            UsageError: if a parameter of the process is missing.
        """
        process = self.process or Process.POISSON
        if process is Process.TRACE:
            return None
        rate = self._required(self.rate, "--rate")
        if process is Process.RAMP:
            to_rate = self._required(self.to_rate, "--to-rate")
            return Ramp(rate, to_rate, self._required(self.duration_s, "--duration"))
        if process is Process.GAMMA:
            return Gamma(rate, self.burstiness)
        make: Callable[[float], Arrivals]
        make = Poisson if process is Process.POISSON else Constant
        return make(rate)

    def options(self) -> list[str]:
        """Return the command-line options of arrivals that were given."""
        given = {
            "--arrivals": self.process is not None,
            "--rate": self.rate is not None,
            "--to-rate": self.to_rate is not None,
            "--burstiness": self.burstiness != 1,
        }
        return [option for option, present in given.items() if present]

    def _required(self, value: float | None, flag: str) -> float:
        if value is None:
            raise UsageError(f"{self.process or Process.POISSON} arrivals need {flag}")
        return value


@dataclass(frozen=True)
class RunConfig:
    """Configuration of one run.

    Attributes:
        target: ``http://host:port/v1`` or ``grpc://host:port``, or several separated by commas;
            ``/v1`` may be missing.
        model: model name; None selects the first model listed by an HTTP target, or the only model
            of a gRPC target.
        texts: number of texts in each request for embeddings.
        concurrency: number of requests, or of chats, in flight at all times in a closed loop, which
            has no arrival process; None for an open loop.
        tokenizer: tokenizer.json or its folder; if None, `/tokenize` of ``tokenizer_url`` is used.
        tokenizer_url: server with `/tokenize`; if None, the target.
        warm_up_s, cool_down_s: seconds at the start and at the end of the run that are excluded
            from the measures.
        cancellations: requests that the client cancels.
        objectives: per-request objectives, for goodput.
        give_up: attainment without which the run may end early; None runs to the end.
        hang_up: whether to cancel requests in flight when the duration of arrivals ends, all at
            once, instead of waiting for their answers.
        requirements: bounds on metrics of the whole run.
        max_lag_s: p99 dispatch lag above which the run is invalid.
        metrics: URLs of server metrics; if empty, the target's own metrics are read if it has any.
        reference: URL of a target that must return the same greedy answers; None for no check.
        faults: faults to inject into a local deployment.
        gateway_port: gateway port of the local deployment; if None, the target's port.

    Raises:
        UsageError: if a closed loop is combined with an option of open loops, ``hang_up`` has no
            duration or is combined with a reference, or the target does not support the workload.
    """

    target: str
    workload: WorkloadConfig
    arrivals: ArrivalConfig
    limits: Limits
    concurrency: int | None = None
    model: str | None = None
    endpoint: Endpoint = Endpoint.COMPLETIONS
    texts: int = 1
    api_key: str | None = None
    tokenizer: Path | None = None
    tokenizer_url: str | None = None
    seed: int = 0
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    warm_up_s: float = 0.0
    cool_down_s: float = 0.0
    speed: float = 1.0
    cancellations: Cancellations = field(default_factory=Cancellations)
    objectives: tuple[Objective, ...] = ()
    give_up: float | None = None
    hang_up: bool = False
    requirements: tuple[Requirement, ...] = ()
    max_lag_s: float = MAX_LAG_S
    metrics: tuple[str, ...] = ()
    reference: str | None = None
    faults: tuple[Fault, ...] = ()
    gateway_port: int | None = None

    def __post_init__(self) -> None:
        if self.hang_up and self.limits.duration_s is None:
            raise UsageError("--hang-up needs --duration, at the end of which clients hang up")
        if self.hang_up and self.reference is not None:
            raise UsageError("--hang-up leaves answers incomplete: omit it or --check-against")
        self._check_prompts()
        if self.concurrency is None:
            return
        if self.concurrency < 1:
            raise UsageError(f"--concurrency must be at least 1, not {self.concurrency}")
        given = self.arrivals.options()
        given += ["--speed"] if self.speed != 1 else []
        given += ["an early end"] if self.give_up is not None else []
        if given:
            raise UsageError(
                "--concurrency is a closed loop, in which the ends of requests determine the send "
                f"times; it cannot be combined with {', '.join(given)}"
            )

    def _check_prompts(self) -> None:
        """Raise `UsageError` if the target does not support the prompts."""
        if self.workload.token_ids and self.endpoint is Endpoint.CHAT:
            raise UsageError("--endpoint chat needs prompts of text: omit --token-ids")
        is_embedding = self.endpoint is Endpoint.EMBEDDINGS
        if self.texts > 1 and not is_embedding:
            raise UsageError("--texts needs --endpoint embeddings")
        if is_embedding and self.workload.turns is not None:
            raise UsageError("--endpoint embeddings has no chats: omit --turns")
        if self.workload.turns is not None and self.cancellations.fraction:
            raise UsageError("--cancel is not supported with --turns")


def _lengths(text: str | None, default: Lengths | None) -> Lengths | None:
    return parse_lengths(text) if text else default
