"""Facts of Hugging Face directories outside of ``tokenizer.json``: those of AutoTokenizer."""

import json
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from services.tokenizer.loading import load_tokenizer
from services.tokenizer.pieces import TokenizerError

TEMPLATE = (
    "{{ bos_token }}{{ turn_token }}{{ turn }}{{ pad_token }}"
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
)
TEXT = "a<bos>b <eos> <turn>c<tool>  d<call> <new><image>"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
SPECIAL = {**FLAGS, "special": True}


def write(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    """Write a tokenizer of bytes with three added tokens, and the files beside it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<bos>", "<eos>")])
    backend.add_tokens([AddedToken("<turn>", normalized=False)])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**base, **config}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def check(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    ids = theirs(TEXT)["input_ids"]
    assert ours.encode(TEXT) == ids
    assert ours.special_names == theirs.special_tokens_map
    assert ours.eos_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    chat = [{"role": "user", "content": "hi"}]
    prompt = ours.render_chat(chat)
    assert ours.encode_rendered(prompt) == theirs.apply_chat_template(chat, return_dict=False)


NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "names": NAMED,
    "other names": {"bos_token": "<eos>", "eos_token": "<turn>", "turn_token": "<turn>"},
    "objects": {"eos_token": {"__type": "AddedToken", "content": "<eos>", **FLAGS}},
    "new names": {"eos_token": "<new>", "pad_token": "<pad>"},
    "named extra": {"extra_special_tokens": {"turn": "<turn>", "image_token": "<image>"}},
    "extra list": {"extra_special_tokens": ["<tool>", "<image>"]},
    "additional list": {"additional_special_tokens": ["<tool>", "<turn>"]},
    "null": {"bos_token": None, "eos_token": None, "pad_token": None},
}
ADDED: dict[str, dict[str, Any]] = {
    "none": {},
    "decoder": {
        "added_tokens_decoder": {
            "257": {"content": "<eos>", **SPECIAL},
            "258": {"content": "<turn>", **SPECIAL},
            "260": {"content": "<call>", **FLAGS, "special": False},
            "259": {"content": "<tool>", **SPECIAL, "lstrip": True},
        }
    },
    "empty decoder": {"added_tokens_decoder": {}},
}
MAPS: dict[str, Any] = {
    "none": None,
    "names": NAMED,
    "objects": {"eos_token": {"content": "<turn>", **FLAGS}, "bos_token": "<new>"},
    "lists": {"additional_special_tokens": ["<image>", "<tool>"], "pad_token": "<eos>"},
    "named": {"extra_special_tokens": {"turn": "<tool>"}},
    "extra": {"extra_special_tokens": ["<tool>"], "turn_token": "<turn>"},
}
ADDED_JSON: dict[str, Any] = {
    "none": None,
    "new": {"<tool>": 260, "<call>": 259},
    "known": {"<turn>": 258, "<eos>": 257},
}


@pytest.mark.parametrize(
    ("config", "added", "special_map", "added_json"),
    [
        pytest.param(c, a, m, j, id=f"{c}-{a}-{m}-{j}")
        for c, a, m, j in product(CONFIGS, ADDED, MAPS, ADDED_JSON)
        if [c != "nothing", a != "none", m != "none", j != "none"].count(True) <= 2
    ],
)
def test_all_pairs_of_sources_give_the_ids_of_transformers(
    tmp_path: Path, config: str, added: str, special_map: str, added_json: str
) -> None:
    files = {"special_tokens_map": MAPS[special_map], "added_tokens": ADDED_JSON[added_json]}
    check(
        write(
            tmp_path,
            {**CONFIGS[config], **ADDED[added]},
            **{name: content for name, content in files.items() if content is not None},
        )
    )


def test_tokens_without_embedding_are_left_out(tmp_path: Path) -> None:
    """A name that the vocabulary lacks must not make the tokenizer larger than the model."""
    folder = write(tmp_path, {**NAMED, "pad_token": "[PAD]", "extra_special_tokens": ["<image>"]})
    (folder / "config.json").write_text(json.dumps({"vocab_size": 260}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("[PAD]") == [259]
    assert len(tokenizer.encode("<image>")) == len("<image>")


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": 5},
        {"eos_token": {"text": "x"}},
        {"extra_special_tokens": [5]},
        {"extra_special_tokens": {"turn_token": None}},
        {"added_tokens_decoder": {"257": "<eos>"}},
        {"added_tokens_decoder": {"last": {"content": "<eos>"}}},
        {"added_tokens_decoder": ["<eos>"]},
        {"added_tokens_decoder": {"257": {"text": "<eos>"}}},
        {"chat_template": [{"template": "x"}]},
    ],
)
def test_malformed_declaration_is_an_error(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError):
        load_tokenizer(write(tmp_path, config))


@pytest.mark.parametrize("config", ["named extra", "extra list", "new names"])
def test_saved_tokenizer_keeps_declared_tokens(tmp_path: Path, config: str) -> None:
    (tmp_path / "saved").mkdir()
    tokenizer = load_tokenizer(write(tmp_path, {**CONFIGS[config], **ADDED["decoder"]}))
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.special_names == tokenizer.special_names
    assert again.special_ids == tokenizer.special_ids
    assert again.encode(TEXT) == tokenizer.encode(TEXT)


def test_folder_without_a_tokenizer_names_what_to_do(tmp_path: Path) -> None:
    command = f"`headrace convert --model {tmp_path} --out FOLDER --tokenizer MODEL`"
    with pytest.raises(TokenizerError, match=f"no tokenizer.json.*{command}"):
        load_tokenizer(tmp_path)


def test_pickled_model_names_the_command_and_the_flag(tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    with zipfile.ZipFile(model, "w") as file:  # as torch.save does
        file.writestr("model/data.pkl", b"")
    command = f"`headrace convert --model {model} --out FOLDER --tokenizer MODEL`"
    with pytest.raises(TokenizerError, match=f"pickled model.*{command}"):
        load_tokenizer(model)
