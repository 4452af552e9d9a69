"""Refused requests: invalid, too large, beyond the queue limit, or with non-finite logits."""

from dataclasses import replace

import pytest
import torch

from runtime.core.plan import Chunk, StepPlan
from runtime.core.request import SamplingParams
from runtime.core.sequence import Purpose, Sequence, SequenceGroup
from runtime.engine import Add, Reserve, StepOutput
from runtime.errors import InvalidRequest, NotFinite, OutOfPages, QueueFull
from runtime.models.model import Model
from tests.runtime.tiny import Record, drive, engine_of, prompt_of, request_of, tiny_checkpoint


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokens": ()}, "prompt_tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 21}, "prompt_tokens"),
        ({"tokens": prompt_of(400), "prompt_tokens": 400}, "context of 400"),
        ({"tokens": (3, 211), "prompt_tokens": 2}, "token ids"),
        ({"tokens": (-1, 3), "prompt_tokens": 2}, "token ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_tokens": 15, "max_tokens": 5}, "max_tokens must be above 5"),
        ({"choices": 0}, "choices"),
        ({"choices": 17}, "17 choices exceed the 16 batch slots"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(top_k=-2)}, "top_k"),
        ({"sampling": SamplingParams(min_p=1.1)}, "min_p"),
        ({"sampling": SamplingParams(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"sampling": SamplingParams(presence_penalty=float("inf"))}, "presence_penalty"),
        ({"sampling": SamplingParams(logit_bias={211: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(logit_bias={2: float("nan")})}, "logit_bias"),
        ({"sampling": SamplingParams(logprobs=-1)}, "logprobs"),
    ],
)
def test_invalid_request_is_refused_without_using_pages(
    model: Model, changes: dict[str, object], match: str
) -> None:
    engine = engine_of(model)
    request = replace(request_of("bad", 20), **changes)  # type: ignore[arg-type]
    for command in (Add(request), Add(request, hold=True), Reserve(request)):
        if "batch slots" in match and command == Add(request, hold=True):
            continue  # a held prompt takes one slot
        record = drive(engine, command)
        assert isinstance(record.refused["bad"], InvalidRequest)
        assert match in str(record.refused["bad"])
        assert not record.tokens
        assert engine.pages_free == engine.pages_total


@pytest.mark.parametrize("kind", [Add, Reserve])
def test_prompt_larger_than_the_pool_is_refused(
    model: Model, kind: type[Add] | type[Reserve]
) -> None:
    record = drive(engine_of(model, pages=4), kind(request_of("long", 65)))
    assert isinstance(record.refused["long"], OutOfPages)


def test_sequence_larger_than_the_pool_is_refused(model: Model) -> None:
    engine = engine_of(model, pages=3)
    record = drive(engine, Add(request_of("r", 30, 100)))
    assert isinstance(record.refused["r"], OutOfPages)
    assert (
        len(record.output("r")) == 18 + 1
    )  # the pages hold 48 - 30 output tokens; the KV of the last token is not needed
    assert engine.pages_free == 3


def test_full_queue_refuses_the_latest_requests(model: Model) -> None:
    engine = engine_of(model, max_running=2, max_waiting=3)
    record = drive(engine, *(Add(request_of(f"r{n}", 5)) for n in range(8)))
    assert sorted(record.refused) == ["r5", "r6", "r7"]
    assert all(isinstance(fault, QueueFull) for fault in record.refused.values())
    assert sorted(record.ended) == [f"r{n}" for n in range(5)]


def test_non_finite_logits_end_only_their_own_request() -> None:
    requests = [request_of(str(n), 5 + n, 4, seed=n, choices=1 + n) for n in range(3)]
    poison = next(iter(set(requests[1].tokens) - set(requests[0].tokens + requests[2].tokens)))
    checkpoint = tiny_checkpoint()
    embedding = checkpoint.embedding.clone()
    embedding[poison] = torch.nan
    engine = engine_of(Model(replace(checkpoint, embedding=embedding)))
    pages = engine.pages_free
    record = drive(engine, *(Add(request) for request in requests))
    assert {name: type(fault) for name, fault in record.refused.items()} == {"1": NotFinite}
    assert record.ended == ["0", "2"]
    assert engine.pages_free == pages


def test_choice_is_not_decoded_after_its_sibling_was_refused_in_the_same_step() -> None:
    """One choice is planned to decode while the other, which was preempted, is prefilled again.

    The prefill has non-finite logits, so the request is dropped before the decode.
    """
    checkpoint = tiny_checkpoint()
    model = Model(checkpoint)
    engine = engine_of(model, pages=24)
    bystander = request_of("z", 20, 60)
    pair = request_of(
        "r", 20, 60, choices=2, sampling=SamplingParams(temperature=1.0, seed=5), seed=1
    )
    record = Record()
    record.add(engine.step([Add(bystander), Add(pair)]))
    for _ in range(6):
        record.add(engine.step([]))
    scheduler = engine._scheduler
    running = [s for s in scheduler._running if s.request.id == "r"]
    planned = scheduler.plan

    def plan() -> StepPlan:
        """Return a plan in which the first choice was preempted and is prefilled again."""
        found = planned()
        again = SequenceGroup(Purpose.GENERATE, [running[0]])
        chunk = Chunk(again, 0, len(running[0].tokens))
        rest = [s for s in found.decode if s is not running[0]]
        return replace(found, chunks=[chunk], decode=rest)

    seen: list[str] = []
    decode = engine._decode

    def watched(sequences: list[Sequence], output: StepOutput) -> None:
        seen.extend(sequence.request.id for sequence in sequences)
        decode(sequences, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "plan", plan)
        patch.setattr(engine, "_decode", watched)
        patch.setattr("runtime.engine.engine.sample", lambda logits, rows: [None] * len(rows))
        patch.setattr(scheduler, "computed", lambda chunk: None)
        engine.plan([])
        output = engine.compute()
    assert output.refused[0][0] == "r"
    assert seen == ["z"]
