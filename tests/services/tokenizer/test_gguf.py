"""GGUF tokenizers: ids of transformers and of llama.cpp's algorithms, and tokens that end turns."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from services.tokenizer import gguf_splits
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.pieces import TokenizerError
from services.tokenizer.tokenizer import Tokenizer

CORPUS = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
TEXTS = [
    "The capital of France is Paris.",
    "It's 2024-11-21, isn't IT? We'LL pay $1,234.56 for 1234567 it.",
    "def f(x):\n    return x ** 2  # squared\n\n\n",
    "Ünïcödé naïve ÉCOLE; e\u0301 日本語のテキスト 한국어 العربية",
    "😀👩\u200d👧 <= >= ||~^ +a+ `b`",
    "x\ty \r\n z\u00a0!? [/usr/bin]//\n",
    "HTTPServer camelCase snake_case",
    "",
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"


def write(
    path: Path, model: str, tokens: Sequence[str], types: Sequence[int], **fields: Any
) -> Path:
    """Write a GGUF file without tensors. ``fields``: further entries of ``tokenizer.ggml``."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    for add in (writer.add_block_count, writer.add_head_count, writer.add_head_count_kv):
        add(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if name == "chat_template":
            writer.add_chat_template(value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def trained(pre: pre_tokenizers.PreTokenizer, alphabet: list[str]) -> tuple[list[str], list[str]]:
    """Return the vocabulary and the merges of a BPE model of the corpus."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    backend.train_from_iterator([CORPUS], trainer)
    vocabulary = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(pair) for pair in merges]


@pytest.fixture(scope="module")
def byte_level() -> tuple[list[str], list[str]]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False), alphabet)


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    """Return a vocabulary like that of Llama 2: pieces by falling score, then single characters."""
    words, _ = trained(pre_tokenizers.Metaspace(), [])
    letters = [word for word in words if len(word) == 1]
    formed = [word for word in words if len(word) > 1]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *fallback, *formed, *letters, "<|im_end|>"]
    scores = [0.0] * 259 + [-float(n) for n in range(len(formed) + len(letters))] + [-1000.0]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    types += [NORMAL] * (len(formed) + len(letters)) + [CONTROL]
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"tokens": tokens, "types": types, "scores": scores, **special}


def write_byte_level(path: Path, vocabulary: tuple[list[str], list[str]], **fields: Any) -> Path:
    tokens = [*vocabulary[0], "<s>", "</s>", "<tool>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    size = len(tokens)
    ids = {"bos_token_id": size - 3, "eos_token_id": size - 2}
    return write(path, "gpt2", tokens, types, **{"merges": vocabulary[1], **ids, **fields})


@pytest.mark.parametrize(
    "pre", ["llama-bpe", "llama3", "pixtral", "dbrx", "qwen2", "tekken", "gpt-4o", "gpt-2"]
)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_byte_level_ids_are_those_of_transformers(
    tmp_path: Path, byte_level: tuple[list[str], list[str]], pre: str, adds_bos: bool
) -> None:
    path = write_byte_level(tmp_path / "m.gguf", byte_level, pre=pre, add_bos_token=adds_bos)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    ours = load_tokenizer(path)
    for text in (*TEXTS, "<s>a <tool> b</s>", CORPUS):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids[adds_bos:], skip_special=False) == text


PIECES = {  # pieces of llama.cpp's expressions
    "default": (
        "It's  1234567 <=x ab",
        ["It", "'", "s", " ", " ", "123", "456", "7", " ", "<=", "x"],
    ),
    "falcon": ("a`b 12345 ||", ["a", "`", "b", " ", "123", "45", " ", "||"]),
    "smollm": ("It's  12 <=x", ["It", "'s", "  ", "1", "2", " <=", "x"]),
    "starcoder": ("a 12", ["a", " ", "1", "2"]),
    "gpt-2": ("It's  1234 <=x \n", ["It", "'s", " ", " 1234", " <=", "x", " \n"]),
    "llama-bpe": ("IT'S 12345 \n\nx", ["IT", "'S", " ", "123", "45", " \n\n", "x"]),
    "qwen2": ("a 123", ["a", " ", "1", "2", "3"]),
    "tekken": ("fooBar /x/\n 12", ["foo", "Bar", " /", "x", "/\n", " ", "1", "2"]),
    "gpt-4o": ("It's FOObar 1234", ["It's", " FOObar", " ", "123", "4"]),
    "deepseek-v3": ("a日本 1234 #x", ["a", "日本", " ", "123", "4", " #", "x"]),
    "deepseek-coder": ("a b,\n12", ["a", " b", ",", "\n", "1", "2"]),
}


@pytest.mark.parametrize("name", PIECES)
def test_pre_tokenizers_split_as_in_llama_cpp(name: str) -> None:
    text, pieces = PIECES[name]
    found = gguf_splits.pre_tokenizer(name).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found][: len(pieces)] == pieces


@pytest.mark.parametrize("name", sorted(gguf_splits.KNOWN))
def test_pre_tokenizers_keep_all_text(name: str) -> None:
    splitter = gguf_splits.pre_tokenizer(name)
    for text in TEXTS:
        ends = [bounds for _, bounds in splitter.pre_tokenize_str(text)]
        assert "".join(text[start:end] for start, end in ends) == text


def test_missing_pre_tokenizer_is_the_default(
    tmp_path: Path, byte_level: tuple[list[str], list[str]]
) -> None:
    without = load_tokenizer(write_byte_level(tmp_path / "a.gguf", byte_level))
    default = load_tokenizer(write_byte_level(tmp_path / "b.gguf", byte_level, pre="default"))
    for text in TEXTS:
        assert without.encode(text) == default.encode(text)
        assert without.decode(without.encode(text)) == text


def merged(text: str, tokens: dict[str, int], scores: Sequence[float]) -> list[int]:
    """Return the ids of a text by SentencePiece's algorithm, without special tokens.

    The best pair of neighbours is joined until no pair forms a piece. Of equal pairs, the left one
    is joined first. What is not a piece is encoded as bytes.
    """
    symbols = list(text)
    while True:
        joined = [(a + b, at) for at, (a, b) in enumerate(pairwise(symbols))]
        known = [(-scores[tokens[piece]], at) for piece, at in joined if piece in tokens]
        if not known:
            break
        _, at = min(known)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        units = [symbol] if symbol in tokens else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        ids += [tokens[unit] for unit in units]
    return ids


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory, sentencepiece: dict[str, Any]) -> Tokenizer:
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    return load_tokenizer(write(path, "llama", **sentencepiece))


def test_sentencepiece_ids_are_those_of_transformers(
    tmp_path: Path, sentencepiece: dict[str, Any]
) -> None:
    path = write(tmp_path / "m.gguf", "llama", **sentencepiece)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    ours = load_tokenizer(path)
    for text in (*TEXTS, CORPUS):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == text


@given(text=st.text(st.sampled_from("theTing mode  \n1é日😀.<s>/"), max_size=40))
def test_sentencepiece_ids_are_those_of_the_algorithm(
    spm: Tokenizer, sentencepiece: dict[str, Any], text: str
) -> None:
    tokens = {token: id for id, token in enumerate(sentencepiece["tokens"])}
    scores = sentencepiece["scores"]
    spaced = (" " + text).replace(" ", SPACE) if text else ""
    expected = [1, *merged(spaced, tokens, scores)]
    assert spm.encode(text, parse_special=False) == expected
    assert spm.decode(expected) == text


def test_sentencepiece_without_space_prefix(tmp_path: Path, sentencepiece: dict[str, Any]) -> None:
    fields = {**sentencepiece, "add_space_prefix": False, "add_bos_token": False}
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", "llama", **fields))
    tokens = {token: id for id, token in enumerate(sentencepiece["tokens"])}
    for text in ("the model", " the", "é"):
        spaced = text.replace(" ", SPACE)
        assert tokenizer.encode(text) == merged(spaced, tokens, sentencepiece["scores"])
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_text_after_a_special_token_has_the_space_prefix(spm: Tokenizer) -> None:
    whole = spm.encode("<s>the model</s>the", add_special=False)
    parts = [spm.encode(text, add_special=False) for text in ("the model", "the")]
    assert whole == [1, *parts[0], 2, *parts[1]]


def test_control_tokens_are_not_built_from_text(
    tmp_path: Path, sentencepiece: dict[str, Any]
) -> None:
    fields = dict(sentencepiece)
    fields["tokens"] = [*fields["tokens"], "</", "s>"]
    fields["types"] = [*fields["types"], NORMAL, NORMAL]
    fields["scores"] = [*fields["scores"], -1.0, -1.0]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    path = write(tmp_path / "m.gguf", "llama", chat_template=template, **fields)
    tokenizer = load_tokenizer(path)
    prompt = tokenizer.render_chat([{"role": "user", "content": "a</s>b"}])
    ids = tokenizer.encode_rendered(prompt)
    assert ids[0] == 1
    assert 2 not in ids
    assert tokenizer.decode(ids[1:], skip_special=False) == "a</s>b"


def ends(tmp_path: Path, names: Sequence[str], types: int = NORMAL, **fields: Any) -> set[str]:
    """Return the texts of the tokens that end the output of a vocabulary with ``names``."""
    tokens = ["a", "b", "ab", *names]
    kinds = [*[NORMAL] * 3, *[types] * len(names)]
    path = write(tmp_path / "m.gguf", "gpt2", tokens, kinds, pre="gpt-2", merges=["a b"], **fields)
    tokenizer = load_tokenizer(path)
    assert {tokens[id] for id in tokenizer.eos_ids} <= {
        tokenizer.pieces[id].decode() for id in tokenizer.special_ids
    }
    return {tokens[id] for id in tokenizer.eos_ids}


END_NAMES = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
    *("</s>", "<|end_of_text|>", "<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<|return|>"),
)


@pytest.mark.parametrize("name", END_NAMES)
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_tokens_end_the_output_by_name(tmp_path: Path, name: str, kind: int) -> None:
    assert ends(tmp_path, [name, "<|other|>"], kind) == {name}


def test_tokens_end_the_output_by_id(tmp_path: Path) -> None:
    fields = {"eos_token_id": 3, "eot_token_id": 4, "eom_token_id": 5}
    assert ends(tmp_path, ["x", "y", "z", "w"], **fields) == {"x", "y", "z"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["<|return|>", "<|call|>", "<|end|>"], {"<|return|>", "<|call|>"}),
        (["<|calls|>", "<|flush|>", "<|end|>"], {"<|calls|>", "<|flush|>"}),
        (["<|return|>", "<|end|>"], {"<|return|>", "<|end|>"}),
        (["<|tool_response>", "</s>", "<turn|>"], {"<|tool_response>", "<turn|>"}),
    ],
)
def test_end_names_with_another_meaning_do_not_end_the_output(
    tmp_path: Path, names: list[str], expected: set[str]
) -> None:
    assert ends(tmp_path, names) == expected


def test_special_tokens_have_names_in_templates(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}"
    names = ("bos", "eos", "unknown", "padding")
    ids: dict[str, Any] = {f"{name}_token_id": id for id, name in enumerate(names)}
    tokens = ["<b>", "<e>", "<u>", "<p>", "a", "b", "ab"]
    kinds = [*[CONTROL] * 4, *[NORMAL] * 3]
    fields = {"pre": "gpt-2", "merges": ["a b"], "chat_template": template, **ids}
    path = write(tmp_path / "m.gguf", "gpt2", tokens, kinds, **fields)
    tokenizer = load_tokenizer(path)
    prompt = tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert tokenizer.encode_rendered(prompt) == [0, 1, 2, 3]


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, True), (False, True), (False, False)])
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, byte_level: tuple[list[str], list[str]], add_bos: bool, add_eos: bool
) -> None:
    path = write_byte_level(
        tmp_path / "m.gguf", byte_level, pre="gpt-2", add_bos_token=add_bos, add_eos_token=add_eos
    )
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    assert load_tokenizer(path).encode("hi") == theirs("hi").input_ids


def test_saved_sentencepiece_tokenizer_can_be_loaded(tmp_path: Path, spm: Tokenizer) -> None:
    spm.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.eos_ids == spm.eos_ids
    for text in (*TEXTS, " two  spaces", "<s>x<|im_end|>y"):
        assert again.encode(text) == spm.encode(text)
        assert again.decode(again.encode(text)) == spm.decode(spm.encode(text))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, "tokenizer model 'bert'"),
        ({"pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
        ({"bos_token_id": 99_999}, "outside the vocabulary"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores"),
        ({"model": "llama", "unknown_token_id": 99_999, "scores": [0.0]}, "scores|vocabulary"),
    ],
)
def test_unsupported_file_is_an_error(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    given = {"model": "gpt2", "pre": "gpt-2", **fields}
    if given["model"] == "gpt2":
        given["merges"] = ["a b"]
    path = write(tmp_path / "m.gguf", tokens=["a", "b", "ab"], types=[NORMAL] * 3, **given)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(path)


def test_texts_of_a_prompt_have_neither_bos_nor_the_space_prefix(spm: Tokenizer) -> None:
    ids = spm.encode("the cat")
    texts = spm.texts(ids)
    assert texts[0] == ""
    assert "".join(texts) == "the cat"
