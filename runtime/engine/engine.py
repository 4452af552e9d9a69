"""The engine of one worker: takes commands, returns tokens and computed chunks, step by step.

A step has two halves: `Engine.plan` takes commands and schedules, `Engine.compute` launches the
planned step on the executor. The caller can therefore report the results of `plan` before the
computation. The engine itself uses no tensor.

With replay, `compute` launches a step and then reads the tokens of the previous one. The host
processes these tokens while the device computes. If grammars constrain tokens of the step,
`Engine.sample` then computes the masks, and launches the sampling, which follows the forward pass.
The caller can therefore report the tokens of the previous step while masks are computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.core.plan import Chunk, StepPlan
from runtime.core.request import Request, SampledToken
from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.engine.commands import (
    Add,
    Arrived,
    Cancel,
    CancelChoice,
    Command,
    Computed,
    HistoryArrived,
    Pin,
    Reserve,
    Reserved,
    StepOutput,
)
from runtime.engine.constraints import Constraints
from runtime.engine.executor import Executor, LaunchedStep
from runtime.engine.scheduler import Scheduler
from runtime.errors import GrammarFailed, NotFinite, RuntimeFault
from runtime.sampling.reference import Draw
from runtime.steps.replay import UNRESOLVED
from runtime.steps.warm_up import Progress, silent


@dataclass(frozen=True)
class _InFlightStep:
    """A launched step whose tokens are not read yet.

    Attributes:
        sequences: sequences for which the step samples a token, see `StepPlan.sampled`.
        scored: request id of each chunk with `Chunk.scored`.
        constrained: whether it needs masks, see `StepPlan.constrained`.
    """

    launched: LaunchedStep
    sequences: list[SequenceState]
    scored: list[str]
    constrained: bool


class Engine:
    """Continuous batching of one model over the KV pages of an executor.

    Call `plan`, `compute` and `sample` in turn, or `step` for one of each. The engine uses no
    thread and no clock: the same commands in the same steps give the same outputs. A step computes
    prompt chunks and all running sequences: with replay in one forward pass, otherwise in two.

    Args:
        executor: computes the steps; `Ranks` on several devices.

    Attributes:
        executor: the executor that was passed to the constructor.
        scheduler: queues, batch slots and pages; callers read its numbers only.
        planned: the step that `compute` will run, or None.
        awaits_masks: whether the launched step is constrained and `sample` was not called yet.

    Raises:
        ValueError: a page group has no pages.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        shape = executor.shape
        options = shape.options
        self.scheduler = Scheduler(
            options.limits,
            plan=shape.plan,
            total=options.pages,
            context_length=shape.config.context_length,
            kv_eviction=options.kv_eviction,
            prefix_root=options.prefix_root,
        )
        self.planned: StepPlan | None = None
        self.awaits_masks = False
        self._in_flight: _InFlightStep | None = None
        self._constraints = Constraints()

    def warm_up(self, progress: Progress = silent) -> None:
        """Compile kernels and capture graphs, so that they do not delay the first requests.

        Call it before the first command.
        """
        self.executor.warm_up(progress)

    @property
    def has_work(self) -> bool:
        """Whether a step without new commands would compute or report anything."""
        return self._in_flight is not None or self.scheduler.has_work

    def plan(self, incoming: Sequence[Command]) -> StepOutput:
        """Take commands and schedule the step that `compute` will run.

        Returns:
            Results known before the computation: ``refused``, ``reserved``, ``deferred``,
            ``started``, and ``ended`` for requests whose choices had all finished when their KV
            arrived. If the in-flight step must be read first, its tokens are included.

        Raises:
            ValueError: a request id was added twice, KV arrived for a request without a
                reservation, or a request cannot receive KV. These are bugs of the caller and cannot
                be caused by a user's request.
        """
        output = StepOutput()
        for command in incoming:
            self._execute(command, output)
        if self._in_flight is not None and not self._can_launch_ahead(self._in_flight):
            self._collect(self._in_flight, output)
            self._in_flight = None
        plan = self.planned = self.scheduler.plan()
        output.refused += plan.refused
        output.deferred += [group.request.id for group in plan.deferred]
        if plan.reserved:
            ready = self.executor.record_event()
            for group in plan.reserved:
                tables = tuple(map(tuple, group.sequences[0].page_tables))
                output.reserved.append(Reserved(group.request.id, tables, ready, group.reused))
        starting = [chunk.group for chunk in plan.chunks if chunk.starts]
        output.started += [group.request.id for group in starting]
        output.reused += [(group.request.id, group.reused) for group in starting if group.reused]
        return output

    def compute(self) -> StepOutput:
        """Run the planned step: prompt chunks and all running sequences.

        Without a new plan it does nothing. With replay, the step's tokens are part of the next
        step's output, and the sampling of a constrained step is left to `sample`.
        """
        output = StepOutput()
        self._compute(output)
        return output

    def sample(self) -> StepOutput:
        """Compute the masks of the launched step and sample its tokens, if `awaits_masks`.

        Returns:
            ``refused``: requests whose masks cannot be computed.
        """
        output = StepOutput()
        self._sample(output)
        return output

    def step(self, incoming: Sequence[Command]) -> StepOutput:
        """Run `plan`, `compute` and `sample`, and return their outputs as one."""
        output = self.plan(incoming)
        self._compute(output)
        self._sample(output)
        return output

    def _compute(self, output: StepOutput) -> None:
        plan, self.planned = self.planned, None
        if plan is None:
            return
        previous, self._in_flight = self._in_flight, None
        if plan.chunks or plan.decode:
            self._in_flight = self._launch(plan, output)
            self.awaits_masks = self._in_flight.constrained
        if previous is not None:
            self._collect(previous, output)
        if self._in_flight is not None and not self.executor.shape.options.replay:
            self._sample(output)
            self._collect(self._in_flight, output)
            self._in_flight = None

    def _execute(self, command: Command, output: StepOutput) -> None:
        match command:
            case Add(request, hold, receives, worth):
                purpose = Purpose.HOLD if hold else Purpose.GENERATE
                self._submit(request, purpose, output, receives=receives, worth=worth)
            case HistoryArrived(request_id, complete):
                self.scheduler.history_arrived(request_id, complete=complete)
            case Pin(request):
                self._pin(request, output)
            case Reserve(request, may_reuse, may_compute):
                self._submit(request, Purpose.RECEIVE, output, may_reuse, may_compute)
            case Arrived(request_id, first):
                if request_id in self.scheduler:
                    self._start_received(self.scheduler.arrived(request_id), first, output)
            case CancelChoice(request_id, choice):
                if self.scheduler.cancel(request_id, choice):
                    output.ended.append(request_id)
            case Cancel(request_id):
                self.scheduler.drop(request_id)

    def _submit(
        self,
        request: Request,
        purpose: Purpose,
        output: StepOutput,
        may_reuse: int | None = None,
        may_compute: int = 0,
        *,
        receives: int = 0,
        worth: int = 1,
    ) -> None:
        try:
            request.validate(self.executor.shape.config)
            self.scheduler.submit(
                request, purpose, may_reuse, may_compute, receives=receives, worth=worth
            )
        except RuntimeFault as fault:
            output.refused.append((request.id, fault))

    def _pin(self, request: Request, output: StepOutput) -> None:
        """Hold cached pages, and report them as computed chunks."""
        try:
            request.validate(self.executor.shape.config)
            group = self.scheduler.pin(request)
        except RuntimeFault as fault:
            output.refused.append((request.id, fault))
            return
        output.started.append(request.id)
        ready = self.executor.record_event()  # another rank may still execute the last step
        plan, chunk = self.scheduler.pages.plan, self.executor.shape.options.limits.chunk_tokens
        end = len(group.sequences[0].page_tables[0]) * plan.page_size
        for first in range(0, end, chunk):
            count = min(chunk, end - first)
            pages = plan.span(first, first + count)
            tables = group.sequences[0].page_tables
            output.computed.append(
                Computed(
                    request.id,
                    first,
                    count,
                    tuple(tuple(table[pages.start : pages.stop]) for table in tables),
                    ready,
                    completes=first + count == end,
                )
            )

    def _launch(self, plan: StepPlan, output: StepOutput) -> _InFlightStep:
        """Launch a step, report its chunks, and record the launch in the scheduler."""
        constrained = plan.constrained
        launched = self.executor.launch(plan)
        for chunk in plan.chunks:
            self._report(chunk, launched.ready, output)
            if chunk.completes and chunk.group.purpose is Purpose.GENERATE:
                self._fork(chunk.group)
        scored = [chunk.group.request.id for chunk in plan.chunks if chunk.scored]
        sequences = self.scheduler.step_launched(plan)
        return _InFlightStep(launched, sequences, scored, constrained)

    def _sample(self, output: StepOutput) -> None:
        """Sample a constrained step. Refuse requests whose masks cannot be computed."""
        step = self._in_flight
        if step is None or not self.awaits_masks:
            return
        self.awaits_masks = False
        expects = self.scheduler.expects_token
        masks, failed = self._constraints.masks(step.sequences, expects)
        step.launched.sample(masks)
        for sequence, reason in failed:
            if expects(sequence):  # not refused yet for another choice
                fault = GrammarFailed(f"the grammar of the output has failed: {reason}")
                output.refused.append((sequence.request.id, fault))
                self.scheduler.drop(sequence.request.id)

    def _report(self, chunk: Chunk, ready: int | None, output: StepOutput) -> None:
        """Add a chunk and its pages to ``output.computed``.

        Reused tokens are part of the first chunk. If tokens of a prompt are evicted, its kept
        tokens are added as one chunk when the prompt is complete.
        """
        first = 0 if chunk.starts else chunk.first
        end, evicted = chunk.end, chunk.group.evicts
        if evicted:
            if not chunk.completes:
                return
            first, end = 0, end - evicted
        pages = self.scheduler.pages.plan.span(first, end)
        tables = tuple(tuple(table[pages.start : pages.stop]) for table in chunk.prompt.page_tables)
        output.computed.append(
            Computed(
                chunk.group.request.id,
                first,
                end - first,
                tables,
                ready,
                evicted=evicted,
                completes=chunk.completes,
                samples=chunk.samples,
            )
        )

    def _can_launch_ahead(self, step: _InFlightStep) -> bool:
        """Return whether the next step can be launched before ``step`` is read.

        It cannot if the host must complete the sampling of a token, if a sequence must be
        preempted, or if sequences should move to other batch slots.
        """
        return (
            self.executor.can_launch_ahead(self.scheduler.continuing)
            and not self.scheduler.must_preempt
            and all(sequence.resolved for sequence in step.sequences)
        )

    def _collect(self, step: _InFlightStep, output: StepOutput) -> None:
        """Read the tokens of a step.

        Ignore those of sequences that were dropped in the meantime.
        """
        draws = step.launched.read()
        self.scheduler.step_completed(step.sequences)
        if step.scored:
            self._report_prompts(step, output)
        for sequence, draw in zip(step.sequences, draws, strict=True):
            sequence.resolved = draw is not UNRESOLVED
            if sequence.resolved and self.scheduler.expects_token(sequence):
                self._accept(sequence, draw, output)

    def _report_prompts(self, step: _InFlightStep, output: StepOutput) -> None:
        """Report log probabilities of prompt tokens; refuse requests whose logits are not finite.

        Ignore those of requests that were dropped in the meantime.
        """
        found = step.launched.prompt_logprobs()
        for request_id, logprobs in zip(step.scored, found, strict=True):
            if request_id not in self.scheduler:
                continue
            if logprobs.finite:
                output.prompt_logprobs.append((request_id, logprobs))
            else:
                fault = NotFinite(f"logits of prompt tokens from {logprobs.first} are not finite")
                output.refused.append((request_id, fault))
                self.scheduler.discard(request_id)

    def _start_received(
        self, group: SequenceGroup, first: tuple[SampledToken, ...], output: StepOutput
    ) -> None:
        """Append the first tokens that the prefill worker sampled, and decode all choices.

        Sequences with forced tokens have no first tokens.
        """
        self._fork(group)
        tokens = {token.choice: token for token in first}
        for sequence in group.sequences:
            if sequence.forced:
                self.scheduler.append_forced(sequence)
            else:
                self.scheduler.append(sequence, tokens[sequence.choice].token)
            if sequence.finish_reason is None and not sequence.cancelled:
                self.scheduler.run(sequence)
            elif self.scheduler.finish(sequence):
                output.ended.append(group.request.id)

    def _fork(self, group: SequenceGroup) -> None:
        """Copy the partly filled last prompt page of the first choice to every other choice."""
        first, *others = group.sequences
        plan = self.scheduler.pages.plan
        if not others or not len(group.tokens) % plan.page_size:
            return
        for at in range(plan.prompt_groups):
            last = first.page_tables[at][-1]
            own = [sequence.page_tables[at][-1] for sequence in others]
            self.executor.copy_pages(at, [last] * len(others), own)

    def _accept(self, sequence: SequenceState, draw: Draw | None, output: StepOutput) -> None:
        """Append a sampled token and report it.

        If its logits are not finite, refuse the request.
        """
        request = sequence.request
        if draw is None:
            fault = NotFinite(f"the model's logits at token {len(sequence.tokens)} are not finite")
            output.refused.append((request.id, fault))
            self.scheduler.discard(request.id)
            return
        index = len(sequence.tokens) - request.prompt_tokens
        token = SampledToken(sequence.choice, index, draw.token, draw.logprob, draw.top)
        output.tokens.append((request.id, token))
        self.scheduler.append(sequence, draw.token)
        if reason := sequence.finish_reason:
            output.finished.append((request.id, sequence.choice, reason))
        if (reason or sequence.cancelled) and self.scheduler.finish(sequence):
            output.ended.append(request.id)
