"""Tokenizers and chat templates of models, from Hugging Face folders and GGUF files."""

from services.tokenizer.identity import TokenizerIdentity
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import IncrementalDetokenizer, Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "TokenizerIdentity", "load_tokenizer"]
