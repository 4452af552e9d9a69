"""One worker's engine: commands in, tokens and computed chunks out, one step at a time.

A step has two halves, so that what was decided can be told before its forward passes run: `plan`
takes commands and decides, `compute` does what was planned.

Where decode steps are replayed, `compute` launches one and reads the one before: the host does its
work on a step's tokens while the device computes the next.
"""

from collections.abc import Sequence as Items
from functools import partial

import torch

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
    StepOutput,
)
from runtime.engine.scheduler import Scheduler
from runtime.errors import NotFinite, RuntimeFault
from runtime.kv.pages import pages_for
from runtime.models.model import Model
from runtime.replay.decode import UNDECIDED, DecodeReplay, Flight
from runtime.replay.prefill import PrefillReplay
from runtime.replay.warm_up import Progress, silent, warm_up_prefill
from runtime.sampling.reference import Draw, SamplingRow, sample

__all__ = [
    "Add",
    "Arrived",
    "Cancel",
    "Command",
    "Computed",
    "Engine",
    "Limits",
    "Release",
    "Reserve",
    "StepOutput",
]


class Engine:
    """Runs a model over its own pages.

    `plan` and `compute`, in turns, are the whole interface; `step` is one of each. They have no
    thread and no clock, and the same commands in the same steps give the same outputs. A step is up
    to two forward passes, one over chunks of prompts and one over all running sequences.

    Args:
        replay: prefill by `PrefillReplay` and decode by `DecodeReplay`, for a device that is faster
            than its host. Tokens are the same, and those of decode are said one step later.
        decodes: whether there is anything to decode: a prefill worker needs no graphs for it.
        by_layer: decode has a graph for each layer instead of one for a step.
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
        self.cache = model.new_cache(num_pages + replay)  # one is nobody's, see `DecodeReplay`
        self._replay: DecodeReplay | None = None
        if replay and decodes:
            most = limits.max_running
            self._replay = DecodeReplay(model, self.cache, most, by_layer=by_layer)
        self._prompts = PrefillReplay(model, self.cache, limits.step_tokens) if replay else None
        self._scheduler = Scheduler(
            limits,
            num_pages=num_pages,
            page_size=model.page_size,
            context_length=model.context_length,
        )
        self._planned: StepPlan | None = None
        self._limits = limits
        self._flight: Flight | None = None  # a decode step whose tokens nobody has read

    @torch.inference_mode()
    def warm_up(self, progress: Progress = silent) -> None:
        """Compile and capture now what the first requests would wait for. For an engine that has
        taken no command yet; on the CPU nothing is to be done."""
        if self.model.device.type == "cpu":
            return
        warm_up_prefill(self.model, self.cache, self._limits, progress)
        if self._prompts is not None:
            self._prompts.warm_up(partial(progress, "prompts"))
        if self._replay is not None:
            self._replay.warm_up(partial(progress, "decode"))

    @property
    def pages_total(self) -> int:
        return self._scheduler.pool.total

    @property
    def pages_free(self) -> int:
        return self._scheduler.pool.free

    @property
    def num_running(self) -> int:
        """Sequences (choices) in group."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests, and preempted sequences, that wait for a batch slot or for pages."""
        return self._scheduler.num_waiting

    @property
    def queue_tokens(self) -> int:
        """Tokens accepted and not yet finished: of prompts that are held for others those not yet
        computed, of all else those that are, or will be, resident."""
        return self._scheduler.queue_tokens

    @property
    def has_work(self) -> bool:
        """Whether a step without commands would do anything."""
        return self._flight is not None or self._scheduler.has_work

    @torch.inference_mode()
    def plan(self, incoming: Items[Command]) -> StepOutput:
        """Take commands, and decide what `compute`, which comes next, is to do.

        Returns:
            What is known before anything is computed: ``refused``, ``reserved``, ``started``, and
            as ``ended`` the requests that ended with the tokens they arrived with; where the next
            step cannot be launched before the last one was read, also what that one drew.

        Raises:
            ValueError: an id was added twice, or KV arrived that was not reserved. Nothing that a
                user sends causes it.
        """
        output = StepOutput()
        for command in incoming:
            self._take(command, output)
        if self._flight is not None and not self._runs_ahead(self._flight):
            self._land(self._flight, output)
            self._flight = None
        plan = self._planned = self._scheduler.plan()
        output.refused += plan.refused
        output.reserved += [(w.request.id, tuple(w.sequences[0].pages)) for w in plan.reserved]
        output.started += [chunk.group.request.id for chunk in plan.chunks if not chunk.first]
        return output

    @torch.inference_mode()
    def compute(self) -> StepOutput:
        """Compute what was planned last, once: a batch of chunks, a batch of running sequences.

        Of a batch that is replayed the next step's output has the tokens.
        """
        output = StepOutput()
        plan, self._planned = self._planned, None
        if plan is None:
            return output
        if plan.chunks:
            self._prefill(plan.chunks, output)
        flown, self._flight = self._flight, None
        # Without those whose other choice was just refused.
        if running := [sequence for sequence in plan.decode if sequence.running]:
            self._decode(running, output)
        if flown is not None:
            self._land(flown, output)
        return output

    def step(self, incoming: Items[Command]) -> StepOutput:
        """`plan`, then `compute`, as one output. Raises what they raise."""
        planned, output = self.plan(incoming), self.compute()
        output.reserved, output.started = planned.reserved, planned.started
        output.tokens = planned.tokens + output.tokens
        output.finished = planned.finished + output.finished
        output.refused = planned.refused + output.refused
        output.ended = planned.ended + output.ended
        return output

    def _take(self, command: Command, output: StepOutput) -> None:
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
        size = self.model.page_size
        slices = [
            SequenceSlice(
                chunk.group.tokens[chunk.first : chunk.first + chunk.count],
                chunk.first,
                chunk.group.sequences[0].pages,
                chunk.completes,
            )
            for chunk in chunks
        ]
        logits = self._prompts.forward(slices) if self._prompts is not None else None
        if logits is None:
            logits = self.model.forward(Batch.of(slices, self.model.device), self.cache)
        for chunk in chunks:
            end = chunk.first + chunk.count
            pages = chunk.group.sequences[0].pages[chunk.first // size : pages_for(end, size)]
            request_id = chunk.group.request.id
            output.computed.append(Computed(request_id, chunk.first, chunk.count, tuple(pages)))
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

    def _decode(self, sequences: list[Sequence], output: StepOutput) -> None:
        if self._replay is not None:
            self._flight = self._replay.launch(sequences)
            self._scheduler.launched(sequences)
            return
        for sequence, draw in zip(sequences, self._decode_once(sequences), strict=True):
            self._accept(sequence, draw, output)

    def _runs_ahead(self, flight: Flight) -> bool:
        """Whether the next step can be launched before that one's tokens are known: none of its
        draws needs the host, and nobody has to give pages back."""
        return (
            flight.replay.follows(self._scheduler.continuing)
            and not self._scheduler.starved
            and all(sequence.decided for sequence in flight.sequences)
        )

    def _land(self, flight: Flight, output: StepOutput) -> None:
        """Read a step's tokens; those of sequences that ended or left meanwhile are nobody's."""
        draws = flight.replay.collect(flight)
        self._scheduler.landed(flight.sequences)
        for sequence, draw in zip(flight.sequences, draws, strict=True):
            sequence.decided = draw is not UNDECIDED
            if sequence.running and sequence.decided:
                self._accept(sequence, draw, output)

    def _decode_once(self, sequences: list[Sequence]) -> list[Draw | None]:
        slices = [
            SequenceSlice(sequence.tokens[-1:], len(sequence.tokens) - 1, sequence.pages)
            for sequence in sequences
        ]
        logits = self.model.forward(Batch.of(slices, self.model.device), self.cache)
        return sample(logits, [SamplingRow.of(sequence) for sequence in sequences])

    def _start_received(
        self, group: SequenceGroup, first: tuple[SampledToken, ...], output: StepOutput
    ) -> None:
        """Every choice continues from the token that the prefill worker sampled for it."""
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
        """Give each choice its own copy of the page that its next tokens go into."""
        first, *others = group.sequences
        if others and len(group.tokens) % self.model.page_size:
            last = len(first.pages) - 1
            self.cache.copy_pages(
                [first.pages[last]] * len(others), [sequence.pages[last] for sequence in others]
            )

    def _accept(self, sequence: Sequence, draw: Draw | None, output: StepOutput) -> bool:
        """Append a token and report it. True if it is the choice's last one."""
        request = sequence.request
        if draw is None and request.id in self._scheduler:
            fault = NotFinite(f"the model's logits at token {len(sequence.tokens)} are not finite")
            output.refused.append((request.id, fault))
            self._scheduler.drop(request.id)
        if draw is None or request.id not in self._scheduler:  # or it went with another choice
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
        """Whether a sequence's last token ends it."""
        if sequence.tokens[-1] in sequence.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.limit else None
