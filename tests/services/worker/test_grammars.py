"""Compiled grammars of a worker: shared by a tenant, bounded, compiled beside the event loop."""

import asyncio
import time
from pathlib import Path

import pytest

from runtime.errors import InvalidRequest
from runtime.grammar.compiler import Grammar, compile_grammar
from runtime.grammar.spec import GrammarBounds, GrammarKind, GrammarSpec
from runtime.grammar.vocabulary import GrammarVocabulary
from services.common.model_source import resolve_model
from services.worker.grammars import Grammars
from services.worker.metrics import WorkerMetrics
from tests.runtime.grammar.schemas import hostile_schemas

SIZE, EOS = 49_152, (0, 2)


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[GrammarSpec]:
    """Constraints in the order in which they were compiled."""
    specs: list[GrammarSpec] = []

    def recorded(
        spec: GrammarSpec, vocabulary: GrammarVocabulary, bounds: GrammarBounds
    ) -> Grammar:
        specs.append(spec)
        return compile_grammar(spec, vocabulary, bounds)

    monkeypatch.setattr("services.worker.grammars.compile_grammar", recorded)
    return specs


def new(capacity: int = 8) -> Grammars:
    return Grammars(resolve_model("smollm2-135m"), SIZE, EOS, GrammarBounds(), capacity)


async def test_concurrent_requests_of_a_tenant_share_a_compilation(
    compiled: list[GrammarSpec],
) -> None:
    found = new()
    states = await asyncio.gather(*(found.start(regex("ab"), b"a", ()) for _ in range(5)))
    assert len({id(state) for state in states}) == 5
    assert compiled == [regex("ab")]
    await found.start(regex("ab"), b"b", ())
    assert compiled == [regex("ab")] * 2, "tenants do not share"
    found.close()


async def test_metrics_count_compilations_and_hits() -> None:
    found, metrics = new(), WorkerMetrics()
    for text in ("a", "a", "b", "a"):
        await found.start(regex(text), b"", ())
    with pytest.raises(InvalidRequest):
        await found.start(regex("("), b"", ())
    metrics.grammars.observe(found)
    metrics.grammars.observe(found)
    value = metrics.registry.get_sample_value
    assert value("headrace_worker_grammar_cache_hits_total") == 2
    assert value("headrace_worker_grammar_compile_seconds_count") == 3
    found.close()


async def test_least_recently_used_grammars_are_dropped(compiled: list[GrammarSpec]) -> None:
    found = new(capacity=8)
    for text in ("a", "b", "a", "c", "a", "b"):  # two at a time for one tenant
        await found.start(regex(text), b"a", ())
    assert [spec.text for spec in compiled] == ["a", "b", "c", "b"]
    await found.start(regex("x"), b"other", ())
    for text in ("d", "e", "f"):
        await found.start(regex(text), b"a", ())
    await found.start(regex("x"), b"other", ())
    assert [spec.text for spec in compiled][4:] == ["x", "d", "e", "f"], "others keep theirs"
    found.close()


async def test_state_follows_the_output_so_far() -> None:
    found = new()
    state = await found.start(regex("[a-z]{2} x"), b"", [81, 82])
    assert state.consumed == 2
    with pytest.raises(InvalidRequest, match="does not allow the output so far"):
        await found.start(regex("[0-9]+"), b"", [81, 82])
    with pytest.raises(InvalidRequest, match="unclosed group"):
        await found.start(regex("("), b"", ())
    with pytest.raises(InvalidRequest, match="unclosed group"):
        await found.start(regex("("), b"", ())
    found.close()


async def test_event_loop_does_not_wait_for_a_compilation() -> None:
    found = new()
    await found.start(regex("a"), b"", ())
    large = GrammarSpec(GrammarKind.JSON_SCHEMA, hostile_schemas()["many properties"])
    compiling = asyncio.create_task(found.start(large, b"", ()))
    begin, longest, last = time.monotonic(), 0.0, time.monotonic()
    while not compiling.done():
        await asyncio.sleep(0.001)
        longest = max(longest, time.monotonic() - last)
        last = time.monotonic()
    await asyncio.wait([compiling])
    assert longest < (last - begin) / 2, "it was blocked"
    found.close()


async def test_model_without_a_tokenizer_refuses_constraints(tmp_path: Path) -> None:
    found = Grammars(tmp_path, SIZE, EOS, GrammarBounds(), 8)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="cannot constrain output without a tokenizer"):
            await found.start(regex("a"), b"", ())
    found.close()
