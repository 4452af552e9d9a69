"""Chats on workers of one and two ranks, whose second ranks run in processes of their own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.pages.prefix import root_hash
from tests.runtime.tiny import prompt_of
from tests.services.prefill.test_history import check_all_is_back
from tests.services.prompts import PAGE, ask, ids_of, value_of
from tests.services.transfer.test_two_ranks import OPTIONS, SLOTS, RankedWorker, ranked_workers
from tests.services.workers import Decode, Prefill, Site

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


async def play(prefill: Prefill, decode: Decode, seed: int) -> list[list[int]]:
    """Return the answers of a chat of three turns; the history of the last two is read."""
    prompt, answers = list(prompt_of(70, seed=seed)), []
    for turn in range(3):
        answer = await ask(decode, prefill, prompt)
        assert not answer.HasField("error"), answer.error
        assert answer.cached_tokens == (0, 80, 112)[turn]
        answers.append(ids_of(answer))
        prompt += [*answers[-1], *prompt_of(15, seed=turn)]
        await check_all_is_back(prefill, decode)
    return answers


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankedWorker]]:
    """Workers that keep prefixes; see `ranked_workers`."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ranked_workers(tmp_path, replace(OPTIONS, prefix_root=root_hash("ranks"))) as started:
        yield started


async def test_workers_of_one_and_two_ranks_read_history(
    workers: list[RankedWorker], site: Site
) -> None:
    """All pairs give the tokens of a worker that computes everything."""
    sizes: dict[str, Any] = {"slots": SLOTS, "codec": "splitzip", "prefix_cache": True}
    cold = RankedWorker.of_one(OPTIONS)
    prefills = [await site.prefill(ranks=each.ranks, **sizes) for each in workers[::2]]
    decodes = [await site.decode(ranks=each.ranks, **sizes) for each in workers[1::2]]
    alone = await site.decode(ranks=cold.ranks, codec="splitzip", colocated=True)
    for seed, (prefill, decode) in enumerate((p, d) for p in prefills for d in decodes):
        prompt = list(prompt_of(70, seed=seed))
        for turn, answer in enumerate(await play(prefill, decode, seed)):
            assert answer == ids_of(await ask(alone, None, prompt))
            prompt += [*answer, *prompt_of(15, seed=turn)]
    for prefill in prefills:
        assert value_of(prefill, "kv_history_tokens_total") == 2 * 2 * PAGE
