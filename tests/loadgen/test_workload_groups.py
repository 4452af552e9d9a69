"""Groups of prompts with a common system prompt, configured as in inference-perf."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from loadgen.errors import UsageError
from loadgen.workload.groups import PrefixGroups
from loadgen.workload.prompts import PromptWriter
from loadgen.workload.tokenizer import LocalTokenizer
from services.common.model_source import resolve_model
from services.tokenizer.loading import load_tokenizer
from tests.loadgen.workloads import single

SETTINGS = {
    "num_groups": 3,
    "num_prompts_per_group": 4,
    "system_prompt_len": 60,
    "question_len": 20,
    "output_len": 7,
}
YAML = """
data:
  type: shared_prefix
  shared_prefix:
    num_unique_system_prompts: 3
    num_users_per_system_prompt: 4
    system_prompt_len: 60
    question_len: 20
    output_len: 7
    enable_multi_turn_chat: false
load:
  type: constant
"""


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, PromptWriter]:
    folder = tmp_path_factory.mktemp("smollm2")
    load_tokenizer(resolve_model("smollm2-135m")).save(folder)
    tokenizer = LocalTokenizer(folder)
    return {ids: PromptWriter(tokenizer, token_ids=ids) for ids in (False, True)}


def read(folder: Path, text: str, writer: PromptWriter, **options: Any) -> PrefixGroups:
    path = folder / "workload.yaml"
    path.write_text(text)
    return PrefixGroups.read(path, writer, **options)


@pytest.mark.parametrize("text", [json.dumps(SETTINGS), YAML])
def test_each_group_shares_its_system_prompt(
    tmp_path: Path, writers: dict[bool, PromptWriter], text: str
) -> None:
    groups = read(tmp_path, text, writers[True])
    asks = list(islice(groups.requests(0), 24))
    assert {(one.input_tokens, one.output_tokens) for one in asks} == {(80, 7)}
    assert all(len(single(one)) == 80 for one in asks)
    first, second = ([single(one) for one in asks[part]] for part in (slice(12), slice(12, 24)))
    assert len(set(first)) == 12
    assert sorted(Counter(prompt[:60] for prompt in first).values()) == [4, 4, 4]
    assert set(first) == set(second), "the second round repeats the prompts"
    assert first != second, "in another order"


def test_texts_have_the_lengths(tmp_path: Path, writers: dict[bool, PromptWriter]) -> None:
    groups = read(tmp_path, YAML, writers[False])
    asks = list(islice(groups.requests(0), 12))
    assert {one.input_tokens for one in asks} == {80}
    assert len({one.prompt for one in asks}) == 12


def test_cold_prompts_share_no_beginning_and_variants_no_questions(
    tmp_path: Path, writers: dict[bool, PromptWriter]
) -> None:
    cold = read(tmp_path, YAML, writers[True], cold=True)
    starts = [single(one)[:8] for one in islice(cold.requests(0), 24)]
    assert len(set(starts)) == 24
    plain, other = (read(tmp_path, YAML, writers[True], variant=variant) for variant in (0, 1))
    asked = [
        {single(one) for one in islice(workload.requests(0), 12)} for workload in (plain, other)
    ]
    assert not asked[0] & asked[1]
    assert {one[:60] for one in asked[0]} == {one[:60] for one in asked[1]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_groups": 0}, "num_groups is not an integer of at least 1"),
        ({"output_len": None}, "output_len is not an integer"),
        ({"question_len": {"mean": 4}}, "question_len is not an integer"),
        ({"system_prompt_len": 10**9}, "more than"),
        ({"enable_multi_turn_chat": True}, "--turns"),
        ({"question_distribution": {"mean": 50}}, "not supported: question_distribution"),
    ],
)
def test_unsupported_settings_are_named(
    tmp_path: Path, writers: dict[bool, PromptWriter], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, json.dumps(SETTINGS | changed), writers[True])


@pytest.mark.parametrize("text", ["- a list", "data: {shared_prefix: 3}", "{", ""])
def test_invalid_file_is_named(
    tmp_path: Path, writers: dict[bool, PromptWriter], text: str
) -> None:
    with pytest.raises(UsageError, match=r"workload\.yaml"):
        read(tmp_path, text, writers[True])
