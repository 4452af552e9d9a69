"""Workloads from files: prompts, Mooncake traces and ShareGPT conversations."""

import json
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.workload.base import RequestSpec, Workload
from loadgen.workload.lengths import Uniform
from loadgen.workload.prompts import PromptWriter
from loadgen.workload.sharegpt import ShareGPT
from loadgen.workload.tokenizer import LocalTokenizer
from loadgen.workload.traces import MooncakeTrace, PromptFile
from services.common.model_source import resolve_model
from services.tokenizer.loading import load_tokenizer
from tests.loadgen.workloads import single


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    folder = tmp_path_factory.mktemp("smollm2")
    load_tokenizer(resolve_model("smollm2-135m")).save(folder)
    return LocalTokenizer(folder)


@pytest.fixture(scope="module")
def ids(tokenizer: LocalTokenizer) -> PromptWriter:
    return PromptWriter(tokenizer, token_ids=True)


@pytest.fixture(scope="module")
def texts(tokenizer: LocalTokenizer) -> PromptWriter:
    return PromptWriter(tokenizer, token_ids=False)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def lines(*rows: object) -> Path:
        path = tmp_path / "trace.jsonl"
        text = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
        return path

    return lines


def requests_of(workload: Workload, seed: int = 0) -> list[RequestSpec]:
    return list(workload.requests(seed))


def test_prompts_are_read_unchanged(write: Callable[..., Path], tokenizer: LocalTokenizer) -> None:
    path = write(
        {"prompt": "Blue water.", "output_tokens": 5},
        "",
        {"prompt": [5, 0, 9], "max_tokens": 7},
        {"prompt": "Été", "max_tokens": 9, "output_tokens": 2},
    )
    assert sorted(requests_of(PromptFile(path, tokenizer)), key=lambda ask: ask.output_tokens) == [
        RequestSpec("Été", len(tokenizer.encode("Été")), 2),
        RequestSpec("Blue water.", 3, 5),
        RequestSpec((5, 0, 9), 3, 7),
    ]


def test_prompts_without_times_are_shuffled_by_the_seed(
    write: Callable[..., Path], tokenizer: LocalTokenizer
) -> None:
    path = write(*({"prompt": f"number {i}", "output_tokens": 1} for i in range(40)))
    workload = PromptFile(path, tokenizer)
    orders = [[ask.prompt for ask in requests_of(workload, seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(map(str, orders[0])) == sorted(map(str, orders[2]))
    assert len(set(orders[0])) == 40


def test_prompts_with_times_are_sorted_and_start_at_zero(
    write: Callable[..., Path], tokenizer: LocalTokenizer
) -> None:
    times = [5_000, 1_500, 4_000.0, 1_500]
    path = write(
        *({"prompt": f"{i}", "max_tokens": 1, "timestamp": at} for i, at in enumerate(times))
    )
    made = requests_of(PromptFile(path, tokenizer), seed=3)
    assert [(ask.prompt, ask.at) for ask in made] == [("1", 0), ("3", 0), ("2", 2.5), ("0", 3.5)]


def test_missing_lengths_are_drawn(write: Callable[..., Path], tokenizer: LocalTokenizer) -> None:
    path = write(*({"prompt": "a"} for _ in range(50)), {"prompt": "b", "max_tokens": 1})
    made = requests_of(PromptFile(path, tokenizer, Uniform(10, 20)))
    assert {ask.output_tokens for ask in made if ask.prompt == "b"} == {1}
    drawn = {ask.output_tokens for ask in made if ask.prompt == "a"}
    assert drawn <= set(range(10, 21))
    assert len(drawn) > 5


MOONCAKE = [
    {"timestamp": 27482, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 30535, "input_length": 1100, "output_length": 26, "hash_ids": [46, 47, 49]},
    {"timestamp": 30535, "input_length": 700, "output_length": 0, "hash_ids": [46, 50]},
    {"timestamp": 31000, "input_length": 512, "output_length": 1, "hash_ids": [51]},
]


def test_mooncake_trace_has_its_times_and_lengths(
    write: Callable[..., Path], ids: PromptWriter, texts: PromptWriter, tokenizer: LocalTokenizer
) -> None:
    path = write(*MOONCAKE)
    for writer in (ids, texts):
        made = requests_of(MooncakeTrace(path, writer))
        assert [ask.at for ask in made] == pytest.approx([0, 3.053, 3.053, 3.518])
        assert [ask.input_tokens for ask in made] == [1200, 1100, 700, 512]
        assert [ask.output_tokens for ask in made] == [52, 26, 1, 1]
    for ask in made:
        assert len(tokenizer.encode(str(ask.prompt))) == ask.input_tokens


@st.composite
def hashed(draw: st.DrawFn) -> list[dict[str, object]]:
    """Return prompts that are paths in a tree of 16-token blocks, like real shared prefixes."""
    rows: list[dict[str, object]] = []
    for _ in range(draw(st.integers(2, 6))):
        path = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
        hash_ids = [int("1" + "".join(map(str, path[: i + 1])), 2) for i in range(len(path))]
        tokens = 16 * len(path) - draw(st.integers(0, 7))
        rows.append({"input_length": tokens, "output_length": 1, "hash_ids": hash_ids})
    return [row | {"timestamp": i} for i, row in enumerate(rows)]


@settings(max_examples=60)
@given(rows=hashed(), seed=st.integers(0, 9))
def test_blocks_are_equal_exactly_if_their_hash_ids_are(
    tmp_path_factory: pytest.TempPathFactory,
    ids: PromptWriter,
    rows: list[dict[str, object]],
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("hashed") / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    made = requests_of(MooncakeTrace(path, ids, block_tokens=16), seed)
    blocks: dict[int, tuple[int, ...]] = {}
    for ask, row in zip(made, rows, strict=True):
        assert isinstance(ask.prompt, tuple)
        assert isinstance(row["hash_ids"], list)
        assert len(ask.prompt) == row["input_length"]
        for i, hash_id in enumerate(row["hash_ids"]):
            block = ask.prompt[16 * i : 16 * i + 16]
            known = blocks.setdefault(hash_id, block)
            shorter = min(len(known), len(block))
            assert known[:shorter] == block[:shorter]
            blocks[hash_id] = max(known, block, key=len)
    for a, b in combinations(blocks.values(), 2):
        assert a[:9] != b[:9]


def test_another_seed_gives_blocks_other_words(
    write: Callable[..., Path], ids: PromptWriter
) -> None:
    trace = MooncakeTrace(write(*MOONCAKE), ids)
    assert requests_of(trace, 1) == requests_of(trace, 1)
    assert single(requests_of(trace, 1)[0])[:9] != single(requests_of(trace, 2)[0])[:9]


def test_cold_trace_and_its_variants_share_no_beginning(
    write: Callable[..., Path], ids: PromptWriter
) -> None:
    path = write(*MOONCAKE)
    plain = requests_of(MooncakeTrace(path, ids))
    cold = requests_of(MooncakeTrace(path, ids, cold=True))
    other = requests_of(MooncakeTrace(path, ids, variant=1))
    for changed in (cold, other):
        assert [one.input_tokens for one in changed] == [one.input_tokens for one in plain]
        starts = [{single(one)[:8] for one in requests} for requests in (changed, plain)]
        assert not starts[0] & starts[1]
    assert len({single(one)[:8] for one in cold}) == len(cold)
    assert single(cold[0])[512:] == single(plain[0])[512:], "other blocks are unchanged"


def test_prompts_without_hash_ids_share_no_blocks(
    write: Callable[..., Path], ids: PromptWriter
) -> None:
    rows = [{"timestamp": 0, "input_length": 20, "output_length": 1} for _ in range(30)]
    made = requests_of(MooncakeTrace(write(*rows), ids))
    assert len({single(ask)[:8] for ask in made}) == 30


def talk(*messages: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": said} for who, said in messages]}


def test_conversations_give_the_first_prompt_and_the_answers_length(
    tmp_path: Path, tokenizer: LocalTokenizer
) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(
        json.dumps(
            [
                talk(("human", "Blue?"), ("gpt", "one two three"), ("human", "x"), ("gpt", "y")),
                talk(("system", "Be kind."), ("user", "Green?"), ("assistant", "one")),
                talk(("gpt", "I go first"), ("human", "Red?"), ("gpt", "one two")),
                talk(("human", "nobody answers")),
                talk(("human", "twice"), ("human", "asked"), ("gpt", "late")),
                talk(("human", ""), ("gpt", "to nothing")),
                talk(("human", "silence"), ("gpt", "")),
                talk(),
            ]
        )
    )
    workload = ShareGPT(path, tokenizer)
    assert sorted(requests_of(workload), key=lambda ask: ask.output_tokens) == [
        RequestSpec("Green?", len(tokenizer.encode("Green?")), len(tokenizer.encode("one"))),
        RequestSpec("Red?", len(tokenizer.encode("Red?")), len(tokenizer.encode("one two"))),
        RequestSpec(
            "Blue?", len(tokenizer.encode("Blue?")), len(tokenizer.encode("one two three"))
        ),
    ]
    assert (
        len({tuple(ask.prompt for ask in requests_of(workload, seed)) for seed in range(20)}) == 6
    )


def test_answer_length_excludes_special_tokens(tmp_path: Path) -> None:
    class Framed:
        def encode(self, text: str) -> list[int]:
            return [1, *(len(word) + 10 for word in text.split()), *map(ord, text[:1]), 2]

        def decode(self, tokens: list[int]) -> str:
            raise AssertionError

    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([talk(("human", "Is it?"), ("gpt", "Yes it is"))]))
    assert requests_of(ShareGPT(path, Framed())) == [RequestSpec("Is it?", 5, 4)]


GOOD = {"prompt": "a", "output_tokens": 1, "input_length": 5, "output_length": 1}


def changed(**values: object) -> dict[str, object]:
    return GOOD | values


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (changed(prompt=None), "prompt is neither"),
        (changed(prompt=""), "prompt is neither"),
        (changed(prompt=[]), "prompt is not a non-empty list"),
        (changed(prompt=[1, "a"]), "not a non-negative integer"),
        (changed(prompt=[-1]), "not a non-negative integer"),
        (changed(prompt=[True]), "not a non-negative integer"),
        ({"prompt": "a"}, "neither output_tokens nor max_tokens"),
        (changed(output_tokens=0), "output_tokens is not"),
        (changed(output_tokens="5"), "output_tokens is not"),
        (changed(timestamp="now"), "timestamp is not a number"),
    ],
)
def test_invalid_line_of_prompts_is_named(
    write: Callable[..., Path], tokenizer: LocalTokenizer, line: object, message: str
) -> None:
    check_second_line_is_named(write(GOOD, line), message, lambda path: PromptFile(path, tokenizer))


def check_second_line_is_named(path: Path, message: str, read: Callable[[Path], object]) -> None:
    with pytest.raises(UsageError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (changed(input_length=0), "input_length is not"),
        (changed(input_length=5.5), "input_length is not"),
        (changed(output_length=-1), "output_length is not"),
        (changed(hash_ids="abc"), "hash_ids is not a non-empty list"),
        (changed(hash_ids=[-1]), "hash_ids has an item"),
        (changed(hash_ids=[1, 2]), "2 hash_ids do not match 5 tokens in blocks of 512"),
        (changed(timestamp=True), "timestamp is not a number"),
    ],
)
def test_invalid_line_of_a_mooncake_trace_is_named(
    write: Callable[..., Path], ids: PromptWriter, line: object, message: str
) -> None:
    check_second_line_is_named(write(GOOD, line), message, lambda path: MooncakeTrace(path, ids))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "not a list"),
        ("[", "not JSON"),
        ("[]", "no conversation"),
        ("[3]", "entry 0: not a JSON object"),
        ('[{"conversations": []}, {}]', "entry 1: conversations is not a list"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 0: a message"),
    ],
)
def test_invalid_conversation_is_named(
    tmp_path: Path, tokenizer: LocalTokenizer, content: str, message: str
) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(content)
    with pytest.raises(UsageError) as raised:
        ShareGPT(path, tokenizer)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_missing_empty_or_partly_timed_files_are_refused(
    tmp_path: Path, write: Callable[..., Path], tokenizer: LocalTokenizer
) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl cannot be read: No such file"):
        PromptFile(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(UsageError, match="no requests"):
        PromptFile(write(""), tokenizer)
    with pytest.raises(UsageError, match="only some requests have a timestamp"):
        PromptFile(write(GOOD, changed(timestamp=0)), tokenizer)


def test_prompts_are_tokenized_lazily(
    write: Callable[..., Path], tokenizer: LocalTokenizer
) -> None:
    class Counting:
        calls = 0

        def encode(self, text: str) -> list[int]:
            self.calls += 1
            return tokenizer.encode(text)

        def decode(self, tokens: list[int]) -> str:
            return tokenizer.decode(tokens)

    counting = Counting()
    path = write(*({"prompt": "a", "max_tokens": 1} for _ in range(500)))
    some: Iterator[RequestSpec] = PromptFile(path, counting).requests(0)
    assert counting.calls == 0
    next(some)
    assert 0 < counting.calls <= 32
