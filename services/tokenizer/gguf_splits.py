"""Pre-tokenizers by the names that llama.cpp gives them in GGUF files (``tokenizer.ggml.pre``).

Each is a sequence of regular expressions. A later expression splits the pieces of the earlier ones,
and text between the matches of an expression is a piece as well.
"""

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN_2 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{_REST}"
_TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}{_REST_WITH_SLASH}"
_GPT_4O = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{_REST_WITH_SLASH}"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"

_SEQUENCES = {
    ("default",): (_PUNCTUATION, GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ("falcon",): (_PUNCTUATION.replace("|]", "|`]"), GPT_2, "[0-9][0-9][0-9]"),
    ("gpt-2", "phi-2", "roberta-bpe", "mpt", "olmo", "jais", "trillion"): (GPT_2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (
        r"\p{N}",
        GPT_2,
    ),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"): (
        _LLAMA_3,
    ),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"): (_QWEN_2,),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4"): (_GPT_4O,),
    ("deepseek-v3",): (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
    ),
    ("deepseek-coder",): (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
}
_BY_NAME = {name: sequence for names, sequence in _SEQUENCES.items() for name in names}

SEQUENCES = frozenset(_SEQUENCES.values())
"""All sequences of expressions, spelled as in ``tokenizer.json`` of the same models."""

KNOWN = frozenset(_BY_NAME)
"""Supported names."""

WHOLE_WORDS = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"))
"""Names whose vocabularies add BOS, and encode a word that is a token without merges."""


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer, which also converts bytes to the alphabet of GPT-2."""
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _BY_NAME[name]]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, bytes_only])
