"""Loads the tokenizer of a model."""

from pathlib import Path

from services.tokenizer.gguf import load_gguf
from services.tokenizer.huggingface import load_directory
from services.tokenizer.pieces import TokenizerError
from services.tokenizer.tokenizer import Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a GGUF file or of a Hugging Face directory.

    Raises:
        TokenizerError: if files are missing, damaged or not supported.
    """
    try:
        return load_directory(path) if path.is_dir() else load_gguf(path)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise TokenizerError(f"cannot read the tokenizer of {path}: {error}") from error
