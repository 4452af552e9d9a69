"""Grammars constrain the tokens of requests, whatever the engine does with their sequences."""

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from runtime.core.plan import StepPlan
from runtime.core.request import (
    FinishReason,
    PromptLogprobs,
    Request,
    SampledToken,
    SamplingParams,
)
from runtime.engine import Add, Arrived, Engine, LocalExecutor, Reserve
from runtime.engine.executor import LaunchedStep
from runtime.errors import GrammarFailed, InvalidRequest
from runtime.grammar.compiler import Grammar
from runtime.grammar.masks import TokenMasks
from runtime.grammar.spec import GrammarKind
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.sampling.reference import Draw
from tests.runtime.engine.mirrored import Mirrored
from tests.runtime.grammar.schemas import random_schema
from tests.runtime.grammar.validation import faults
from tests.runtime.grammar.words import END, decode, encode, grammar
from tests.runtime.tiny import CONFIG, Record, drive, engine_of, prompt_of, tiny_checkpoint

SIZE = 600
BOTH = pytest.mark.parametrize("replay", [False, True], ids=["direct", "replay"])
SCHEMA = {
    "type": "object",
    "properties": {
        "größe": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", "😀"]}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 12},
    },
    "required": ["größe", "tags", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> Model:
    return build_model(tiny_checkpoint(config=replace(CONFIG, vocab_size=SIZE)))


@pytest.fixture(scope="module")
def schema() -> Grammar:
    return grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), SIZE)


def constrained(
    name: str,
    found: Grammar,
    *,
    seed: int = 0,
    output: Sequence[int] = (),
    choices: int = 1,
    max_tokens: int = 150,
    **sampling: object,
) -> Request:
    """Return a request with a grammar, after the tokens of ``output``.

    Its logits favour tokens with which answers end.
    """
    ends = [END, *encode('"', SIZE), *encode("}", SIZE), *encode("]", SIZE)]
    values = {"logit_bias": dict.fromkeys(ends, 3.0), "seed": seed, **sampling}
    prompt = prompt_of(20 + seed % 30, seed, SIZE)
    return Request(
        name,
        (*prompt, *output),
        len(prompt),
        SamplingParams(constrained=True, **values),  # type: ignore[arg-type]
        max_tokens,
        frozenset({END}),
        choices,
        grammar=found.start(output),
    )


def free(name: str, seed: int = 0, max_tokens: int = 40, **sampling: object) -> Request:
    prompt = prompt_of(33, seed, SIZE)
    values = {"seed": seed, **sampling}
    return Request(name, prompt, len(prompt), SamplingParams(**values), max_tokens)  # type: ignore[arg-type]


def check_finished(record: Record, name: str, choice: int, schema: object) -> bool:
    """Check the answer of a choice against its schema; return whether it has ended by itself."""
    if record.finished[name, choice] is FinishReason.LENGTH:
        return False
    output = record.output(name, choice)
    assert output[-1] == END
    assert not faults(json.loads(decode(output, SIZE)), schema)
    return True


def test_tokens_are_reported_before_the_masks_of_the_next_step(
    model: Model, schema: Grammar
) -> None:
    engine = engine_of(model, pages=200, replay=True)
    engine.plan([Add(constrained("a", schema))])
    for index in range(4):
        found = [token.index for _, token in engine.compute().tokens]
        assert found == ([index - 1] if index else [])
        assert engine.awaits_masks
        assert engine.sample().tokens == []
        assert not engine.awaits_masks
        engine.plan([])


@BOTH
def test_finished_answers_validate_against_their_schemas(model: Model, replay: bool) -> None:
    random, finished = Random(7), 0
    schemas = {f"r{n}": random_schema(random, 2) for n in range(10)}
    requests = [
        constrained(
            name,
            grammar(GrammarKind.JSON_SCHEMA, json.dumps(found), SIZE),
            seed=number,
            temperature=(number % 3) * 0.8,
            logprobs=2 if number % 4 == 0 else None,
        )
        for number, (name, found) in enumerate(schemas.items())
    ]
    record = drive(engine_of(model, pages=200, replay=replay), *map(Add, requests))
    assert record.refused == {}
    for name, found in schemas.items():
        finished += check_finished(record, name, 0, found)
    assert finished > len(schemas) / 2


@BOTH
def test_choices_have_grammars_of_their_own(model: Model, schema: Grammar, replay: bool) -> None:
    request = constrained("a", schema, choices=4, temperature=1.2, seed=5)
    record = drive(engine_of(model, replay=replay), Add(request))
    outputs = [record.output("a", choice) for choice in range(4)]
    assert len(set(map(tuple, outputs))) == 4
    assert sum(check_finished(record, "a", choice, SCHEMA) for choice in range(4)) >= 2


@BOTH
def test_preemption_does_not_change_the_tokens(model: Model, schema: Grammar, replay: bool) -> None:
    requests = [constrained(f"r{n}", schema, seed=n, temperature=0.9) for n in range(4)]
    whole = drive(engine_of(model, pages=100, replay=replay), *map(Add, requests))
    few = drive(engine_of(model, pages=14, replay=replay), *map(Add, requests))
    started = [name for step in few.steps for name in step.started]
    assert len(started) > len(set(started)), "a sequence was preempted"
    assert few.finished == whole.finished
    for request in requests:
        assert few.output(request.id) == whole.output(request.id)


@pytest.mark.few(1)
@BOTH
def test_replay_from_every_prefix_continues_with_the_same_tokens(
    model: Model, schema: Grammar, replay: bool
) -> None:
    request = constrained("a", schema, seed=3, temperature=0.7)
    whole = drive(engine_of(model), Add(request)).output("a")
    assert whole[-1] == END
    engine = engine_of(model, replay=replay)
    for count in range(1, len(whole), 1 + replay):
        rest = constrained(
            f"a{count}", schema, seed=3, temperature=0.7, output=tuple(whole[:count])
        )
        assert drive(engine, Add(rest)).output(f"a{count}") == whole[count:]


def test_first_token_is_constrained_before_it_moves_to_another_worker(
    model: Model, schema: Grammar
) -> None:
    request = constrained("a", schema, seed=4, temperature=0.8, choices=2)
    whole = drive(engine_of(model), Add(request))
    prefill, decode_ = engine_of(model), engine_of(model)
    record = Record()
    while not record.tokens:
        record.add(prefill.step([] if record.steps else [Add(request, hold=True)]))
    first = tuple(token for step in record.steps for _, token in step.tokens)
    assert {token.token for token in first} <= set(encode("{", SIZE) + encode('{"', SIZE))
    reserved = decode_.step([Reserve(request)]).reserved[0]
    source, target = _executor(prefill).cache, _executor(decode_).cache
    sent = record.steps[-1].computed or next(s.computed for s in record.steps if s.computed)
    tables = [page for chunk in sent for page in chunk.page_tables[0]]
    for own, other in zip(source.planes, target.planes, strict=True):
        other[list(reserved.page_tables[0][: len(tables)])] = own[tables]
    rest = drive(decode_, Arrived("a", first))
    for token in first:
        found = [token.token, *rest.output("a", token.choice)]
        assert found == whole.output("a", token.choice)


def _executor(engine: Engine) -> LocalExecutor:
    assert isinstance(engine.executor, LocalExecutor)
    return engine.executor


@BOTH
def test_unconstrained_requests_are_unchanged_beside_constrained_ones(
    model: Model, schema: Grammar, replay: bool
) -> None:
    others = [
        free("greedy", 1, logprobs=3),
        free("random", 2, temperature=0.9),
        free("flat", 3, temperature=60.0),
        free("biased", 4, temperature=0.7, logit_bias={5: 2.0}, frequency_penalty=0.3),
    ]
    neighbours = [constrained(f"c{n}", schema, seed=n, temperature=0.9) for n in range(3)]
    plain = [
        replace(n, sampling=replace(n.sampling, constrained=False), grammar=None)
        for n in neighbours
    ]
    beside = drive(engine_of(model, replay=replay), *map(Add, [*others, *neighbours]))
    alone = drive(engine_of(model, replay=replay), *map(Add, [*others, *plain]))
    for request in others:
        assert beside.tokens[request.id, 0] == alone.tokens[request.id, 0]
        assert len(beside.tokens[request.id, 0]) == 40


class Ordered(LocalExecutor):
    """Records launches, and reads and sampling of each step by its number."""

    calls: list[tuple[str, int]]

    def launch(self, plan: StepPlan) -> LaunchedStep:
        number = sum(name == "launch" for name, _ in self.calls)
        self.calls.append(("launch", number))
        return _Recorded(super().launch(plan), self.calls, number)


class _Recorded:
    def __init__(self, step: LaunchedStep, calls: list[tuple[str, int]], number: int) -> None:
        self._step = step
        self._calls = calls
        self._number = number
        self.ready = step.ready

    def sample(self, masks: TokenMasks) -> None:
        self._calls.append(("sample", self._number))
        self._step.sample(masks)

    def read(self) -> list[Draw | None]:
        self._calls.append(("read", self._number))
        return self._step.read()

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        return self._step.prompt_logprobs()


def test_forward_pass_is_launched_before_the_last_step_is_read(
    model: Model, schema: Grammar
) -> None:
    engine = engine_of(model, replay=True)
    executor = Ordered(model, _executor(engine).shape.options)
    executor.calls = []
    engine = Engine(executor)
    drive(engine, Add(constrained("a", schema, max_tokens=4)))
    assert executor.calls == [
        ("launch", 0),
        ("sample", 0),
        *[
            call
            for number in (1, 2, 3)
            for call in (("launch", number), ("read", number - 1), ("sample", number))
        ],
        ("read", 3),
    ]
    executor.calls.clear()
    drive(engine, Add(free("b", max_tokens=2)))
    # Two chunks of the prompt, and one decode step.
    assert executor.calls == [
        ("launch", 0),
        *[call for number in (1, 2) for call in (("launch", number), ("read", number - 1))],
        ("read", 2),
    ]


@BOTH
def test_complete_answer_ends_before_min_tokens(model: Model, replay: bool) -> None:
    """A grammar that allows only the end overrules the suppression of end tokens and a bias."""
    yes = grammar(GrammarKind.CHOICE, '["yes"]', SIZE)
    for temperature in (0.0, 1.0):
        request = constrained(
            f"a{temperature}",
            yes,
            temperature=temperature,
            min_tokens=50,
            suppressed=frozenset({END}),
            logit_bias={END: -100.0},
        )
        output = drive(engine_of(model, replay=replay), Add(request)).output(request.id)
        assert decode(output, SIZE) == "yes"
        assert output[-1] == END


@BOTH
def test_end_is_not_sampled_before_the_text_may_end(model: Model, replay: bool) -> None:
    found = grammar(GrammarKind.REGEX, "[ab]{20}", SIZE)
    request = constrained("a", found, logit_bias={END: 100.0})
    output = drive(engine_of(model, replay=replay), Add(request)).output("a")
    assert len(decode(output, SIZE)) == 20


@BOTH
def test_length_may_cut_an_answer(model: Model, schema: Grammar, replay: bool) -> None:
    record = drive(engine_of(model, replay=replay), Add(constrained("a", schema, max_tokens=3)))
    assert record.finished["a", 0] is FinishReason.LENGTH
    assert len(record.output("a")) == 3


@BOTH
def test_request_ends_with_an_error_if_its_grammar_fails(
    model: Model, schema: Grammar, replay: bool
) -> None:
    bad = constrained("bad", schema, choices=2)
    assert bad.grammar is not None
    bad.grammar.advance(encode("no JSON", SIZE))
    engine = engine_of(model, replay=replay)
    good = constrained("good", schema, seed=3)
    record = drive(engine, Add(bad), Add(good))
    assert isinstance(record.refused["bad"], GrammarFailed)
    assert ("bad", 0) not in record.tokens
    assert ("good", 0) in record.finished
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


def test_grammar_of_another_vocabulary_is_refused(model: Model) -> None:
    other = grammar(GrammarKind.CHOICE, '["yes"]', 300)
    record = drive(engine_of(model), Add(constrained("a", other)))
    assert isinstance(record.refused["a"], InvalidRequest)


@pytest.mark.parametrize("replay", [False, True], ids=["direct", "replay"])
def test_masks_reach_another_rank(model: Model, schema: Grammar, replay: bool) -> None:
    requests = [
        constrained("a", schema, seed=1, temperature=0.9),
        constrained("b", schema, seed=2, choices=2),
    ]
    commands = [*map(Add, [*requests, free("c", 3, temperature=40.0)])]
    expected = drive(engine_of(model, pages=24, replay=replay), *commands)
    executor = Mirrored(model, engine_of(model, pages=24, replay=replay).executor.shape.options)
    record = drive(Engine(executor), *commands)
    executor.check_equal()
    assert record.tokens == expected.tokens
    assert isinstance(next(iter(record.tokens.values()))[0], SampledToken)


def _letters(text: str) -> frozenset[int]:
    """Return the token ids of single letters."""
    return frozenset(token for letter in text for token in encode(letter, SIZE))


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_allowed_by_the_grammar_and_by_the_other_fields(
    model: Model, replay: bool, temperature: float
) -> None:
    """The end is not in the allowed ids: it is sampled only where nothing else can follow."""
    found = grammar(GrammarKind.REGEX, "[abcx]{20}", SIZE)
    bad = tuple((first, second) for first in _letters("a") for second in _letters("a"))
    request = constrained(
        "a",
        found,
        temperature=temperature,
        allowed_token_ids=_letters("abc") | _letters("{}0123456789"),
        bad_words=(*bad, *((token,) for token in _letters("c"))),
    )
    record = drive(engine_of(model, replay=replay), Add(request))
    output = record.output("a")
    text = decode(output, SIZE)
    assert len(text) == 20
    assert set(text) <= set("ab")
    assert "aa" not in text
    assert output[-1] == END
    assert record.finished["a", 0] is FinishReason.STOP


@BOTH
@pytest.mark.parametrize(
    "excluding",
    [
        {"allowed_token_ids": _letters("ab")},
        {"bad_words": tuple((token,) for token in encode("x", SIZE))},
    ],
)
def test_request_ends_with_an_error_if_no_token_is_left(
    model: Model, replay: bool, excluding: dict[str, Any]
) -> None:
    found = grammar(GrammarKind.REGEX, "[ab]{4}x", SIZE)
    request = constrained("a", found, **excluding)
    other = constrained("b", found)
    record = drive(engine_of(model, replay=replay), Add(request), Add(other))
    assert "exclude all tokens" in str(record.refused["a"])
    assert isinstance(record.refused["a"], GrammarFailed)
    assert len(record.output("a")) == 4
    assert decode(record.output("b"), SIZE).endswith("x")


@BOTH
def test_log_probabilities_of_prompts_do_not_depend_on_the_grammar(
    model: Model, schema: Grammar, replay: bool
) -> None:
    request = constrained("a", schema, seed=3, temperature=0.7, prompt_logprobs=2)
    plain = replace(
        request, sampling=replace(request.sampling, constrained=False), grammar=None, max_tokens=1
    )
    expected = drive(engine_of(model, chunk_tokens=16), Add(plain))
    others = [constrained(f"b{n}", schema, seed=n) for n in range(2)]
    engine = engine_of(model, replay=replay, chunk_tokens=16)
    record = drive(engine, *map(Add, [others[0], request, others[1]]))
    found = [part for step in record.steps for name, part in step.prompt_logprobs if name == "a"]
    wanted = [part for step in expected.steps for _, part in step.prompt_logprobs]
    assert sum(len(part.logprobs) for part in found) == request.prompt_tokens - 1
    values, expected_values = (
        [value for part in parts for value in part.logprobs] for parts in (found, wanted)
    )
    assert values == pytest.approx(expected_values, abs=1e-4)
    without = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
    alone = drive(engine_of(model, replay=replay), Add(without))
    assert record.output("a") == alone.output("a")
