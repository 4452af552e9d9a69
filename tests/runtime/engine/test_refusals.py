"""Refused requests: invalid, too large, beyond the queue limit, or with non-finite logits."""

from dataclasses import replace

import pytest
import torch

from runtime.core.plan import Chunk, StepPlan
from runtime.core.request import SamplingParams
from runtime.core.sequence import Purpose, SequenceGroup
from runtime.engine import Add, Reserve
from runtime.errors import InvalidRequest, NotFinite, OutOfPages, QueueFull
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.sampling.reference import Draw, SamplingRow
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
        ({"sampling": SamplingParams(min_tokens=-1)}, "min_tokens"),
        ({"sampling": SamplingParams(suppressed=frozenset({211}))}, "suppressed tokens"),
        ({"sampling": SamplingParams(suppressed=frozenset({-1, 3}))}, "suppressed tokens"),
        ({"sampling": SamplingParams(suppressed=frozenset(range(211)))}, "all tokens"),
        ({"sampling": SamplingParams(allowed_token_ids=frozenset({211}))}, "allowed_token_ids"),
        ({"sampling": SamplingParams(bad_words=((1, 211),))}, "tokens of bad_words"),
        ({"sampling": SamplingParams(bad_words=((),))}, "1 to 16 tokens"),
        ({"sampling": SamplingParams(bad_words=((1,) * 17,))}, "1 to 16 tokens"),
        ({"sampling": SamplingParams(bad_words=((1,),) * 129)}, "at most 128"),
        (
            {"sampling": SamplingParams(allowed_token_ids=frozenset({1}), bad_words=((2, 1),))},
            "all tokens",
        ),
        (
            {
                "sampling": SamplingParams(
                    min_tokens=1,
                    suppressed=frozenset({1, 2}),
                    allowed_token_ids=frozenset({1}),
                )
            },
            "all tokens",
        ),
    ],
)
def test_invalid_request_is_refused_without_using_pages(
    model: Model, changes: dict[str, object], match: str
) -> None:
    engine = engine_of(model)
    request = replace(request_of("bad", 20), **changes)  # type: ignore[arg-type]
    for command in (Add(request), Add(request, hold=True), Reserve(request)):
        record = drive(engine, command)
        assert isinstance(record.refused["bad"], InvalidRequest)
        assert match in str(record.refused["bad"])
        assert not record.tokens
        assert engine.scheduler.pages.free == engine.scheduler.pages.total


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
    assert engine.scheduler.pages.free == (3,)


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
    engine = engine_of(build_model(replace(checkpoint, embedding=embedding)))
    pages = engine.scheduler.pages.free
    record = drive(engine, *(Add(request) for request in requests))
    assert {name: type(fault) for name, fault in record.refused.items()} == {"1": NotFinite}
    assert record.ended == ["0", "2"]
    assert engine.scheduler.pages.free == pages


def test_request_is_refused_once_if_choices_are_decoded_and_prefilled_in_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One choice is decoded while the other, which was preempted, is prefilled again.

    The logits of both are not finite.
    """
    engine = engine_of(build_model(tiny_checkpoint()), pages=24)
    bystander = request_of("z", 20, 60)
    pair = request_of("r", 20, 60, choices=2, seed=1)
    record = Record()
    for commands in ([Add(bystander), Add(pair)], [], []):
        record.add(engine.step(commands))
    scheduler = engine.scheduler
    preempted = next(s for s in scheduler._running if s.request.id == "r")
    planned = scheduler.plan

    def plan() -> StepPlan:
        """Return a plan in which the first choice was preempted and is prefilled again."""
        found = planned()
        again = SequenceGroup(Purpose.GENERATE, [preempted])
        chunk = Chunk(again, 0, len(preempted.tokens))
        rest = [s for s in found.decode if s is not preempted]
        scheduler._stop(preempted)
        scheduler._prefilling.append(again)
        return replace(found, chunks=[chunk], decode=rest)

    def sample_only_z(logits: torch.Tensor, rows: list[SamplingRow]) -> list[Draw | None]:
        return [Draw(3) if row.tokens[0] == bystander.tokens[0] else None for row in rows]

    monkeypatch.setattr(scheduler, "plan", plan)
    monkeypatch.setattr("runtime.steps.direct.sample", sample_only_z)
    output = engine.step([])
    assert [(name, type(fault)) for name, fault in output.refused] == [("r", NotFinite)]
    assert [name for name, _ in output.tokens] == ["z"]
    assert [sequence.request.id for sequence in scheduler._running] == ["z"]
