"""Files become the requests they describe, and a wrong line is named."""

import json
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.workload.base import Ask, Workload
from loadgen.workload.lengths import Uniform
from loadgen.workload.prompts import PromptWriter
from loadgen.workload.sharegpt import ShareGPT
from loadgen.workload.tokenizer import LocalTokenizer
from loadgen.workload.traces import MooncakeTrace, PromptFile
from services.common.model_source import resolve_model
from services.common.tokenizer import load_tokenizer


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


def asks(workload: Workload, seed: int = 0) -> list[Ask]:
    return list(workload.asks(seed))


def test_prompts_are_as_they_stand(write: Callable[..., Path], tokenizer: LocalTokenizer) -> None:
    path = write(
        {"prompt": "Blue water.", "output_tokens": 5},
        "",
        {"prompt": [5, 0, 9], "max_tokens": 7},
        {"prompt": "Été", "max_tokens": 9, "output_tokens": 2},
    )
    assert sorted(asks(PromptFile(path, tokenizer)), key=lambda ask: ask.output_tokens) == [
        Ask("Été", len(tokenizer.encode("Été")), 2),
        Ask("Blue water.", 3, 5),
        Ask((5, 0, 9), 3, 7),
    ]


def test_prompts_without_times_are_shuffled_by_the_seed(
    write: Callable[..., Path], tokenizer: LocalTokenizer
) -> None:
    path = write(*({"prompt": f"number {i}", "output_tokens": 1} for i in range(40)))
    workload = PromptFile(path, tokenizer)
    orders = [[ask.prompt for ask in asks(workload, seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(map(str, orders[0])) == sorted(map(str, orders[2]))
    assert len(set(orders[0])) == 40


def test_prompts_with_times_come_in_their_order_from_zero(
    write: Callable[..., Path], tokenizer: LocalTokenizer
) -> None:
    times = [5_000, 1_500, 4_000.0, 1_500]
    path = write(
        *({"prompt": f"{i}", "max_tokens": 1, "timestamp": at} for i, at in enumerate(times))
    )
    made = asks(PromptFile(path, tokenizer), seed=3)
    assert [(ask.prompt, ask.at) for ask in made] == [("1", 0), ("3", 0), ("2", 2.5), ("0", 3.5)]


def test_lines_without_a_length_get_one_that_is_drawn(
    write: Callable[..., Path], tokenizer: LocalTokenizer
) -> None:
    path = write(*({"prompt": "a"} for _ in range(50)), {"prompt": "b", "max_tokens": 1})
    made = asks(PromptFile(path, tokenizer, Uniform(10, 20)))
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


def test_a_mooncake_trace_has_its_times_and_lengths(
    write: Callable[..., Path], ids: PromptWriter, texts: PromptWriter, tokenizer: LocalTokenizer
) -> None:
    path = write(*MOONCAKE)
    for writer in (ids, texts):
        made = asks(MooncakeTrace(path, writer))
        assert [ask.at for ask in made] == pytest.approx([0, 3.053, 3.053, 3.518])
        assert [ask.input_tokens for ask in made] == [1200, 1100, 700, 512]
        assert [ask.output_tokens for ask in made] == [52, 26, 1, 1]
    for ask in made:
        assert len(tokenizer.encode(str(ask.prompt))) == ask.input_tokens


@st.composite
def hashed(draw: st.DrawFn) -> list[dict[str, object]]:
    """Prompts that are paths in a tree of blocks of 16 tokens, as real prefixes are."""
    rows: list[dict[str, object]] = []
    for _ in range(draw(st.integers(2, 6))):
        path = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
        hash_ids = [int("1" + "".join(map(str, path[: i + 1])), 2) for i in range(len(path))]
        tokens = 16 * len(path) - draw(st.integers(0, 7))
        rows.append({"input_length": tokens, "output_length": 1, "hash_ids": hash_ids})
    return [row | {"timestamp": i} for i, row in enumerate(rows)]


@settings(max_examples=60, deadline=None)
@given(rows=hashed(), seed=st.integers(0, 9))
def test_equal_hash_ids_are_equal_blocks_and_others_are_not(
    tmp_path_factory: pytest.TempPathFactory,
    ids: PromptWriter,
    rows: list[dict[str, object]],
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("hashed") / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    made = asks(MooncakeTrace(path, ids, block_tokens=16), seed)
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


def test_another_seed_fills_the_blocks_with_other_words(
    write: Callable[..., Path], ids: PromptWriter
) -> None:
    trace = MooncakeTrace(write(*MOONCAKE), ids)
    assert asks(trace, 1) == asks(trace, 1)
    assert asks(trace, 1)[0].prompt[:9] != asks(trace, 2)[0].prompt[:9]


def test_without_hash_ids_nothing_repeats(write: Callable[..., Path], ids: PromptWriter) -> None:
    rows = [{"timestamp": 0, "input_length": 20, "output_length": 1} for _ in range(30)]
    made = asks(MooncakeTrace(write(*rows), ids))
    assert len({ask.prompt[:8] for ask in made}) == 30


def talk(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": said} for who, said in turns]}


def test_conversations_give_their_first_question_and_the_answers_length(
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
    assert sorted(asks(workload), key=lambda ask: ask.output_tokens) == [
        Ask("Green?", len(tokenizer.encode("Green?")), len(tokenizer.encode("one"))),
        Ask("Red?", len(tokenizer.encode("Red?")), len(tokenizer.encode("one two"))),
        Ask("Blue?", len(tokenizer.encode("Blue?")), len(tokenizer.encode("one two three"))),
    ]
    assert len({tuple(ask.prompt for ask in asks(workload, seed)) for seed in range(20)}) == 6


def test_an_answer_is_counted_without_what_is_put_around_a_prompt(tmp_path: Path) -> None:
    class Framed:
        def encode(self, text: str) -> list[int]:
            return [1, *(len(word) + 10 for word in text.split()), *map(ord, text[:1]), 2]

        def decode(self, tokens: list[int]) -> str:
            raise AssertionError

    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([talk(("human", "Is it?"), ("gpt", "Yes it is"))]))
    assert asks(ShareGPT(path, Framed())) == [Ask("Is it?", 5, 4)]


GOOD = {"prompt": "a", "output_tokens": 1, "input_length": 5, "output_length": 1}


def changed(**values: object) -> dict[str, object]:
    return GOOD | values


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (changed(prompt=None), "prompt is neither"),
        (changed(prompt=""), "prompt is neither"),
        (changed(prompt=[]), "prompt is not a list with"),
        (changed(prompt=[1, "a"]), "not a whole number"),
        (changed(prompt=[-1]), "not a whole number"),
        (changed(prompt=[True]), "not a whole number"),
        ({"prompt": "a"}, "neither output_tokens nor max_tokens"),
        (changed(output_tokens=0), "output_tokens is not"),
        (changed(output_tokens="5"), "output_tokens is not"),
        (changed(timestamp="now"), "timestamp is not a number"),
    ],
)
def test_names_the_wrong_line_of_prompts(
    write: Callable[..., Path], tokenizer: LocalTokenizer, line: object, says: str
) -> None:
    names_the_second_line(write(GOOD, line), says, lambda path: PromptFile(path, tokenizer))


def names_the_second_line(path: Path, says: str, read: Callable[[Path], object]) -> None:
    with pytest.raises(UsageError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (changed(input_length=0), "input_length is not"),
        (changed(input_length=5.5), "input_length is not"),
        (changed(output_length=-1), "output_length is not"),
        (changed(hash_ids="abc"), "hash_ids is not a list"),
        (changed(hash_ids=[-1]), "hash_ids has something"),
        (changed(hash_ids=[1, 2]), "2 hash_ids do not make 5 tokens in blocks of 512"),
        (changed(timestamp=True), "timestamp is not a number"),
    ],
)
def test_names_the_wrong_line_of_a_mooncake_trace(
    write: Callable[..., Path], ids: PromptWriter, line: object, says: str
) -> None:
    names_the_second_line(write(GOOD, line), says, lambda path: MooncakeTrace(path, ids))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "not a list"),
        ("[", "not JSON"),
        ("[]", "no conversation"),
        ("[3]", "entry 0: not a JSON object"),
        ('[{"conversations": []}, {}]', "entry 1: no list of conversations"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 0: a turn"),
    ],
)
def test_names_the_wrong_entry_of_conversations(
    tmp_path: Path, tokenizer: LocalTokenizer, content: str, says: str
) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(content)
    with pytest.raises(UsageError) as raised:
        ShareGPT(path, tokenizer)
    assert str(path) in str(raised.value)
    assert says in str(raised.value)


def test_refuses_files_that_are_missing_empty_or_half_timed(
    tmp_path: Path, write: Callable[..., Path], tokenizer: LocalTokenizer
) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl cannot be read: No such file"):
        PromptFile(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(UsageError, match="no requests"):
        PromptFile(write(""), tokenizer)
    with pytest.raises(UsageError, match="some have none"):
        PromptFile(write(GOOD, changed(timestamp=0)), tokenizer)


def test_prompts_are_counted_only_as_they_are_asked_for(
    write: Callable[..., Path], tokenizer: LocalTokenizer
) -> None:
    class Counting:
        asked = 0

        def encode(self, text: str) -> list[int]:
            self.asked += 1
            return tokenizer.encode(text)

        def decode(self, tokens: list[int]) -> str:
            return tokenizer.decode(tokens)

    counting = Counting()
    path = write(*({"prompt": "a", "max_tokens": 1} for _ in range(500)))
    some: Iterator[Ask] = PromptFile(path, counting).asks(0)
    assert counting.asked == 0
    next(some)
    assert 0 < counting.asked <= 32
