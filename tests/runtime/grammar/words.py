"""A small byte-level tokenizer for tests of grammars."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.grammar.compiler import Grammar, compile_grammar
from runtime.grammar.masks import MaskWriter, allowed_tokens
from runtime.grammar.matcher import Matcher
from runtime.grammar.spec import GrammarBounds, GrammarKind, GrammarSpec
from runtime.grammar.vocabulary import GrammarVocabulary

END, PAD = 0, 1
"""Ids of the special tokens: end of sequence, and another one."""
SIZE = 600
"""Number of tokens with which texts have tokens of one and of several characters."""
_TEXT = [
    '{"name": "value", "count": 12, "items": [true, false, null]}',
    "äöü 漢字 😀",
    "x-y_z 3.5e-7",
]


@cache
def tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of at most ``size`` tokens."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=alphabet,
        special_tokens=["<end>", "<pad>"],
        show_progress=False,
    )
    found.train_from_iterator(_TEXT * 5, trainer)
    return found


@cache
def vocabulary(size: int) -> GrammarVocabulary:
    """Return a vocabulary of ``size`` token ids, the last of which may be padding."""
    return GrammarVocabulary(tokenizer(size).to_str(), size, [END])


def encode(text: str, size: int) -> list[int]:
    """Return the token ids of a text."""
    return list(tokenizer(size).encode(text, add_special_tokens=False).ids)


def decode(tokens: list[int], size: int) -> str:
    """Return the text of token ids, without special tokens."""
    return str(tokenizer(size).decode([t for t in tokens if t not in (END, PAD)]))


def grammar(kind: GrammarKind, text: str, size: int) -> Grammar:
    """Compile a constraint for the tokenizer of this size."""
    return compile_grammar(GrammarSpec(kind, text), vocabulary(size), GrammarBounds())


def allowed(matcher: Matcher) -> list[int]:
    """Return the tokens that a matcher allows next."""
    words = MaskWriter(1).write([matcher], matcher.vocabulary.mask_words)
    return [int(t) for t in allowed_tokens(words[0], 0, matcher.vocabulary.size).nonzero()[0]]


def matches(found: Grammar, text: str) -> bool:
    """Return whether a grammar allows each token of a text, and the end after it."""
    matcher = found.start()
    for token in encode(text, SIZE):
        if token not in allowed(matcher):
            return False
        matcher.advance([token])
    return END in allowed(matcher)
