"""Words of generated prompts and their tokens in the target's vocabulary."""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from loadgen.errors import UsageError
from loadgen.workload.base import Tokenizer
from loadgen.workload.lengths import IntArray
from loadgen.workload.tokenizer import special_tokens

# Common words. In most vocabularies, each is a single token, also at the start of a text. The first
# version of a prompt then already has the intended length.
_COMMON = """
about above after again against air all almost along also always among an and animal another answer
any are area around as ask at away back because been before being below best better between big
black blue boat body book both brother build built but by call came can car care cause center
change city class clear close cold color come common could country course cover cut dark day deep
did different do does dog done door down draw during each early earth east easy eat end enough even
every example eye face fact family far farm fast father feel feet few field fill find fire first
fish five follow food for force form found four free friend from front full game general get girl
give glass go gold good got great green ground group grow had half hand hard has have he head heart
heat heavy help her here high hill him his hold home horse hot hour house how hundred ice idea if
important in inside into it its job just keep kind king know land language large last late later
learn leave left less let letter life light like line list listen little live long look lost love
low machine made main make man many map mark may mean measure men might mile milk mind minute money
month moon more most mother move much music must name nature near need never new next night no
north not note nothing now number ocean of off often old on once one only open or order other our
out over own page paper part pass people person picture place plan plant play point power question
quick rain read ready real red rest right river road rock room round rule run said same say school
science sea second see sentence set several shape she ship short should show side simple since sing
sit six size sleep slow small snow so some song soon sound south space special stand star start
state stay step still stone stood stop story street strong study such summer sun system table take
talk tell ten than that the their them then there these they thing think this those though thought
three through time to together too top town travel tree true try turn two under unit until up us
use usual very voice walk wall want war warm was watch water way we week well went were west what
wheel when where which while white who whole why will wind winter with wood word work world would
write year yes yet you young your
"""
_WORDS = _COMMON.split()
_ANCHOR = "the"
_WORDS_PER_SENTENCE = 12


@dataclass(frozen=True, slots=True)
class Passage:
    """The same words as text and as token ids.

    Attributes:
        text: whole words, each after a space. If ``ids`` ends within a word, ``text`` includes the
            rest of that word.
        ids: token ids, with exactly the intended length.
    """

    text: str
    ids: tuple[int, ...]


class Vocabulary:
    """Words and their tokens in the target's vocabulary.

    If each word is one token, a single tokenizer call is enough to find all tokens.

    Raises:
        UsageError: if the tokenizer cannot encode English words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lead, self._trail = special_tokens(tokenizer)
        self.special = len(self.lead) + len(self._trail)
        """Number of special tokens that the tokenizer adds to a text."""
        self._anchor = len(self.body(tokenizer.encode(_ANCHOR)))
        stop = self._following(".")
        measured = [
            pair for pair in zip(_WORDS, self._measure(_WORDS), strict=True) if len(pair[1]) > 0
        ]
        if not measured:
            raise UsageError("the target's tokenizer returns no tokens for words within a text")
        self._words = len(measured)
        self._stop = len(stop)
        self._texts = [f" {word}{end}" for end in ("", ".") for word, _ in measured]
        self._tokens = [tokens + end for end in ((), stop) for _, tokens in measured]
        self._sizes = np.array([len(tokens) for tokens in self._tokens])

    def body(self, tokens: list[int]) -> list[int]:
        """Return the tokens of an encoded text without the special tokens around them."""
        return tokens[len(self.lead) : len(tokens) - len(self._trail)]

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Return the indices of ``count`` random words. Shape (count,).

        About one in twelve is followed by a full stop.
        """
        ends = rng.random(count) < 1 / _WORDS_PER_SENTENCE
        return rng.integers(self._words, size=count) + self._words * ends

    def passage(self, drawn: IntArray, tokens: int) -> Passage:
        """Return the first ``tokens`` tokens of the words ``drawn``.

        ``drawn`` must contain at least ``tokens`` words, because a word may be a single token.
        """
        reached = np.cumsum(self._sizes[drawn[: max(0, tokens)]])
        count = int(np.searchsorted(reached, tokens)) + 1
        chosen = drawn[:count].tolist() if tokens > 0 else []
        if chosen and chosen[-1] >= self._words and reached[count - 1] - tokens >= self._stop:
            chosen[-1] -= self._words
        return Passage(
            "".join(self._texts[i] for i in chosen),
            tuple(chain.from_iterable(self._tokens[i] for i in chosen))[: max(0, tokens)],
        )

    def filler(self, tokens: int) -> str:
        """Return words to append to a text that is ``tokens`` tokens too short."""
        return self.passage(np.arange(tokens) % self._words, tokens).text

    def _measure(self, words: list[str]) -> list[tuple[int, ...]]:
        """Return the tokens of each word.

        A single tokenizer call encodes all words. If a word has several tokens, the list is
        bisected. This needs few calls, which matters if the tokenizer is remote.
        """
        tokens = self._following("".join(f" {word}" for word in words))
        if len(tokens) == len(words):
            return [(token,) for token in tokens]
        if len(words) == 1:
            return [tokens]
        middle = len(words) // 2
        return self._measure(words[:middle]) + self._measure(words[middle:])

    def _following(self, text: str) -> tuple[int, ...]:
        return tuple(self.body(self._tokenizer.encode(_ANCHOR + text))[self._anchor :])
