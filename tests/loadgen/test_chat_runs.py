"""Runs of chats against the synthetic server, which has a prefix cache."""

from pathlib import Path
from typing import Any

import pytest

from loadgen.files import read_run
from loadgen.record import Failure
from tests.loadgen.command import ANY_LAG, loadgen
from tests.loadgen.page_content import Content
from tests.loadgen.synthetic import Behaviour, Outcome, SyntheticServer, serving

SYSTEM, QUESTION, ANSWER, BLOCK = 64, 10, 6, 8
CHATS = (
    *("--turns", "fixed:3", "--prefix-tokens", f"{SYSTEM}", "--input", f"fixed:{QUESTION}"),
    *("--output", f"fixed:{ANSWER}", *ANY_LAG),
)
OPEN = ("--arrivals", "constant", "--rate", "10", "--requests", "5")
CLOSED = ("--concurrency", "2", "--requests", "5")


def play(server: SyntheticServer, folder: Path, *flags: str | Path) -> tuple[int, str]:
    return loadgen("run", server.url + "/v1", *CHATS, "--out", folder, *flags)


def turns_of(folder: Path) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = read_run(folder)[1]["turns"]
    return turns


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("load", [OPEN, CLOSED], ids=["open", "closed"])
@pytest.mark.parametrize(
    "prompts", [(), ("--token-ids",), ("--endpoint", "chat")], ids=["text", "token ids", "chat"]
)
def test_prompts_grow_by_answers_and_are_cached(
    tmp_path: Path, load: tuple[str, ...], prompts: tuple[str, ...]
) -> None:
    """The server's word tokenizer counts exactly what the history must have."""
    with serving(Behaviour(ttft_s=0.01, itl_s=0.002, prefix_cache=BLOCK)) as server:
        code, output = play(server, tmp_path, *load, *prompts)
        truths = server.log()
    assert code == 0, output
    records, summary = read_run(tmp_path)
    assert len(records) == len(truths) == 15
    lengths = [SYSTEM + QUESTION + turn * (ANSWER + QUESTION) for turn in range(3)]
    for record in records:
        assert record.succeeded
        assert record.input_tokens == lengths[record.turn - 1]
        if record.turn > 1:  # all of the previous turn, in whole blocks
            history = lengths[record.turn - 2] + ANSWER
            assert record.cached_tokens == history // BLOCK * BLOCK
    firsts = sorted(one.cached_tokens or 0 for one in records if one.turn == 1)
    assert firsts == [0, *(SYSTEM,) * 4]
    assert summary["lengths"]["input"]["asked"] == summary["lengths"]["input"]["counted"]
    window = summary["window"]
    assert summary["arrivals"] == pytest.approx(5 / (window["end"] - window["begin"]))
    assert [turn["turn"] for turn in summary["turns"]] == [1, 2, 3]
    assert [turn["sent"] for turn in summary["turns"]] == [5, 5, 5]
    assert [turn["input_tokens"] for turn in summary["turns"]] == lengths
    cached = sum(truth.cached_tokens or 0 for truth in truths)
    assert summary["cached"]["tokens"] == cached
    assert summary["cached"]["fraction"] == pytest.approx(cached / (5 * sum(lengths)))
    assert "of prompt tokens cached" in output
    page = (tmp_path / "report.html").read_text()
    content = Content(page)
    assert content.tile("Prompt tokens cached")[0].endswith("%")
    assert content.row("2")[1:4] == ["5", "0", "0"]
    assert content.row("2")[7] == f"{lengths[1]}"
    assert "Time to first token by turn" in page


@pytest.mark.slow
@pytest.mark.parametrize("ids", [False, True])
def test_chats_over_grpc(tmp_path: Path, ids: bool) -> None:
    """Token ids of answers become part of the next prompt."""
    with serving(Behaviour(ttft_s=0.01, prefix_cache=BLOCK)) as server:
        code, output = loadgen(
            "run", f"grpc://{server.grpc_target}", *CHATS, *OPEN, "--tokenizer-url", server.url,
            "--out", tmp_path, *(["--token-ids"] if ids else ["--endpoint", "chat"]),
        )  # fmt: skip
        truths = server.log()
    assert code == 0, output
    counts = sorted(truth.prompt_tokens for truth in truths)
    lengths = [SYSTEM + QUESTION + turn * (ANSWER + QUESTION) for turn in range(3)]
    assert counts == sorted(5 * lengths)
    cached = sum(truth.cached_tokens or 0 for truth in truths)
    assert read_run(tmp_path)[1]["cached"]["tokens"] == cached
    for record in read_run(tmp_path)[0]:
        if record.turn > 1:  # all of the previous turn, in whole blocks
            history = lengths[record.turn - 2] + ANSWER
            assert record.cached_tokens == history // BLOCK * BLOCK


@pytest.mark.slow
def test_cached_tokens_that_are_not_reported_are_named(tmp_path: Path) -> None:
    with serving(Behaviour()) as server:
        code, output = play(server, tmp_path, *OPEN)
    assert code == 0, output
    assert "not reported by the target" in output
    assert all(turn["cached"] is None for turn in turns_of(tmp_path))
    assert "Cached prompt tokens are not reported" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_failed_turn_ends_its_chat(tmp_path: Path) -> None:
    outcomes = (Outcome.OK, Outcome.STATUS_429, *(Outcome.OK,) * 20)
    with serving(Behaviour(outcomes=outcomes)) as server:
        code, output = play(server, tmp_path, "--concurrency", "1", "--requests", "3")
        received = len(server.log())
    assert code == 0, output
    records, summary = read_run(tmp_path)
    assert received == 8
    assert [one.failure for one in records if one.chat == 0] == [
        *(None, Failure.REJECTED, Failure.NOT_SENT)
    ]
    assert summary["outcomes"]["failed"] == {"rejected": 1, "not_sent": 1}
    assert [(one["sent"], one["failed"], one["not_sent"]) for one in turns_of(tmp_path)] == [
        *((3, 0, 0), (3, 1, 0), (2, 0, 1))
    ]
    assert "1 not sent after a failed turn" in output


@pytest.mark.slow
def test_chats_stay_on_their_replica(tmp_path: Path) -> None:
    behaviour = Behaviour(ttft_s=0.01, prefix_cache=BLOCK)
    with serving(behaviour) as one, serving(behaviour) as other:
        code, output = loadgen(
            "run", f"{one.url}/v1,{other.url}/v1", *CHATS, *OPEN, "--out", tmp_path
        )
        counts = [len(each.log()) for each in (one, other)]
    assert code == 0, output
    assert counts == [9, 6], "chats 0, 2, 4 and 1, 3"
    first = SYSTEM + QUESTION + ANSWER
    for record in read_run(tmp_path)[0]:
        if record.turn > 1:
            assert (record.cached_tokens or 0) >= first // BLOCK * BLOCK


@pytest.mark.slow
def test_cold_run_finds_nothing_in_the_cache(tmp_path: Path) -> None:
    with serving(Behaviour(prefix_cache=BLOCK)) as server:
        for run in ("first", "again"):
            code, output = play(server, tmp_path / run, *OPEN, "--cold")
            assert code == 0, output
            assert read_run(tmp_path / run)[1]["cached"]["tokens"] == 0
        play(server, tmp_path / "warm", *OPEN)
        summaries = [read_run(tmp_path / name)[1] for name in ("first", "warm")]
    assert summaries[1]["cached"]["fraction"] > 0.5
    assert summaries[0]["cached"]["input_tokens"] == summaries[1]["cached"]["input_tokens"]


@pytest.mark.slow
def test_rates_of_a_sweep_share_only_system_prompts(tmp_path: Path) -> None:
    with serving(Behaviour(prefix_cache=BLOCK)) as server:
        sweep = ("--rates", "10,11", "--requests", "4", "--seeds", "1")
        code, output = loadgen("sweep", server.url + "/v1", *CHATS, *sweep, "--out", tmp_path)
        assert code == 0, output
        single = ("--input", "fixed:5", "--output", "fixed:2", *ANY_LAG)
        loadgen("sweep", server.url + "/v1", *single, *sweep, "--out", tmp_path / "single")
    for record in read_run(tmp_path / "rate-11" / "seed-0")[0]:
        if record.turn == 1:
            assert record.cached_tokens == SYSTEM
    assert "11 chats per second" in output
    page = (tmp_path / "report.html").read_text()
    assert "offered, chats per second" in page
    assert "equal to offered" not in page, "throughput counts turns"
    code, output = loadgen("compare", tmp_path, tmp_path / "single")
    assert code == 2
    assert "only one of them plays chats" in output
    code, output = loadgen("compare", tmp_path, tmp_path)
    assert "11 chats per second" in output


@pytest.mark.slow
def test_shared_prefix_workload(tmp_path: Path) -> None:
    settings = tmp_path / "workload.yaml"
    settings.write_text(
        "num_groups: 2\nnum_prompts_per_group: 3\nsystem_prompt_len: 40\n"
        "question_len: 9\noutput_len: 4\n"
    )
    with serving(Behaviour(prefix_cache=BLOCK)) as server:
        code, output = loadgen(
            "run", server.url + "/v1", "--file", settings, "--format", "shared-prefix",
            *ANY_LAG, "--concurrency", "1", "--requests", "12", "--out", tmp_path,
        )  # fmt: skip
    assert code == 0, output
    records = read_run(tmp_path)[0]
    assert {(one.input_tokens, one.wanted_tokens, one.chat) for one in records} == {(49, 4, None)}
    hits = sorted(one.cached_tokens or 0 for one in records)
    assert hits == [0] * 2 + [40] * 4 + [48] * 6, "first of a group, other questions, second round"


@pytest.mark.slow
@pytest.mark.parametrize("load", [OPEN, CLOSED], ids=["open", "closed"])
def test_server_without_token_ids_ends_the_run_with_an_explanation(
    tmp_path: Path, load: tuple[str, ...]
) -> None:
    with serving(Behaviour(token_ids=False)) as server:
        code, output = play(server, tmp_path, *load, "--token-ids")
    assert code == 2, output
    assert f"{server.url}/v1 returns no token ids of answers" in output
    assert "omit --token-ids, or use a server that supports return_token_ids" in output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("ids", [False, True])
def test_reference_gets_the_same_history(tmp_path: Path, ids: bool) -> None:
    flags = (*OPEN, *(["--token-ids"] if ids else []))
    with serving(Behaviour()) as server, serving(Behaviour()) as reference:
        code, output = play(server, tmp_path, *flags, "--check-against", reference.url + "/v1")
        counts = sorted(truth.prompt_tokens for truth in reference.log())
    assert code == 0, output
    assert "15 equal" in output
    assert counts == sorted(one.input_tokens for one in read_run(tmp_path)[0])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--cancel", "0.5"), "--cancel is not supported with --turns"),
        (("--file", "x.jsonl"), "--file cannot be combined"),
        (("--turns", "8"), "not a length distribution"),
        (("--arrivals", "trace", "--requests", "2"), "workload with times"),
    ],
)
def test_unsupported_options_are_explained(
    tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    with serving(Behaviour()) as server:
        code, output = play(server, tmp_path, "--rate", "5", "--duration", "1", *flags)
    assert code == 2, output
    assert why in output


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--think", "2"), "give --turns"),
        (("--prefix-groups", "2"), "need --prefix-tokens"),
        (("--endpoint", "chat", "--token-ids"), "omit --token-ids"),
        (("--prefix-tokens", "9", "--prefix-skew", "11"), "must be 0 to 10"),
    ],
)
def test_options_without_their_subject_are_explained(flags: tuple[str, ...], why: str) -> None:
    with serving(Behaviour()) as server:
        code, output = loadgen(
            "run", server.url + "/v1", "--input", "fixed:4", "--output", "fixed:2", "--rate", "5",
            "--duration", "1", *flags,
        )  # fmt: skip
    assert code == 2, output
    assert why in output
