"""Folder of a tiny model with a tokenizer of single bytes."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.checkpoint.assemble import named_tensors
from tests.runtime.offline.convert.samples import save_folder
from tests.runtime.tiny import tiny_checkpoint


def save_tiny_model(folder: Path) -> Path:
    """Write a checkpoint and a tokenizer with one token per byte, and return the folder."""
    checkpoint = tiny_checkpoint()
    save_folder(checkpoint, named_tensors(checkpoint), folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:200]
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
