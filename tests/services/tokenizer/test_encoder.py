"""Tokenizers of encoders against tokenizers of transformers: special tokens, types, truncation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from services.tokenizer import encoder
from services.tokenizer.encoder import EncoderTokenizer
from services.tokenizer.pieces import TokenizerError
from tests.services.encoder.samples import CLS, MAX_TOKENS, SEP, write_tokenizer

FIRST, SECOND = "abc de", "fgh ijklm n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    return made


@pytest.fixture
def plain(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer without truncation and padding."""
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.no_truncation()
    made.no_padding()
    return made


def test_text_is_complete_with_special_tokens(folder: Path, plain: tokenizers.Tokenizer) -> None:
    text = FIRST * 20  # longer than the truncation of the file
    found = EncoderTokenizer.load(folder).encode(text)
    assert list(found.tokens) == plain.encode(text).ids
    assert (found.tokens[0], found.tokens[-1], found.types) == (CLS, SEP, b"")


def test_pair_has_types(folder: Path, plain: tokenizers.Tokenizer) -> None:
    found = EncoderTokenizer.load(folder).encode_pair(FIRST, SECOND)
    expected = plain.encode(FIRST, SECOND)
    assert (list(found.tokens), list(found.types)) == (expected.ids, expected.type_ids)


@pytest.mark.parametrize("limit", range(2, 10))
def test_long_text_is_cut_at_its_end(folder: Path, plain: tokenizers.Tokenizer, limit: int) -> None:
    plain.enable_truncation(limit)
    found = EncoderTokenizer.load(folder).encode(FIRST, limit=limit)
    assert list(found.tokens) == plain.encode(FIRST).ids


@pytest.mark.parametrize("limit", range(3, 20))
@pytest.mark.parametrize("texts", [(FIRST, SECOND), (SECOND, FIRST), (FIRST, "edcba"), ("a", "b")])
def test_of_a_long_pair_the_longer_text_is_cut(
    folder: Path, plain: tokenizers.Tokenizer, texts: tuple[str, str], limit: int
) -> None:
    plain.enable_truncation(limit)
    found = EncoderTokenizer.load(folder).encode_pair(*texts, limit=limit)
    expected = plain.encode(*texts)
    assert list(found.tokens) == expected.ids
    assert list(found.types or bytes(len(found.tokens))) == expected.type_ids


POST_PROCESSORS = {
    "none": None,
    "bert": processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS)),
    "roberta": processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS)),
    "types": processors.TemplateProcessing(
        single="[CLS]:3 $A:1 [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    ),
}


@pytest.mark.parametrize("post_processor", POST_PROCESSORS)
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("limit", [None, 5, 64])
def test_lists_are_tokenized_like_single_inputs(
    folder: Path,
    tmp_path: Path,
    plain: tokenizers.Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    post_processor: str,
    parallel: bool,
    limit: int | None,
) -> None:
    monkeypatch.setattr(encoder, "_BATCH_CHARS", 20)  # several batches, and one larger text
    if (processor := POST_PROCESSORS[post_processor]) is None:
        description = json.loads((folder / "tokenizer.json").read_text())
        (tmp_path / "tokenizer.json").write_text(json.dumps(description | {"post_processor": None}))
        plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    else:
        plain.post_processor = processor
        plain.save(str(tmp_path / "tokenizer.json"))
    plain.no_padding()
    plain.no_truncation()
    if limit is not None:
        plain.enable_truncation(limit)
    tokenizer = EncoderTokenizer.load(tmp_path)
    texts = ["abc de", "", "a", "fgh ijklm n", "abc " * 10, "? b", "z"]
    pairs = list(zip(texts, reversed(texts), strict=True))
    if processor is None and limit is not None:
        pairs = []  # a pair that is cut has no token types without a post-processor
    found = [
        *tokenizer.encode_all(texts, limit=limit, parallel=parallel),
        *tokenizer.encode_pairs(pairs, limit=limit, parallel=parallel),
    ]
    expected = [*map(plain.encode, texts), *(plain.encode(*pair) for pair in pairs)]
    assert [list(each.tokens) for each in found] == [each.ids for each in expected]
    types = [list(each.types or bytes(len(each.tokens))) for each in found]
    assert types == [each.type_ids for each in expected]


def test_large_texts_are_tokenized_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_BATCH_CHARS", 10)
    batches: list[int] = []
    tokenizer = EncoderTokenizer.load(folder)

    class Recording:
        def encode_batch_fast(self, given: list[str]) -> list[tokenizers.Encoding]:
            batches.append(len(given))
            found: list[tokenizers.Encoding] = backend.encode_batch_fast(given)
            return found

    backend = tokenizer._backend
    monkeypatch.setattr(tokenizer, "_backend", Recording())
    texts = ["abc", "de", "a" * 11, "b" * 10, "c", "d"]
    assert len(list(tokenizer.encode_all(texts, parallel=True))) == len(texts)
    assert batches == [2, 1, 1, 2]
    batches.clear()
    list(tokenizer.encode_all(texts))  # the calling thread tokenizes lists of one text
    assert batches == [1] * len(texts)


_COUNT_THREADS = """
import os, sys
from pathlib import Path
from services.tokenizer.encoder import EncoderTokenizer

os.sched_getaffinity = lambda _: set(range(int(sys.argv[2])))
tokenizer = EncoderTokenizer.load(Path(sys.argv[1]))
before = len(os.listdir("/proc/self/task"))
list(tokenizer.encode_all(["one two"] * 64, parallel=True))
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize(("cores", "threads"), [(3, 3), (64, 4)])
def test_lists_are_tokenized_by_few_threads(folder: Path, cores: int, threads: int) -> None:
    """A thread for each core of a large machine would make the lists of many clients slower."""
    command = [sys.executable, "-c", _COUNT_THREADS, str(folder), str(cores)]
    ours = ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    assert int(subprocess.check_output(command, env=environment)) == threads


def test_text_of_tokens(folder: Path) -> None:
    tokenizer = EncoderTokenizer.load(folder)
    assert tokenizer.plain.decode(tokenizer.encode(FIRST).tokens) == FIRST


def test_identity_depends_on_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    description = json.loads((folder / "tokenizer.json").read_text())
    words = description["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    found, other = (EncoderTokenizer.load(each).identity for each in (folder, tmp_path))
    assert found.vocab_size == other.vocab_size == 97
    assert found.hash != other.hash


def test_files_of_sentence_transformers_are_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert EncoderTokenizer.load(tmp_path).trained_tokens is None
    assert EncoderTokenizer.load(tmp_path).prompts.text(None) == ""
    declared = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(declared))
    length = json.dumps({"max_seq_length": MAX_TOKENS})
    (tmp_path / "sentence_bert_config.json").write_text(length)
    found = EncoderTokenizer.load(tmp_path)
    assert found.trained_tokens == MAX_TOKENS
    assert (found.prompts.text(None), found.prompts.text("document")) == ("q: ", "")
    with pytest.raises(KeyError):
        found.prompts.text("other")


def test_texts_are_converted_to_lower_case_if_the_files_say_so(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": None}))
    plain = EncoderTokenizer.load(tmp_path)
    assert plain.encode("ABC") != plain.encode("abc")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    found = EncoderTokenizer.load(tmp_path)
    assert found.encode("ABC") == found.encode("abc")


@pytest.mark.parametrize(
    "declared",
    [{"prompts": ["a"]}, {"prompts": {"a": 1}}, {"prompts": {}, "default_prompt_name": "a"}, []],
)
def test_damaged_prompts_are_refused(tmp_path: Path, declared: object) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(declared))
    with pytest.raises(TokenizerError):
        EncoderTokenizer.load(tmp_path)


def test_missing_and_damaged_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        EncoderTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="is not supported"):
        EncoderTokenizer.load(tmp_path)
