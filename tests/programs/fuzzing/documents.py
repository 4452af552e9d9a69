"""Mutations of JSON documents: of values, keys and structure, and of the encoded text."""

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

from tests.programs.fuzzing.messages import mutated_bytes

_TEXT_SHARE = 0.15
"""Fraction of the mutations that change the encoded text."""

# JSON text that replaces a value, since `json` does not write all of these.
_TEXTS = (
    *(
        "null",
        "true",
        "false",
        "0",
        "-0",
        "-1",
        "1",
        "2",
        "1.5",
        "1e3",
        "NaN",
        "Infinity",
        "-Infinity",
    ),
    *("2147483648", "4294967296", "9223372036854775808", "1e400", "-1e400", "1e-400", "9" * 400),
    *('""', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"1"', '"NaN"', '"' + "x" * 3000 + '"'),
    *('"<|im_end|>"', '"\U0001f600\u202e\ufeff"', '"a\\nb"', "[]", "{}", "[[]]", '[{"a": 1}]'),
    *("[null]", '[1, "a"]', '{"": 0}', "[" * 64 + "]" * 64, '{"a":' * 400 + "1" + "}" * 400),
)
_DEEP = "[" * 20_000 + "]" * 20_000
_KEYS = ("", "model", "n", "stream", "unknown", "__proto__", "é", "max_tokens", "x" * 300, "\0")


def mutated(document: Any, rng: Random) -> bytes:
    """Return an encoded document with one to three mutations."""
    if rng.random() < _TEXT_SHARE:
        return mutated_bytes(json.dumps(document).encode(), rng)
    changed = copy.deepcopy(document)
    texts: dict[str, str] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changed = _mutate(changed, rng, texts)
    encoded = json.dumps(changed)
    for mark, text in texts.items():
        encoded = encoded.replace(json.dumps(mark), text)
    return encoded.encode()


def _mutate(document: Any, rng: Random, texts: dict[str, str]) -> Any:
    """Return the document with one mutation. ``texts`` maps marks in it to JSON text."""
    holders = list(_holders(document))
    if not holders or rng.random() < 0.02:
        return _mark(rng, texts)
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = rng.randrange(10)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(_KEYS)] = _mark(rng, texts)
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(_KEYS)] = holder.pop(key)
    elif kind == 3:
        holder[key] = [holder[key]] * rng.choice((1, 2, 200))
    elif kind == 4:
        holder[key] = {"a": holder[key]}
    elif kind == 5 and isinstance(holder, list):
        holder.extend([holder[key]] * rng.choice((1, 100)))
    else:
        holder[key] = _mark(rng, texts)
    return document


def _holders(document: Any) -> Iterator[Any]:
    """Yield every object and array that is not empty."""
    if isinstance(document, dict | list) and document:
        yield document
        for value in document.values() if isinstance(document, dict) else document:
            yield from _holders(value)


def _mark(rng: Random, texts: dict[str, str]) -> str:
    mark = f"mark {len(texts)}"
    texts[mark] = _DEEP if rng.random() < 0.002 else rng.choice(_TEXTS)
    return mark
