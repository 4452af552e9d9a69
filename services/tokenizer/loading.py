"""Loads the tokenizer of a model."""

import zipfile
from pathlib import Path

from services.tokenizer.gguf import load_gguf
from services.tokenizer.huggingface import has_tokenizer, load_directory
from services.tokenizer.pieces import TokenizerError
from services.tokenizer.tokenizer import Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a GGUF file or of a Hugging Face directory.

    Raises:
        TokenizerError: if files are missing, damaged or not supported.
    """
    if zipfile.is_zipfile(path):  # as torch.save writes
        raise TokenizerError(f"{path} is a pickled model, without a tokenizer: {_conversion(path)}")
    if path.is_dir() and not has_tokenizer(path):
        raise TokenizerError(
            f"{path} has no tokenizer.json: copy the one of the original model into it. If another "
            f"project factorized the model, {_conversion(path)}"
        )
    try:
        return load_directory(path) if path.is_dir() else load_gguf(path)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise TokenizerError(f"cannot read the tokenizer of {path}: {error}") from error


def _conversion(path: Path) -> str:
    return (
        f"convert it with `headrace convert --model {path} --out FOLDER --tokenizer MODEL`, where "
        "MODEL is the original model"
    )
