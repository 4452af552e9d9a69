"""The tokens of a model, as grammars use them."""

from collections.abc import Sequence

from llguidance import LLTokenizer

_BITS = 32


class GrammarVocabulary:
    """Tokens of a model with their bytes. Building it takes about 0.3 s for 49,152 tokens.

    Special tokens match no text, so that a grammar never allows them except `eos_ids` where its
    text may end.

    Args:
        tokenizer: content of the ``tokenizer.json`` of the model.
        size: number of token ids of the model, including padding after those of the tokenizer.
        eos_ids: ids of the tokens that end the output, at least one.

    Attributes:
        mask_words: number of 32-bit words of a mask with one bit for each token id.

    Raises:
        ValueError: the tokenizer is not supported.
    """

    def __init__(self, tokenizer: str, size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise ValueError("the model has no end-of-sequence token")
        self.size = size
        self.eos_ids = tuple(eos_ids)
        self.mask_words = -(-size // _BITS)
        self.tokens = LLTokenizer(tokenizer, n_vocab=size, eos_token=list(eos_ids))
