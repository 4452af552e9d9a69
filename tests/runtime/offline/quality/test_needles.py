"""Contexts with facts, and the count of answers found."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.attention.base import Batch, SequenceSlice
from runtime.errors import QualityError
from runtime.offline.quality import needles
from runtime.offline.quality.attention import TeacherForced
from runtime.offline.quality.needles import (
    DEPTHS,
    TASKS,
    Context,
    Query,
    contexts,
    measure_needles,
    samples_of,
)
from runtime.offline.quality.prompts import ChatEncoder
from runtime.pages.plan import PageCount, pages_for
from tests.runtime.offline.quality.formats import Identity, Int8, Scaled
from tests.runtime.offline.quality.stepwise import PAGE, Stepwise
from tests.runtime.tiny import CONFIG, prompt_of, tiny_model


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: id for id, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


ENCODER = ChatEncoder(byte_tokenizer())


@pytest.mark.parametrize("task", TASKS)
def test_facts_are_at_their_depths_and_answer_the_questions(task: str) -> None:
    found = list(contexts(task, 2000, 3, 7, ENCODER))
    queries = [(context, query) for context in found for query in context.queries]
    assert sorted(query.depth for _, query in queries) == sorted([0, 1, 2, 3, 4] * 3)
    for context, query in queries:
        text, value = ENCODER.decode(context.tokens), ENCODER.decode(query.answer)
        assert len(value) == 5
        if task == "variable-tracking":
            copy = ENCODER.decode(query.question).split()[-2]
            name = text.partition(f"VAR {copy} = VAR ")[2].partition(".")[0]
            assert f"VAR {name} = {value}." in text
        at = text.index(value) / len(text)
        assert abs(at - DEPTHS[query.depth]) < 0.1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1000, 1777])
def test_the_longest_question_fills_the_length(task: str, length: int) -> None:
    for context in contexts(task, length, 2, 0, ENCODER):
        lengths = [len(context.tokens + one.question + one.answer) for one in context.queries]
        assert max(lengths) == length


def test_the_seed_determines_the_contexts() -> None:
    one, same, other = (list(contexts("multi-key", 900, 2, seed, ENCODER)) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert one[0] != one[1]


def test_long_contexts_have_fewer_samples() -> None:
    lengths = 1024, 2048, 4096, 8192
    assert [samples_of("multi-key", length, 4) for length in lengths] == [4, 4, 2, 1]
    assert [samples_of("passkey", length, 4) for length in lengths] == [2, 1, 1, 1]
    assert [samples_of("passkey", length, 20) for length in lengths] == [10, 5, 2, 1]


def test_facts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(QualityError, match="do not fit into 100 tokens"):
        list(contexts("passkey", 100, 1, 0, ENCODER))


def greedy(context: list[int], question: list[int], count: int) -> list[int]:
    """Return the answer with exact KV, each token from a prefill of the whole text."""
    model = tiny_model()
    text = [*context, *question]
    for _ in range(count):
        pages = list(range(pages_for(len(text), PAGE)))
        batch = Batch.of([SequenceSlice(text, 0, pages)])
        text.append(int(model.forward(batch, model.new_cache(PageCount(len(pages)))).argmax()))
    return text[-count:]


def test_an_answer_is_found_if_greedy_decoding_generates_it() -> None:
    model = tiny_model()
    context, question = list(prompt_of(200)), list(prompt_of(9, 5))
    answer = greedy(context, question, 4)
    query = Query(0, tuple(question), tuple(answer))
    answers = needles._Answers(model, Context(tuple(context), (query,)))
    exact, scaled = (TeacherForced(CONFIG, one) for one in (Identity(CONFIG), Scaled(CONFIG)))
    assert answers.found(query, exact)
    assert not answers.found(query, scaled)
    assert answers.found(query, exact)  # the KV of the context is unchanged
    for position in range(4):
        wrong = [*answer]
        wrong[position] = (wrong[position] + 1) % CONFIG.vocab_size
        assert not answers.found(replace(query, answer=tuple(wrong)), exact)


@pytest.mark.parametrize("length", [60, 96, 203])
def test_tokens_after_an_exact_context_equal_decoding_step_by_step(length: int) -> None:
    model = tiny_model()
    scaled = Scaled(CONFIG)
    context, after = list(prompt_of(length)), list(prompt_of(40, 3))
    pages = list(range(pages_for(length + len(after), PAGE)))
    prefill = Batch.of([SequenceSlice(context, 0, pages)])
    own = model.kv_format
    cache = model.new_cache(PageCount(len(pages)))
    model.forward(prefill, cache)
    batch = Batch.of([SequenceSlice(after, length, pages)])
    model.kv_format = TeacherForced(CONFIG, scaled)
    found = model.forward(replace(batch, logit_rows=torch.arange(len(after))), cache)
    cache = model.new_cache(PageCount(len(pages)))
    model.kv_format = own
    model.forward(prefill, cache)
    model.kv_format = Stepwise(scaled, own.planes(0, PAGE), window=True)
    steps = [
        Batch.of([SequenceSlice([token], length + index, pages)])
        for index, token in enumerate(after)
    ]
    expected = torch.cat([model.forward(step, cache) for step in steps])
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


class Answering:
    """Answers everything with exact KV up to a number of misses, and only depth 0 otherwise."""

    misses = 0

    def __init__(self, model: object, context: Context) -> None: ...

    def found(self, query: Query, kv_format: TeacherForced) -> bool:
        if kv_format._compressed is not None:
            return query.depth == 0
        type(self).misses -= 1
        return type(self).misses < 0


@pytest.mark.parametrize(("misses", "counted"), [(0, True), (1, True), (2, False)])
def test_tasks_count_if_exact_kv_finds_95_percent(
    misses: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answering, "misses", misses)
    monkeypatch.setattr(needles, "_Answers", Answering)
    arguments = tiny_model(), ENCODER, {"int8": Int8(CONFIG)}, "multi-key", 900
    score = measure_needles(*arguments, samples=4, seed=0)["int8"]
    assert (score.task, score.length, score.asked) == ("multi-key", 900, 4)
    if counted:
        assert sum(score.exact) == 20 - misses
        assert score.found == (4, 0, 0, 0, 0)
    else:
        assert score.exact == (0, 0, 1, 1, 1)  # the other contexts are not computed
        assert score.found is None
