"""Reused encodings: always those of the whole text, and only for texts with the same salt."""

import json
import unicodedata
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from runtime.pages.recent import Recent
from services.common.model_source import resolve_model
from services.common.token_ids import pack_tokens
from services.tokenizer import gguf_splits
from services.tokenizer.content_guard import ContentGuard
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.pieces import byte_level_pieces
from services.tokenizer.prefix_encoder import MIN_CHARS, PrefixEncoder
from services.tokenizer.text_breaks import has_breaks, last_break
from services.tokenizer.tokenizer import Tokenizer

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
CORPUS = README + "日本語のテキスト。世界、你好，再见 🎈 don't IT'LL 1234567\n \n\t" * 20
BASE = (README * 3)[:MIN_CHARS]
SALT = b""

FRAGMENTS = st.sampled_from(
    [
        *(" ", "  ", "\n", "\r\n", "\n \n  ", "\t", " " * 40, "\n" * 9, "\u00a0", "\u3000", "\x1c"),
        *("a", "abc", "ABC", "Foo", "'s", "'RE", "'", "don't ", "x y ", "1", "123456", "٣٤٥"),
        *(
            "é",
            "e\u0301",
            "\u0301",
            "ü ",
            "日",
            "日本 ",
            "世界、",
            "再见。",
            "你好，",
            "です",
            "한국 ",
        ),
        *("!", "/", "!\n/\n", "_x", "-", "</", "😀", "👩\u200d👧", "\u0378", "\U00040000"),
        *("<|im_end|>", "<|im_", "end|>", "<|im_start|>user\n", "<tool>", "<", "|", "\ufdd0", "0"),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=20).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


def train(sequence: tuple[str, ...] = (gguf_splits.GPT_2,)) -> Backend:
    """Return a byte-level BPE with added tokens, which splits by the expressions."""
    backend = Backend(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in sequence]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS], trainer)
    backend.add_tokens([AddedToken(text, normalized=True) for text in ("<tool>", "  ", "ab")])
    return backend


BACKENDS = {sequence: train(sequence) for sequence in sorted(gguf_splits.SEQUENCES)}


def with_nfc() -> Backend:
    backend = train()
    backend.normalizer = normalizers.NFC()
    return backend


NFC = with_nfc()


def encoder(backend: Backend) -> PrefixEncoder:
    return PrefixEncoder(backend, byte_level_pieces(backend), Recent(), "")


def whole(backend: Backend, text: str, add_special: bool = False) -> "array[int]":
    return array("I", backend.encode(text, add_special_tokens=add_special).ids)


def words(backend: Backend, text: str) -> list[str]:
    assert backend.pre_tokenizer is not None
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that were given to the tokenizer."""
    texts: list[str] = []
    encode = PrefixEncoder._encode

    def spy(self: PrefixEncoder, text: str, add_special: bool) -> list[int]:
        texts.append(text)
        return encode(self, text, add_special)

    monkeypatch.setattr(PrefixEncoder, "_encode", spy)
    return texts


@pytest.mark.few(3)
@pytest.mark.parametrize("sequence", BACKENDS, ids=lambda sequence: sequence[-1][:30])
@settings(deadline=None)
@given(text=TEXTS)
def test_encoding_starts_anew_at_each_break(sequence: tuple[str, ...], text: str) -> None:
    backend = BACKENDS[sequence]
    assert has_breaks(backend)
    ids, data = whole(backend, text), text.encode()
    for at in {last_break(data, end) for end in range(len(data) + 1)}:
        before, after = data[:at].decode(), data[at:].decode()
        assert ids == whole(backend, before) + whole(backend, after)
        assert words(backend, text) == words(backend, before) + words(backend, after)


@pytest.mark.few(3)
@pytest.mark.parametrize("sequence", BACKENDS, ids=lambda sequence: sequence[-1][:30])
@settings(deadline=None, max_examples=30)
@given(shared=TEXTS, rests=st.lists(TEXTS, min_size=2, max_size=5))
def test_ids_are_those_of_the_whole_text(
    sequence: tuple[str, ...], shared: str, rests: list[str]
) -> None:
    backend = BACKENDS[sequence]
    tested = encoder(backend)
    for rest in rests:
        text = BASE + shared + rest
        assert tested.encode(text, add_special=False, salt=SALT) == whole(backend, text)


@settings(deadline=None, max_examples=60)
@given(shared=TEXTS, rests=st.lists(TEXTS, min_size=2, max_size=5), parse=st.booleans())
def test_packaged_tokenizer_encodes_as_without_reuse(
    tokenizer: Tokenizer, shared: str, rests: list[str], parse: bool
) -> None:
    for rest in rests:
        text = BASE + shared + rest
        expected = tokenizer.encode(text, parse_special=parse)
        assert tokenizer.encode(text, parse_special=parse, salt=SALT) == expected
        if parse:
            assert tokenizer.pack(text, salt=SALT) == pack_tokens(expected)
        else:
            rendered = pack_tokens(tokenizer.encode_rendered(text))
            assert tokenizer.pack_rendered(text, salt=SALT) == rendered


@settings(deadline=None, max_examples=60)
@given(shared=TEXTS, rests=st.lists(TEXTS, min_size=2, max_size=5))
def test_text_that_nfc_changes_is_encoded_whole(shared: str, rests: list[str]) -> None:
    tested = encoder(NFC)
    for rest in rests:
        text = BASE + shared + rest
        assert tested.encode(text, add_special=False, salt=SALT) == whole(NFC, text)


def test_library_composes_nothing_that_python_calls_normalized() -> None:
    normalize = normalizers.NFC().normalize_str
    decompose = normalizers.NFD().normalize_str
    for code in (*range(0xD800), *range(0xE000, 0x110000)):
        character = chr(code)
        if unicodedata.category(character) == "Cn":
            # Unknown to Python: neither composed of others, nor moved by its combining class.
            assert decompose(character) == character
            assert normalize(f"a{character}\u0334") == f"a{character}\u0334"
        elif unicodedata.is_normalized("NFC", character):
            assert normalize(character) == character


def test_only_text_after_the_last_common_break_is_encoded(encoded: list[str]) -> None:
    tested = encoder(train())
    tested.encode(BASE + " one two", add_special=False, salt=SALT)
    tested.encode(BASE + " one three", add_special=False, salt=SALT)
    tested.encode(BASE + " one three<|im_end|>", add_special=False, salt=SALT)
    assert encoded[1:] == [" three", " three<|im_end|>"]


def test_chinese_text_is_encoded_from_the_last_punctuation(encoded: list[str]) -> None:
    base = "再见，世界。" * MIN_CHARS
    tested = encoder(train())
    tested.encode(base + "一", add_special=False, salt=SALT)
    tested.encode(base + "二", add_special=False, salt=SALT)
    assert encoded[1:] == ["。二"]


def test_conversation_reuses_its_last_turn(tokenizer: Tokenizer, encoded: list[str]) -> None:
    messages = [{"role": "user", "content": BASE}]
    first = tokenizer.render_chat(messages)
    messages += [
        {"role": "assistant", "content": "Certainly: <|im_end|> is text"},
        {"role": "user", "content": "Thanks"},
    ]
    second = tokenizer.render_chat([*messages[:1], {"role": "assistant", "content": "Yes"}])
    guarded = tokenizer.render_chat(messages)
    ids = [tokenizer.encode_rendered(text, salt=b"chat") for text in (first, second, guarded)]
    assert len(encoded[1]) < 40
    assert encoded[2] == guarded  # its marks are removed by the normalizer
    assert ids == [tokenizer.encode_rendered(text) for text in (first, second, guarded)]


def test_other_salts_are_not_reused(encoded: list[str]) -> None:
    tested = encoder(train())
    for salt in (b"one", b"two", None, None):
        tested.encode(BASE, add_special=False, salt=salt)
    assert encoded == [BASE] * 4


def test_text_without_a_common_break_is_encoded_whole(encoded: list[str]) -> None:
    tested = encoder(train())
    for text in ("x" * 5000, "x" * 5001, " " * 5000, "é" * 5000, BASE[:-1]):
        assert tested.encode(text, add_special=False, salt=SALT) == whole(tested._backend, text)
    assert list(map(len, encoded)) == [5000, 5001, 5000, 5000, MIN_CHARS - 1]


def test_bytes_that_the_vocabulary_lacks_are_left_out(encoded: list[str]) -> None:
    description = json.loads(train().to_str())
    model = description["model"]
    missing = "é".encode().decode("latin-1")[1]  # of the alphabet, whose letter is the byte's
    model["vocab"] = {token: id for token, id in model["vocab"].items() if missing not in token}
    model["merges"] = [pair for pair in model["merges"] if missing not in "".join(pair)]
    backend = Backend.from_str(json.dumps(description))
    tested = encoder(backend)
    for text in (BASE, f"{BASE} é a", f"{BASE} é b", f"é{BASE} a", f"é{BASE} b"):
        assert tested.encode(text, add_special=False, salt=SALT) == whole(backend, text)
    assert list(map(len, encoded[-2:])) == [len(BASE) + 3] * 2


def test_special_tokens_are_added_around_the_text() -> None:
    backend = train()
    template = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)],
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(), template])
    tested = encoder(backend)
    assert tested.reuses
    for text in (BASE, BASE + " a", BASE + " b<|im_end|>"):
        for add in (False, True):
            found = tested.encode(text, add_special=add, salt=SALT)
            assert found == whole(backend, text, add)


def test_surrogate_is_refused_as_without_reuse(tokenizer: Tokenizer) -> None:
    for salt in (None, SALT):
        with pytest.raises(TypeError):
            tokenizer.encode(BASE + "\ud800", salt=salt)


def test_threads_share_recent_texts() -> None:
    backend = train()
    tested = encoder(backend)
    texts = [BASE + BASE[: 7 * number] + f" {number % 5} é" for number in range(60)]
    expected = [whole(backend, text) for text in texts]

    def encode(text: str) -> "array[int]":
        return tested.encode(text, add_special=False, salt=SALT)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(encode, texts)) == expected


def set_state(part: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda description: description[part].update(fields)


def set_part(part: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda description: description.update({part: value})


def add_token(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Add a token to the vocabulary. ``fields`` are entries of ``added_tokens``."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)

    def apply(description: dict[str, Any]) -> None:
        token = {"id": len(description["model"]["vocab"]) + 3, "content": "<t>", **flags, **fields}
        description["added_tokens"].append(token)

    return apply


def split(pattern: str, behavior: str = "Isolated", **byte_level: bool) -> dict[str, Any]:
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
    steps = [step, {"type": "ByteLevel", **flags, **byte_level}]
    return {"type": "Sequence", "pretokenizers": steps}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
NOT_REUSED = {
    "dropout": set_state("model", dropout=0.1),
    "unknown token": set_state("model", unk_token="<|im_end|>"),
    "byte fallback": set_state("model", byte_fallback=True),
    "lower case": set_part("normalizer", {"type": "Lowercase"}),
    "expression in a normalizer": set_part(
        "normalizer", {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}
    ),
    "no pre-tokenizer": set_part("pre_tokenizer", None),
    "metaspace": set_part(
        "pre_tokenizer",
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
    ),
    "prefix space": set_part("pre_tokenizer", {**BYTE_LEVEL, "use_regex": True}),
    "look-behind": set_part("pre_tokenizer", split(r"(?<=\s)a| ?\p{L}+|\s+")),
    "letters and spaces": set_part("pre_tokenizer", split(r"[\p{L} ]+|\s+")),
    "merged with the previous": set_part(
        "pre_tokenizer", split(gguf_splits.GPT_2, "MergedWithPrevious")
    ),
    "padding": set_part(
        "padding",
        {
            "strategy": {"Fixed": 9000},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": "<|im_end|>",
        },
    ),
    "RoBERTa": set_part(
        "post_processor",
        {
            "type": "RobertaProcessing",
            "sep": ["<|im_end|>", 1],
            "cls": ["<|im_start|>", 0],
            "trim_offsets": True,
            "add_prefix_space": False,
        },
    ),
    "text twice": set_part(
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {},
        },
    ),
    "token with a break": add_token(content="<a b>"),
    "token that strips": add_token(lstrip=True),
    "token that strips to the right": add_token(rstrip=True),
    "token of whole words": add_token(single_word=True),
    "token of another token's letters": add_token(content="Ã©"),
}


@pytest.mark.parametrize("name", NOT_REUSED)
def test_other_tokenizers_encode_whole_texts(name: str, encoded: list[str]) -> None:
    description = json.loads(train().to_str())
    NOT_REUSED[name](description)
    backend = Backend.from_str(json.dumps(description))
    tested = encoder(backend)
    assert not tested.reuses
    texts = [BASE + " aa", BASE + " ab<t>"]
    for text in texts:
        found = tested.encode(text, add_special=True, salt=SALT)
        assert name == "dropout" or found == whole(backend, text, True)
    assert encoded == texts


@pytest.mark.parametrize(
    "part",
    [
        split(gguf_splits.GPT_2),
        {**BYTE_LEVEL, "add_prefix_space": False, "use_regex": True},
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**BYTE_LEVEL, "add_prefix_space": False, "use_regex": True},
            ],
        },
    ],
    ids=["split", "byte level", "digits"],
)
def test_spellings_of_pre_tokenizers_are_known(part: dict[str, Any]) -> None:
    description = json.loads(train().to_str())
    description["pre_tokenizer"] = part
    assert encoder(Backend.from_str(json.dumps(description))).reuses


def test_guarded_tokenizer_reuses() -> None:
    backend = with_nfc()
    assert encoder(backend).reuses
    assert encoder(ContentGuard(backend, ()).backend).reuses
