"""CPU time to encode a prompt, whole and after a known beginning.

Run it as ``python -m services.tokenizer.bench``. The texts are parts of Python's documentation.
They have the same beginning and different ends, as questions about one document. The floor is the
time to encode the ends alone. One thread works, so CPU time is wall time on an idle core.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from statistics import median

from rich.console import Console
from rich.table import Table

from services.common.model_source import resolve_model
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Times:
    """Medians of the CPU time to encode one text, ms.

    Attributes:
        whole: without reuse.
        reused: with a recent text that has the same beginning.
        floor: for the end alone.
    """

    whole: float
    reused: float
    floor: float


def measure(tokenizer: Tokenizer, tokens: int, shared: int, texts: int) -> Times:
    """Encode ``texts`` texts of about ``tokens`` tokens with ``shared`` equal ones first.

    Raises:
        ValueError: if Python's documentation is too short.
    """
    ids = tokenizer.encode("\n\n".join(text for _, text in sorted(topics.items())))
    length = tokens - shared
    if len(ids) < shared + (texts + 1) * length:
        raise ValueError("fewer tokens or texts are required: the documentation is too short")
    beginning = tokenizer.decode(ids[:shared])
    starts = range(shared, shared + (texts + 1) * length, length)
    ends = [tokenizer.decode(ids[at : at + length]) for at in starts]
    whole = _median(tokenizer.encode, [beginning + end for end in ends[1:]])
    floor = _median(tokenizer.encode, ends[1:])
    tokenizer.encode(beginning + ends[0], salt=b"")
    reused = _median(
        lambda text: tokenizer.encode(text, salt=b""), [beginning + end for end in ends[1:]]
    )
    return Times(whole, reused, floor)


def _median(encode: Callable[[str], object], texts: Sequence[str]) -> float:
    times = []
    for text in texts:
        began = time.process_time()
        encode(text)
        times.append(time.process_time() - began)
    return 1e3 * median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="model with the tokenizer")
    parser.add_argument("--tokens", type=int, default=7900, help="tokens of a text")
    parser.add_argument("--shared", type=int, default=7424, help="equal tokens at the beginning")
    parser.add_argument("--texts", type=int, default=50, help="number of texts")
    given = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model(given.model))
    times = measure(tokenizer, given.tokens, given.shared, given.texts)
    print(f"{given.tokens} tokens, {given.shared} equal at the beginning")
    table = Table()
    for column in ("encoded", "ms", "floor, ms", "ratio"):
        table.add_column(column, justify="right")
    for name, ms in (("whole", times.whole), ("reused", times.reused)):
        table.add_row(name, f"{ms:.2f}", f"{times.floor:.2f}", f"{ms / times.floor:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
