"""Folders of tiny random encoders with tokenizers, and a fake encoder."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from runtime.encoder.model import EncoderInput
from runtime.errors import InvalidRequest
from tests.runtime.encoder.folders import VOCABULARY, write_encoder, write_modules

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CLS, SEP = 2, 3
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
MAX_TOKENS = 64


def write_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Write a WordPiece tokenizer whose tokens are letters, and return it."""
    words = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    words += [f"[unused{number}]" for number in range(VOCABULARY - len(words))]
    vocabulary = {word: id for id, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(list(SPECIAL))
    made.enable_truncation(16)  # as files of sentence-transformers do; the service ignores it
    made.enable_padding(length=16)
    made.save(str(folder / "tokenizer.json"))
    return made


def write_embedder(folder: Path, *, prompts: dict[str, str] | None = None) -> Path:
    """Write an embedding model with a limit of `MAX_TOKENS` tokens; return the folder."""
    folder.mkdir(exist_ok=True)
    write_encoder(folder, "BertModel")
    write_modules(folder, {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True})
    write_tokenizer(folder)
    length = json.dumps({"max_seq_length": MAX_TOKENS})
    (folder / "sentence_bert_config.json").write_text(length)
    declared = json.dumps({"prompts": prompts or {}})
    (folder / "config_sentence_transformers.json").write_text(declared)
    return folder


def write_cross_encoder(folder: Path) -> Path:
    """Write a cross encoder with one label; return the folder."""
    folder.mkdir(exist_ok=True)
    write_encoder(folder, "BertForSequenceClassification", num_labels=1)
    write_tokenizer(folder)
    return folder


class FakeEncoder:
    """Returns the number and the sum of the tokens of each input, and records the batches.

    Attributes:
        gate: batches wait until it is set.
        batches: lengths of the inputs of each batch.
        error: exception to raise, or None.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[list[int]] = []
        self.error: BaseException | None = None

    def check(self, each: EncoderInput) -> None:
        if 13 in each.tokens:
            raise InvalidRequest("token 13 is not valid")

    def encode(self, inputs: Sequence[EncoderInput]) -> Tensor:
        self.batches.append([len(each.tokens) for each in inputs])
        self.entered.release()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        rows = [[float(len(each.tokens)), float(sum(each.tokens))] for each in inputs]
        for row, each in zip(rows, inputs, strict=True):
            if 99 in each.tokens:
                row[1] = float("nan")
        return torch.tensor(rows)
