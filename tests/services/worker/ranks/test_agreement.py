"""Facts that must be equal on all ranks of a worker, and the gauges of each rank."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.pages.plan import PageCount
from services.common.errors import SettingsError
from services.decode.service import DecodeWorker
from services.decode.settings import DecodeSettings
from services.transfer.agent import TransferAgent
from services.worker.peers import RankFacts
from services.worker.ranks.followers import Followers
from tests.services.workers import load


def followers_of(*facts: RankFacts) -> tuple[Followers, list[object]]:
    """Return followers that have loaded their part of the model, and what is sent to them."""
    sent: list[object] = []

    def rank(number: int, own: RankFacts) -> Any:
        return SimpleNamespace(rank=number, receive=lambda _: own, send=sent.append)

    followers = Followers()
    followers.ranks = tuple(rank(number, own) for number, own in enumerate(facts, 1))
    return followers, sent


def test_all_ranks_get_the_least_pages_of_each_group_and_the_smallest_slots() -> None:
    """GPUs of one type may report a few MiB more or less memory."""
    facts = load().rank.facts
    one, two, three = (
        replace(
            facts,
            pages=PageCount(*pages),
            sizes=replace(facts.sizes, slot_bytes=slot_bytes),
            weight_bytes=weight_bytes,
        )
        for pages, slot_bytes, weight_bytes in (
            ((9, 40), 3 << 20, 1),
            ((12, 30), 2 << 20, 2),
            ((10, 50), 4 << 20, 3),
        )
    )
    followers, sent = followers_of(two, three)
    agreed = followers.agree(one)
    assert (agreed.pages, agreed.sizes.slot_bytes) == (PageCount(9, 30), 2 << 20)
    assert agreed.weight_bytes == 1
    assert sent == [agreed] * 2
    assert three.within(agreed) == replace(agreed, weight_bytes=3)


def test_only_rank_keeps_its_facts() -> None:
    facts = load().rank.facts
    assert Followers().agree(facts) == facts


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("compatibility", "model_hash", "another"),
        ("compatibility", "codebook_id", "another"),
        ("sizes", "slots", 3),
    ],
)
def test_rank_that_differs_is_refused(part: str, name: str, value: object) -> None:
    facts = load().rank.facts
    own: Any = getattr(facts, part)
    changes = {name: value}
    other = own.model_copy(update=changes) if part == "compatibility" else replace(own, **changes)
    followers, sent = followers_of(facts, replace(facts, **{part: other}))
    with pytest.raises(SettingsError, match=f"rank 2 differs: its {name} is {value!r}, not"):
        followers.agree(facts)
    assert not sent


def test_rank_with_other_kernels_is_refused_with_what_differs() -> None:
    facts = load().rank.facts
    compatibility = facts.compatibility.model_copy(update={"kernel_plan_hash": "another"})
    other = replace(facts, compatibility=compatibility, kernels={"matmul": "packed"})
    followers, _ = followers_of(other)
    message = "^rank 1 differs: its matmul of kernels is 'packed', not 'dense'$"
    with pytest.raises(SettingsError, match=message):
        followers.agree(facts)


async def test_gauges_name_the_rank() -> None:
    loaded = load()
    followers = Followers()
    follower: Any = SimpleNamespace(rank=1, weight_bytes=7, device_bytes=5)
    followers.ranks = (follower,)
    agent = TransferAgent("gauges")
    try:
        endpoint = loaded.rank.new_endpoint(agent)
        loaded = replace(loaded, followers=followers)
        worker = DecodeWorker(DecodeSettings.model_validate({}), loaded, (endpoint,))
        value = worker.metrics.registry.get_sample_value
        name = "headrace_worker_{}_bytes".format
        assert value(name("weight"), {"rank": "0"}) == 1 << 20
        assert value(name("weight"), {"rank": "1"}) == 7
        assert value(name("device"), {"rank": "0"}) == 0
        assert value(name("device"), {"rank": "1"}) == 5
    finally:
        agent.close()
