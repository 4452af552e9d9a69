"""The engine of one worker: takes commands, returns tokens and computed chunks, step by step.

A step has two halves: `Engine.plan` takes commands and schedules, `Engine.compute` runs the forward
passes. The caller can therefore report the results of `plan` before the computation.

With replayed decode steps, `compute` launches a step and then reads the tokens of the previous one.
The host processes these tokens while the device computes.
"""

from collections.abc import Sequence as Items
from functools import partial

import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.core.limits import Limits
from runtime.core.plan import Chunk, StepPlan
from runtime.core.request import FinishReason, Request, SampledToken
from runtime.core.sequence import Purpose, Sequence, SequenceGroup
from runtime.engine.commands import (
    Add,
    Arrived,
    Cancel,
    Command,
    Computed,
    Release,
    Reserve,
    Reserved,
    StepOutput,
)
from runtime.engine.scheduler import Scheduler
from runtime.errors import NotFinite, RuntimeFault
from runtime.kv.pages import pages_for
from runtime.models.model import Model
from runtime.replay.decode import UNRESOLVED, DecodeReplay, InFlightStep
from runtime.replay.prefill import PrefillReplay
from runtime.replay.warm_up import Progress, silent, warm_up_prefill
from runtime.sampling.reference import Draw, SamplingRow, sample


class Engine:
    """Continuous batching of one model over its own pool of KV pages.

    Call `plan` and `compute` alternately, or `step` for one of each. The engine uses no thread and
    no clock: the same commands in the same steps give the same outputs. A step runs at most two
    forward passes, one over prompt chunks and one over all running sequences.

    Args:
        num_pages: number of pages for sequences.
        replay: whether to use `PrefillReplay` and `DecodeReplay` (CUDA graphs). Without them, the
            host takes longer to launch kernels than the device takes to run them. Replay does not
            change tokens, but decoded tokens are reported one step later.
        decodes: whether the engine decodes. False on a prefill worker, which needs no decode
            graphs.
        by_layer: whether to capture a decode graph for each layer instead of one for the step.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        limits: Limits,
        replay: bool = False,
        decodes: bool = True,
        by_layer: bool = False,
    ) -> None:
        self.model = model
        self.cache = model.new_cache(num_pages + replay)  # replay needs a null page
        self._replay: DecodeReplay | None = None
        if replay and decodes:
            self._replay = DecodeReplay(model, self.cache, limits.max_running, by_layer=by_layer)
        self._prefill_replay = (
            PrefillReplay(model, self.cache, limits.step_tokens) if replay else None
        )
        self._scheduler = Scheduler(
            limits,
            num_pages=num_pages,
            page_size=model.page_size,
            context_length=model.context_length,
        )
        self._planned: StepPlan | None = None
        self._limits = limits
        self._in_flight: InFlightStep | None = None  # launched decode step, not read yet

    @torch.inference_mode()
    def warm_up(self, progress: Progress = silent) -> None:
        """Compile kernels and capture graphs, so that they do not delay the first requests.

        Call it before the first command. On a CPU it does nothing.
        """
        if self.model.device.type == "cpu":
            return
        warm_up_prefill(self.model, self.cache, self._limits, progress)
        if self._prefill_replay is not None:
            self._prefill_replay.warm_up(partial(progress, "prompts"))
        if self._replay is not None:
            self._replay.warm_up(partial(progress, "decode"))

    @property
    def pages_total(self) -> int:
        """Number of pages, without the null page."""
        return self._scheduler.pool.total

    @property
    def pages_free(self) -> int:
        """Number of pages not allocated to any sequence."""
        return self._scheduler.pool.free

    @property
    def num_running(self) -> int:
        """Number of batch slots in use, including those of reserved and prefilling sequences."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Number of requests and preempted sequences that wait for batch slots or pages."""
        return self._scheduler.num_waiting

    @property
    def queue_tokens(self) -> int:
        """Number of tokens of unfinished requests; see `Scheduler.queue_tokens`."""
        return self._scheduler.queue_tokens

    @property
    def has_work(self) -> bool:
        """Whether a step without new commands would compute or report anything."""
        return self._in_flight is not None or self._scheduler.has_work

    @torch.inference_mode()
    def plan(self, incoming: Items[Command]) -> StepOutput:
        """Take commands and schedule the step that `compute` will run.

        Returns:
            Results known before the computation: ``refused``, ``reserved``, ``started``, and
            ``ended`` for requests whose choices had all finished when their KV arrived. If the
            in-flight step must be read before the next launch, its tokens are included.

        Raises:
            ValueError: a request id was added twice, or KV arrived for a request without a
                reservation. Both are bugs of the caller and cannot be caused by a user's request.
        """
        output = StepOutput()
        for command in incoming:
            self._execute(command, output)
        if self._in_flight is not None and not self._can_launch_ahead(self._in_flight):
            self._collect(self._in_flight, output)
            self._in_flight = None
        plan = self._planned = self._scheduler.plan()
        output.refused += plan.refused
        if plan.reserved:
            ready = self._record_event()
            output.reserved += [
                Reserved(group.request.id, tuple(group.sequences[0].pages), ready)
                for group in plan.reserved
            ]
        output.started += [chunk.group.request.id for chunk in plan.chunks if not chunk.first]
        return output

    @torch.inference_mode()
    def compute(self) -> StepOutput:
        """Run the planned step: a batch of prompt chunks, then a batch of running sequences.

        Without a new plan it does nothing. Tokens of a replayed decode batch are part of the next
        step's output.
        """
        output = StepOutput()
        plan, self._planned = self._planned, None
        if plan is None:
            return output
        if plan.chunks:
            self._prefill(plan.chunks, output)
        previous, self._in_flight = self._in_flight, None
        # Prefill may have refused a request and dropped its other, running choices.
        if running := [sequence for sequence in plan.decode if sequence.running]:
            self._decode(running, output)
        if previous is not None:
            self._collect(previous, output)
        return output

    def step(self, incoming: Items[Command]) -> StepOutput:
        """Run `plan`, then `compute`, and return both outputs as one."""
        planned, output = self.plan(incoming), self.compute()
        output.reserved, output.started = planned.reserved, planned.started
        output.tokens = planned.tokens + output.tokens
        output.finished = planned.finished + output.finished
        output.refused = planned.refused + output.refused
        output.ended = planned.ended + output.ended
        return output

    def _execute(self, command: Command, output: StepOutput) -> None:
        match command:
            case Add(request, hold):
                self._submit(request, Purpose.HOLD if hold else Purpose.GENERATE, output)
            case Reserve(request):
                self._submit(request, Purpose.RECEIVE, output)
            case Arrived(request_id, first):
                if request_id in self._scheduler:
                    self._start_received(self._scheduler.arrived(request_id), first, output)
            case Cancel(request_id) | Release(request_id):
                self._scheduler.drop(request_id)

    def _submit(self, request: Request, purpose: Purpose, output: StepOutput) -> None:
        try:
            request.validate(self.model.config)
            self._scheduler.submit(request, purpose)
        except RuntimeFault as fault:
            output.refused.append((request.id, fault))

    def _prefill(self, chunks: list[Chunk], output: StepOutput) -> None:
        """Compute prompt chunks, and sample the first tokens of completed prompts."""
        logits = self._forward_chunks(chunks)
        ready = self._record_event()
        for chunk in chunks:
            self._report(chunk, ready, output)
            self._scheduler.computed(chunk)
        complete = [chunk.group for chunk in chunks if chunk.completes]
        for group in complete:
            if group.purpose is Purpose.GENERATE:
                self._fork(group)
        sequences = [sequence for group in complete for sequence in group.sequences]
        if sequences:
            each = torch.tensor([len(group.sequences) for group in complete], device=logits.device)
            rows = [SamplingRow.of(sequence) for sequence in sequences]
            draws = sample(logits.repeat_interleave(each, dim=0), rows)
            for group in complete:
                for sequence in group.sequences:
                    ended = self._accept(sequence, draws.pop(0), output)
                    if group.purpose is Purpose.GENERATE and not ended:
                        self._scheduler.run(sequence)

    def _forward_chunks(self, chunks: list[Chunk]) -> Tensor:
        """Run the forward pass of prompt chunks; return logits `[completed prompts, vocab]`."""
        slices = [
            SequenceSlice(
                chunk.group.tokens[chunk.first : chunk.first + chunk.count],
                chunk.first,
                chunk.group.sequences[0].pages,
                chunk.completes,
            )
            for chunk in chunks
        ]
        logits = self._prefill_replay.forward(slices) if self._prefill_replay is not None else None
        if logits is None:
            logits = self.model.forward(Batch.of(slices, self.model.device), self.cache)
        return logits

    def _record_event(self) -> "torch.cuda.Event | None":
        """Return an event that other CUDA streams can wait for; None on a CPU."""
        if self.model.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _report(self, chunk: Chunk, ready: "torch.cuda.Event | None", output: StepOutput) -> None:
        """Add a chunk and its pages to ``output.computed``."""
        group, size = chunk.group, self.model.page_size
        end = chunk.first + chunk.count
        pages = group.sequences[0].pages[chunk.first // size : pages_for(end, size)]
        output.computed.append(
            Computed(group.request.id, chunk.first, chunk.count, tuple(pages), ready)
        )

    def _decode(self, sequences: list[Sequence], output: StepOutput) -> None:
        """Launch a replayed step, or without replay compute a step and accept its tokens."""
        if self._replay is not None:
            self._in_flight = self._replay.launch(sequences)
            self._scheduler.step_launched(sequences)
            return
        for sequence, draw in zip(sequences, self._decode_once(sequences), strict=True):
            self._accept(sequence, draw, output)

    def _can_launch_ahead(self, step: InFlightStep) -> bool:
        """Return whether the next step can be launched before ``step`` is read.

        It cannot if the host must complete the sampling of a token, if a sequence must be
        preempted, or if sequences should move to other batch slots.
        """
        return (
            step.replay.can_launch_ahead(self._scheduler.continuing)
            and not self._scheduler.must_preempt
            and all(sequence.resolved for sequence in step.sequences)
        )

    def _collect(self, step: InFlightStep, output: StepOutput) -> None:
        """Read the tokens of a step, and drop those of sequences that no longer run."""
        draws = step.replay.collect(step)
        self._scheduler.step_completed(step.sequences)
        for sequence, draw in zip(step.sequences, draws, strict=True):
            sequence.resolved = draw is not UNRESOLVED
            if sequence.running and sequence.resolved:
                self._accept(sequence, draw, output)

    def _decode_once(self, sequences: list[Sequence]) -> list[Draw | None]:
        """Compute one decode step and sample from it, without replay."""
        slices = [
            SequenceSlice(sequence.tokens[-1:], len(sequence.tokens) - 1, sequence.pages)
            for sequence in sequences
        ]
        logits = self.model.forward(Batch.of(slices, self.model.device), self.cache)
        return sample(logits, [SamplingRow.of(sequence) for sequence in sequences])

    def _start_received(
        self, group: SequenceGroup, first: tuple[SampledToken, ...], output: StepOutput
    ) -> None:
        """Append the first tokens that the prefill worker sampled, and decode all choices."""
        self._fork(group)
        tokens = {token.choice: token for token in first}
        for sequence in group.sequences:
            token = tokens[sequence.choice]
            sequence.tokens.append(token.token)
            if self._finish_reason(sequence) is None:
                self._scheduler.run(sequence)
            elif self._scheduler.finish(sequence):
                output.ended.append(group.request.id)

    def _fork(self, group: SequenceGroup) -> None:
        """Copy the partly filled last prompt page of the first choice to every other choice."""
        first, *others = group.sequences
        if others and len(group.tokens) % self.model.page_size:
            last = len(first.pages) - 1
            self.cache.copy_pages(
                [first.pages[last]] * len(others), [sequence.pages[last] for sequence in others]
            )

    def _accept(self, sequence: Sequence, draw: Draw | None, output: StepOutput) -> bool:
        """Append a sampled token and report it. Return whether the choice has ended."""
        request = sequence.request
        if draw is None and request.id in self._scheduler:
            fault = NotFinite(f"the model's logits at token {len(sequence.tokens)} are not finite")
            output.refused.append((request.id, fault))
            self._scheduler.drop(request.id)
        if draw is None or request.id not in self._scheduler:  # refused, now or by another choice
            self._scheduler.discard(sequence)
            return True
        index = len(sequence.tokens) - request.prompt_tokens
        token = SampledToken(sequence.choice, index, draw.token, draw.logprob, draw.top)
        output.tokens.append((request.id, token))
        sequence.tokens.append(draw.token)
        reason = self._finish_reason(sequence)
        if reason is None:
            return False
        output.finished.append((request.id, sequence.choice, reason))
        if self._scheduler.finish(sequence):
            output.ended.append(request.id)
        return True

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Return the reason if a sequence ends with its last token, else None."""
        if sequence.tokens[-1] in sequence.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.limit else None
