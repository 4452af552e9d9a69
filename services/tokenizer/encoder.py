"""Tokenizers of encoders: texts and pairs of texts to token ids and token types.

Special tokens, such as ``[CLS]`` and ``[SEP]``, and token types are those that the post-processor
of ``tokenizer.json`` adds. Files of sentence-transformers beside it declare prompts, which precede
texts, the length up to which the model was trained, and whether texts are converted to lower case.
"""

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar

import tokenizers

from services.tokenizer.huggingface import TOKENIZER_FILE, has_tokenizer
from services.tokenizer.identity import TokenizerIdentity
from services.tokenizer.json_files import read_json
from services.tokenizer.pieces import TokenizerError, table_size
from services.tokenizer.tokenizer import SpecialTokens, Tokenizer

_SENTENCES = "config_sentence_transformers.json"
_SENTENCE_FILES = (
    *("sentence_bert_config.json", "sentence_roberta_config.json"),
    *("sentence_distilbert_config.json", "sentence_xlm-roberta_config.json"),
)
_MAX_PROMPT_CHARS = 4096
_BATCH_CHARS = 1 << 16
"""Maximum characters of texts that are tokenized together.

It limits the memory for them, and the time for which other calls wait."""

_MAX_THREADS = 4
"""Threads of the library that tokenize lists. Its default, one for each core, makes the lists of
many clients slower on large machines, because waking all threads takes longer than most lists."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EncoderTokens:
    """Token ids of one input, complete with special tokens.

    Attributes:
        tokens: the ids; an ``array("I")`` can be sent to a worker without another conversion.
        types: token type of each token; empty if all are 0.
    """

    tokens: Sequence[int]
    types: bytes = b""


@dataclass(frozen=True)
class Prompts:
    """Texts that precede the texts to embed, as sentence-transformers declares them.

    Attributes:
        by_name: prompts by name, such as "query".
        default: name of the prompt of texts without another one; None for no prompt.
    """

    by_name: dict[str, str]
    default: str | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the prompts that a folder declares; none if it declares none."""
        config = read_json(path / _SENTENCES)
        prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
        valid = isinstance(prompts, dict) and all(
            isinstance(text, str) and len(text) <= _MAX_PROMPT_CHARS for text in prompts.values()
        )
        if not valid or (default is not None and default not in prompts):
            raise TokenizerError(f"{_SENTENCES}: the prompts are not valid")
        return cls(prompts, default)

    def text(self, name: str | None) -> str:
        """Return the prompt of this name, or the default one; empty for none.

        Raises:
            KeyError: there is no prompt of this name.
        """
        name = self.default if name is None else name
        return "" if name is None else self.by_name[name]


class EncoderTokenizer:
    """Tokenizer of an encoder's folder. Thread-safe.

    Attributes:
        prompts: prompts of the folder.
        trained_tokens: maximum tokens of an input that the folder declares; None if it does not.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, prompts: Prompts, trained_tokens: int | None
    ) -> None:
        self._backend = backend
        self.prompts = prompts
        self.trained_tokens = trained_tokens

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the tokenizer of a Hugging Face folder.

        Raises:
            TokenizerError: if files are missing, damaged or not supported.
        """
        if not path.is_dir() or not has_tokenizer(path):
            raise TokenizerError(f"{path} has no {TOKENIZER_FILE}")
        _limit_threads()
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / TOKENIZER_FILE))
        except Exception as error:
            raise TokenizerError(f"{path}: {TOKENIZER_FILE} is not supported: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        try:
            sentences = _sentence_config(path)
            if sentences.get("do_lower_case"):
                others = [backend.normalizer] if backend.normalizer else []
                lower = tokenizers.normalizers.Lowercase()
                backend.normalizer = tokenizers.normalizers.Sequence([lower, *others])
            return cls(backend, Prompts.read(path), _trained_tokens(sentences))
        except (OSError, ValueError) as error:
            raise TokenizerError(f"cannot read the tokenizer of {path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._pieces)

    def special_tokens(self, *, is_pair: bool) -> int:
        """Number of special tokens of an input."""
        return self._backend.num_special_tokens_to_add(is_pair=is_pair)

    @cached_property
    def identity(self) -> TokenizerIdentity:
        """Properties by which a gateway and its workers compare tokenizers."""
        return TokenizerIdentity.of(self.plain)

    @cached_property
    def plain(self) -> Tokenizer:
        """The tokenizer for the routes that show tokens as text."""
        return Tokenizer(
            self._backend, SpecialTokens((), {}), pieces=self._pieces, strips_space=True
        )

    def encode(self, text: str, *, limit: int | None = None) -> EncoderTokens:
        """Return the tokens of a text.

        Args:
            limit: maximum tokens, special ones included; the end of a longer text is cut off.
        """
        (found,) = self.encode_all([text], limit=limit)
        return found

    def encode_pair(self, first: str, second: str, *, limit: int | None = None) -> EncoderTokens:
        """Return the tokens of a pair of texts, for a cross encoder.

        Args:
            limit: maximum tokens, special ones included. Of a longer pair, the ends of the longer
                text, or of both, are cut off.
        """
        (found,) = self.encode_pairs([(first, second)], limit=limit)
        return found

    def encode_all(
        self, texts: Iterable[str], *, limit: int | None = None, parallel: bool = False
    ) -> Iterator[EncoderTokens]:
        """Yield the tokens of each text; ``limit`` is as in `encode`.

        Args:
            parallel: tokenize several texts at once, with up to four threads (RAYON_NUM_THREADS
                sets another number). All calls share these threads, so that a call may wait for
                another one. Otherwise, the calling thread tokenizes.
        """
        encode = self._backend.encode_batch_fast  # without offsets and the text of tokens
        for batch in _batches(texts, len):
            if limit is None:
                yield from map(_tokens, _encode(encode, batch, parallel=parallel))
                continue
            left = max(0, limit - self.special_tokens(is_pair=False))
            plain = partial(encode, add_special_tokens=False)
            for encoding in _encode(plain, batch, parallel=parallel):
                encoding.truncate(left)
                yield _tokens(self._backend.post_process(encoding))

    def encode_pairs(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        limit: int | None = None,
        parallel: bool = False,
    ) -> Iterator[EncoderTokens]:
        """Yield the tokens of each pair; the arguments are as in `encode_pair` and `encode_all`."""
        # Without a post-processor, `encode_batch_fast` returns other token types for pairs.
        encode = self._backend.encode_batch
        for batch in _batches(pairs, lambda pair: len(pair[0]) + len(pair[1])):
            if limit is None:
                yield from map(_tokens, _encode(encode, batch, parallel=parallel))
                continue
            left = max(0, limit - self.special_tokens(is_pair=True))
            plain = partial(encode, add_special_tokens=False)
            shared = parallel and len(batch) > 1
            texts = iter(_encode(plain, list(chain.from_iterable(batch)), parallel=shared))
            for one, two in zip(texts, texts, strict=True):
                lengths = _shortened(len(one.ids), len(two.ids), left)
                for encoding, length in zip((one, two), lengths, strict=True):
                    encoding.truncate(length)
                yield _tokens(self._backend.post_process(one, two))

    @cached_property
    def _pieces(self) -> tuple[bytes, ...]:
        """Bytes of each token: words of WordPiece begin with a space, their other parts do not."""
        model = json.loads(self._backend.to_str())["model"]
        prefix = model.get("continuing_subword_prefix") or ""
        special = self._backend.get_added_tokens_decoder()
        pieces = []
        for id in range(table_size(self._backend)):
            token = self._backend.id_to_token(id) or ""
            if model["type"] == "WordPiece" and id not in special:
                token = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
            pieces.append(token.encode())
        return tuple(pieces)


def _limit_threads() -> None:
    """Limit the threads of the library, which reads the variable when it first needs them."""
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))


def _tokens(encoding: Any) -> EncoderTokens:
    types = bytes(encoding.type_ids)
    return EncoderTokens(array("I", encoding.ids), types if any(types) else b"")


def _batches(inputs: Iterable[_T], size_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield lists of at most `_BATCH_CHARS` characters, or of one input, in order."""
    batch: list[_T] = []
    size = 0
    for each in inputs:
        size += size_of(each)
        if batch and size > _BATCH_CHARS:
            yield batch
            batch, size = [], size_of(each)
        batch.append(each)
    if batch:
        yield batch


def _encode(
    encode: Callable[[list[_T]], list[tokenizers.Encoding]], batch: list[_T], *, parallel: bool
) -> Iterable[tokenizers.Encoding]:
    """Return the encodings of a batch.

    Only calls with lists release the interpreter lock. Without it, encoding a long text in a thread
    would block the event loop. The calling thread encodes a list of one input; the threads of the
    library encode longer lists.
    """
    if parallel:
        return encode(batch)
    return (encode([each])[0] for each in batch)


def _shortened(first: int, second: int, limit: int) -> tuple[int, int]:
    """Return the lengths of two texts, of which the longer one is cut until both fit."""
    if first + second <= limit:
        return first, second
    half = limit // 2
    if first <= half:
        return first, limit - first
    if second <= half:
        return limit - second, second
    return (limit - half, half) if first > second else (half, limit - half)


def _sentence_config(path: Path) -> dict[str, Any]:
    """Return the options of sentence-transformers for the first module; empty without a file."""
    return next(filter(None, (read_json(path / name) for name in _SENTENCE_FILES)), {})


def _trained_tokens(sentences: dict[str, Any]) -> int | None:
    length = sentences.get("max_seq_length")
    return length if isinstance(length, int) and length > 0 else None
