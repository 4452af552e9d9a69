"""KV of cached pages: bit for bit that of a prefill of their tokens, in every KV format."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from runtime.core.sequence import FREED
from runtime.engine import Add, Cancel, Engine
from runtime.kv.names import DENSE
from runtime.models.model import Model
from runtime.pages.prefix import PageHashes, root_hash
from tests.runtime.engine.by_hand import all_free
from tests.runtime.engine.test_prefixes import (
    FORMATS,
    PAGE,
    ROOT,
    cache_of,
    engine_of,
    model_of,
    play,
    request,
    script_of,
)
from tests.runtime.tiny import drive, prompt_of


def prefilled(model: Model, tokens: Sequence[int]) -> tuple[Engine, list[list[int]]]:
    """Prefill a prompt on a new engine; return it and the page table of each page group."""
    engine = engine_of(model, cache=False)
    held = drive(engine, Add(request("held", tokens), hold=True))
    tables: list[list[int]] = [[] for _ in engine.scheduler.pages.pools]
    for chunk in (chunk for step in held.steps for chunk in step.computed):
        pages = cache_of(engine).layout.plan.pages(chunk.first_token + chunk.num_tokens)
        for table, found in zip(tables, chunk.page_tables, strict=True):
            table += found
            table += [FREED] * (pages - len(table))
    return engine, tables


def check_cached_kv(engine: Engine, model: Model, tokens: Sequence[int]) -> int:
    """Check the cached pages of a prompt against those of a prefill; return their number."""
    cold, tables = prefilled(model, tokens)
    warm, expected = cache_of(engine), cache_of(cold)
    plan = warm.layout.plan
    hashes = PageHashes(root_hash(ROOT, b""), plan.page_size)
    contents = hashes.of(tokens, range(plan.full(len(tokens))))
    checked = 0
    for layer, planes in enumerate(warm.layout.layers):
        stored = zip(planes, warm.layer(layer), expected.layer(layer), strict=True)
        for plane, mine, theirs in stored:
            at = plan.groups.index(plane.group)
            for index, content in enumerate(contents):
                found = engine.scheduler.pages.pools[at].find([content])
                if found and index < len(tables[at]) and tables[at][index] != FREED:
                    ours = mine[found[0]].contiguous().view(torch.uint8)
                    assert torch.equal(
                        ours, theirs[tables[at][index]].contiguous().view(torch.uint8)
                    )
                    checked += 1
    return checked


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", FORMATS)
def test_cached_pages_have_the_kv_of_a_prefill(name: str, tmp_path: Path) -> None:
    """Also pages of chunks that followed reused ones, of preempted sequences and of answers."""
    model = model_of(name, tmp_path)
    checked = 0
    for seed, pages in ((4, 200), (5, 24)):
        script = script_of(model, seed, 60)
        engine = engine_of(model, pages=pages)
        warm = play(engine, script)
        added = [c.request for commands in script for c in commands if isinstance(c, Add)]
        for one in added[-8:]:
            choice = one.choices - 1
            tokens = [*one.tokens, *warm.output(one.id, choice), 0]
            checked += check_cached_kv(engine, model, tokens)
    assert checked > 100


@pytest.mark.parametrize("replay", [False, True])
def test_pages_of_cancelled_prompts_are_found_only_with_their_kv(replay: bool) -> None:
    """A prompt is cancelled after each number of steps, and then sent again."""
    model = model_of(DENSE)
    for steps in range(1, 7):
        engine, prompt = engine_of(model, replay=replay), prompt_of(150, seed=steps)
        engine.step([Add(request("cancelled", prompt))])
        for _ in range(steps - 1):
            engine.step([])
        engine.step([Cancel("cancelled")])
        check_cached_kv(engine, model, prompt)
        again = drive(engine, Add(request("again", prompt)))
        expected = drive(engine_of(model, cache=False), Add(request("again", prompt)))
        assert again.output("again") == expected.output("again")
        assert check_cached_kv(engine, model, prompt) == 4 * (len(prompt) // PAGE)
        assert all_free(engine)
