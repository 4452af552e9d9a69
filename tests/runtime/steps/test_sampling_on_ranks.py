"""Steps of several ranks, each of which has the logits of some tokens only.

Each rank computes the whole model, so that the logits are bitwise equal to those of one rank.
"""

from dataclasses import replace

import pytest

from runtime.engine import Add, Command
from runtime.layers.vocabulary import Vocabulary
from runtime.models.model import Model
from runtime.parallel.group import RankGroup
from runtime.parallel.partition import Partition
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.steps.scripts import SAMPLINGS, Watch, engine_of, play, request
from tests.runtime.tiny import Record


def part_of(model: Model, group: RankGroup) -> Model:
    """Return a model with the same layers whose ranks divide the logits."""
    partition = Partition.of(model.config, group.rank, group.size)
    own, head = partition.token_rows, model.lm_head
    vocabulary = Vocabulary.of(model.config.vocab_size, partition, group)
    return replace(model, lm_head=lambda x: head(x)[:, own], vocabulary=vocabulary)


def script() -> list[list[Command]]:
    """Every kind of sampling, in running and in held sequences. Two kinds have unresolved draws."""
    kinds = range(len(SAMPLINGS))
    running: list[list[Command]] = [[Add(request(kind, 5 + kind, 12, kind, 2))] for kind in kinds]
    longest: list[list[Command]] = [[], [Add(request(20, 9, 40, 0, 1))]]
    held: list[list[Command]] = [
        [Add(request(50 + kind, 20 + kind, 3, kind, 2), hold=True)] for kind in kinds
    ]
    return running + longest + held


def run(model: Model, *, replay: bool) -> tuple[Record, int]:
    """Return the output, and the number of draws that were repeated."""
    engine = engine_of(model, 40, 7, replay=replay)
    if not replay:
        return play(engine, script()), 0
    with Watch().over(engine) as watch:
        return play(engine, script()), watch.unresolved


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("replay", [False, True], ids=["direct", "replay"])
def test_ranks_sample_the_tokens_of_one_rank(model: Model, size: int, replay: bool) -> None:
    expected, unresolved = run(model, replay=replay)
    assert not replay or unresolved > 10

    def rank(group: ThreadGroup) -> tuple[Record, int]:
        return run(part_of(model, group), replay=replay)

    first, *others = on_ranks(size, rank)
    assert all(other == first for other in others)
    found, repeated = first
    assert repeated == unresolved
    assert found.tokens.keys() == expected.tokens.keys()
    for name, tokens in expected.tokens.items():
        for mine, one in zip(found.tokens[name], tokens, strict=True):
            assert mine.token == one.token, (name, one.index)
            assert mine.logprob == pytest.approx(one.logprob, abs=1e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in one.top]
