"""Chats whose later turns the decode workers compute themselves, because they have the history."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tests.harness.reference import Case, cases, next_turn
from tests.harness.trial import Trial, trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

COMPUTED = "headrace_worker_prompts_computed_here_total"
SENT = "headrace_kv_sent_tokens_total"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """One prefill worker, and two decode workers that compute up to 64 tokens at a time."""
    folder = tmp_path_factory.mktemp("points")
    environment = {"HEADRACE_DECODE_COMPUTE_TOKENS": "64"}
    with trial(folder, "--decode", "2", environment=environment) as running:
        yield running


async def known_to_both(deployment: Trial, case: Case) -> None:
    """Send a request until both decode workers have answered it, and so have its KV."""
    streams = "headrace_worker_streams_total"
    before = {
        name: deployment.running.metric(name, streams) for name in deployment.workers("decode")
    }
    async with deployment.client(reuses=True) as client:
        while any(deployment.running.metric(name, streams) == n for name, n in before.items()):
            for reply in [client.ask(case) for _ in range(2)]:
                await reply.check()
    await asyncio.to_thread(deployment.running.wait_until_idle)


async def test_later_turns_need_no_prefill_worker(chats: Trial) -> None:
    case = chats.long
    await known_to_both(chats, case)
    sent, computed = chats.sum_of("prefill", SENT), chats.sum_of("decode", COMPUTED)
    async with chats.client(reuses=True) as client:
        for _ in range(3):
            case = next_turn(case, new_tokens=20, max_tokens=12)
            await client.ask(case).check()
            await known_to_both(chats, case)
    assert chats.sum_of("decode", COMPUTED) >= computed + 3
    assert chats.sum_of("prefill", SENT) < sent + 3 * 600
    await chats.check_recovered()


async def test_prompts_beyond_the_limit_are_fetched(chats: Trial) -> None:
    """Twelve chats continue at the same time; all answers equal those of a cold worker."""
    first = cases("chats", 12, 200, 8)
    later = [next_turn(case, new_tokens=25, max_tokens=12) for case in first]
    for case in first:
        await known_to_both(chats, case)
    before = chats.sum_of("decode", COMPUTED)
    async with chats.client(reuses=True) as client:
        replies = [client.ask(case) for case in later]
        for reply in replies:
            await reply.check()
    assert before < chats.sum_of("decode", COMPUTED) < before + 12
    await chats.check_recovered()


@pytest.mark.parametrize("tokens", [0, 5])
async def test_decode_worker_killed_in_a_turn_that_it_computes(chats: Trial, tokens: int) -> None:
    first = cases(f"killed {tokens}", 1, 300, 8)[0]
    await known_to_both(chats, first)
    case = next_turn(first, new_tokens=20, max_tokens=30)
    before = {name: chats.running.metric(name, COMPUTED) for name in chats.workers("decode")}
    chats.points.hold("computing", chats.workers("decode"), after=tokens)
    async with chats.client(reuses=True) as client:
        reply = client.ask(case)
        victim = await chats.points.reached("computing")
        assert chats.running.metric(victim, COMPUTED) == before[victim] + 1
        chats.signal(victim, signal.SIGKILL)
        chats.points.release()
        await reply.check()
    await chats.check_recovered(victim)
