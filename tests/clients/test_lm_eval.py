"""lm-eval: the same values with the deployment as with transformers."""

from typing import Any

import pytest

from services.common.model_source import resolve_model
from tests.clients.client import Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(2400)]

LM_EVAL = Client("lm-eval", "with_lm_eval")
TOLERANCE = {"rounded": 0.05, "transformers": 0.1}
"""Maximum difference of the log likelihood of an item, nats, from transformers in float32.

The workers keep KV in bfloat16. In `rounded`, transformers rounds it, too; in `transformers`, it
does not, which alone changes the item " Madrid" by 0.042.
"""


@pytest.fixture(scope="module")
def found(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Any:
    scratch = str(tmp_path_factory.mktemp("lm-eval"))
    variables = {
        "HEADRACE_SCRATCH": scratch,
        "HEADRACE_MODEL_FILE": str(resolve_model("smollm2-135m")),
        "HF_HOME": scratch,
    }
    return LM_EVAL.call(running, "evaluations", timeout_s=1200, **variables)


@pytest.mark.parametrize("peer", TOLERANCE)
def test_log_likelihoods_equal_those_of_transformers(found: Any, peer: str) -> None:
    items = found["log_likelihoods"]
    assert len(items["served"]) == len(items[peer]) == 5
    for served, expected in zip(items["served"], items[peer], strict=True):
        assert len(served) == len(expected) == 3
        for ((logprob, greedy),), ((peer_logprob, peer_greedy),) in zip(
            served, expected, strict=True
        ):
            assert abs(logprob - peer_logprob) <= TOLERANCE[peer]
            assert greedy == peer_greedy


def test_greedy_answers_equal_those_of_transformers(found: Any) -> None:
    assert len(found["generation"]["served"]) == 5
    assert found["generation"]["served"] == found["generation"]["transformers"]


def test_chats_are_answered(found: Any) -> None:
    assert len(found["chat"]) == 5
    assert all(answer for ((answer,),) in found["chat"])
