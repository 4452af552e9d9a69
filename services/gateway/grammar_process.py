"""The process in which a gateway compiles the constraints of clients, to check them.

A compilation can take minutes, and deeply nested input might crash the compiler. The gateway ends
this process if it takes too long, and starts another one.

Both directions carry messages of a length, 4 bytes in big-endian order, and a JSON text. The first
message has the tokenizer; each further one a constraint, which is answered with the reason for
which it is invalid, or an empty string.
"""

import json
import resource
import sys
from typing import Any, BinaryIO

from runtime.grammar.compiler import compile_grammar
from runtime.grammar.spec import GrammarBounds, GrammarKind, GrammarSpec, InvalidGrammar
from runtime.grammar.vocabulary import GrammarVocabulary

LENGTH_BYTES = 4
_MEMORY_BYTES = 4 << 30
"""Maximum address space of the process, most of which it does not use."""


def message_of(content: Any) -> bytes:
    """Return the bytes of a message."""
    body = json.dumps(content).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _read(stream: BinaryIO) -> Any:
    """Return the content of the next message, or None at the end."""
    length = stream.read(LENGTH_BYTES)
    return json.loads(stream.read(int.from_bytes(length, "big"))) if length else None


def _fault(request: Any, vocabulary: GrammarVocabulary) -> str:
    """Return why a constraint is invalid, or an empty string."""
    spec = GrammarSpec(GrammarKind(request["kind"]), request["text"])
    bounds = GrammarBounds(request["max_bytes"], request["max_depth"])
    try:
        compile_grammar(spec, vocabulary, bounds)
    except InvalidGrammar as error:
        return str(error)
    return ""


def main() -> None:
    """Answer the messages of the gateway until it closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    start = _read(source)
    vocabulary = GrammarVocabulary(start["tokenizer"], start["size"], start["eos_ids"])
    while (request := _read(source)) is not None:
        target.write(message_of(_fault(request, vocabulary)))
        target.flush()


if __name__ == "__main__":
    main()
