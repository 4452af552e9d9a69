"""Tokenizer of plain text for calibration and evaluation."""

from pathlib import Path

from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def text_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a directory, or the byte-level BPE of SmolLM's GGUF file."""
    if path.is_dir():
        return Tokenizer.from_file(str(path / "tokenizer.json"))
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
