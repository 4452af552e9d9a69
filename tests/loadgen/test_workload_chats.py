"""Generated chats: lengths as counted by the target's tokenizer, shared system prompts, salts."""

from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from loadgen.workload.base import Dialogue, RequestSpec, Role, Text
from loadgen.workload.chats import Chats
from loadgen.workload.lengths import Fixed, Uniform
from loadgen.workload.prefix import SALT_TOKENS, SharedPrefix
from loadgen.workload.prompts import PromptWriter
from loadgen.workload.tokenizer import LocalTokenizer
from services.common.model_source import resolve_model
from services.tokenizer.loading import load_tokenizer

SYSTEM = SharedPrefix(tokens=200, groups=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    folder = tmp_path_factory.mktemp("smollm2")
    load_tokenizer(resolve_model("smollm2-135m")).save(folder)
    return LocalTokenizer(folder)


def some(
    tokenizer: LocalTokenizer, count: int, *, seed: int = 0, token_ids: bool = False, **fields: Any
) -> list[RequestSpec]:
    writer = PromptWriter(tokenizer, token_ids=token_ids)
    given = {"prefix": SYSTEM, **fields}
    chats = Chats(Uniform(1, 5), Uniform(20, 60), Uniform(1, 9), writer, **given)
    return list(islice(chats.requests(seed), count))


def dialogue(spec: RequestSpec) -> Dialogue:
    assert isinstance(spec.prompt, Dialogue)
    return spec.prompt


def played(spec: RequestSpec, answer: Text) -> list[Dialogue]:
    """Return the prompts of all turns, if each answer is the same."""
    prompts = [dialogue(spec)]
    for turn in spec.later or ():
        prompts.append(prompts[-1].continued(answer, turn))
    return prompts


def tokens_of(tokenizer: LocalTokenizer, prompt: Text) -> int:
    return len(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)


@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("cold", [False, True])
def test_each_turn_has_the_drawn_length(
    tokenizer: LocalTokenizer, token_ids: bool, cold: bool
) -> None:
    answer = tuple(tokenizer.encode(" water and stone")) if token_ids else " water and stone"
    for chat in some(tokenizer, 20, token_ids=token_ids, cold=cold):
        lengths = [tokens_of(tokenizer, one.joined) for one in played(chat, answer)]
        assert lengths[0] == chat.input_tokens
        assert 220 <= lengths[0] <= 260
        for turn, before, after in zip(chat.later or (), lengths, lengths[1:], strict=False):
            assert after == before + 3 + turn.input_tokens
            assert 20 <= turn.input_tokens <= 60
            assert 1 <= turn.output_tokens <= 9
    assert {len(chat.later or ()) for chat in some(tokenizer, 40)} == {0, 1, 2, 3, 4}


def test_prompts_of_messages_and_joined_prompts_have_the_same_texts(
    tokenizer: LocalTokenizer,
) -> None:
    (chat,) = [one for one in some(tokenizer, 40) if len(one.later or ()) == 4][:1]
    last = played(chat, " An answer.")[-1]
    roles = [Role.SYSTEM, *(Role.USER, Role.ASSISTANT) * 4, Role.USER]
    assert [role for role, _ in last.texts] == roles
    assert last.joined == " ".join(text.strip() for _, text in last.texts)


@pytest.mark.parametrize("token_ids", [False, True])
def test_history_is_a_prefix_of_the_next_turn(tokenizer: LocalTokenizer, token_ids: bool) -> None:
    answer: Text = (5, 6, 7) if token_ids else ", or not?\n"
    for chat in some(tokenizer, 10, token_ids=token_ids):
        prompts = [one.joined for one in played(chat, answer)]
        for before, after in pairwise(prompts):
            expected = (*before, *answer) if token_ids else f"{before!s}{answer!s}"
            assert after[: len(expected)] == expected


def test_chats_share_system_prompts_and_nothing_else(tokenizer: LocalTokenizer) -> None:
    systems: dict[Text, list[Text]] = {}
    for chat in some(tokenizer, 30):
        system, user = dialogue(chat).messages
        systems.setdefault(system.content, []).append(user.content)
    assert len(systems) == 2
    assert len({user for users in systems.values() for user in users}) == 30


def test_variants_have_the_same_lengths_and_system_prompts_but_other_messages(
    tokenizer: LocalTokenizer,
) -> None:
    first, same, other = (some(tokenizer, 8, variant=variant) for variant in (0, 0, 1))
    assert first == same
    for a, b in zip(first, other, strict=True):
        assert (a.input_tokens, a.output_tokens) == (b.input_tokens, b.output_tokens)
        assert dialogue(a).messages[0] == dialogue(b).messages[0]
        assert dialogue(a).messages[1] != dialogue(b).messages[1]


@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("prefix", [SYSTEM, None])
def test_each_cold_request_begins_with_other_words(
    tokenizer: LocalTokenizer, token_ids: bool, prefix: SharedPrefix | None
) -> None:
    """Two equal seeds are two runs: a salt is in neither of them."""
    answer: Text = (5,) if token_ids else " yes"
    plain = some(tokenizer, 8, token_ids=token_ids, prefix=prefix)
    runs = [some(tokenizer, 8, token_ids=token_ids, prefix=prefix, cold=True) for _ in range(2)]
    for chats in runs:
        assert [chat.input_tokens for chat in chats] == [chat.input_tokens for chat in plain]
    starts = []
    for chat in runs[0] + runs[1]:
        for one in played(chat, answer):
            ids = one.joined if token_ids else tuple(tokenizer.encode(str(one.joined)))
            starts.append(ids[:8])
    assert len(set(starts)) == len(starts)
    assert SALT_TOKENS >= 8


def test_special_tokens_are_counted_once(tmp_path: Path) -> None:
    load_tokenizer(resolve_model("smollm2-135m")).save(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair=None, special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    with_bos = LocalTokenizer(tmp_path)
    for token_ids in (False, True):
        for chat in some(with_bos, 5, token_ids=token_ids):
            prompt = chat.prompt.joined if isinstance(chat.prompt, Dialogue) else ""
            assert tokens_of(with_bos, prompt) == chat.input_tokens
            assert token_ids == (prompt[0] == 1)


def test_think_times_are_exponential_with_the_given_mean(tokenizer: LocalTokenizer) -> None:
    writer = PromptWriter(tokenizer, token_ids=True)
    chats = Chats(Fixed(101), Fixed(2), Fixed(1), writer, think_s=3.0)
    (chat,) = islice(chats.requests(0), 1)
    thinks = [turn.think_s for turn in chat.later or ()]
    assert len(thinks) == 100
    assert 2.0 < sum(thinks) / 100 < 4.0, "a standard error is 0.3"
    assert max(thinks) > 6.0
