"""The process in which a gateway compiles the constraints of clients, to check them.

A compilation can take minutes, and deeply nested input might crash the compiler. The gateway ends
this process if it takes too long, and starts another one.

Both directions carry messages of a length, 4 bytes in big-endian order, and a JSON text. The first
message has the tokenizer; each further one a constraint, which is answered with the kind of its
fault and the reason, or null if it is valid.
"""

import json
import math
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from runtime.grammar.compiler import compile_grammar
from runtime.grammar.spec import GrammarBounds, GrammarKind, GrammarSpec, InvalidGrammar
from runtime.grammar.vocabulary import GrammarVocabulary

LENGTH_BYTES = 4
_MEMORY_BYTES = 512 << 20
"""Maximum memory that a compilation may allocate, bytes."""
_NICENESS = 5
"""Compilations leave the processor to running streams if there are too few cores."""


def message_of(content: Any) -> bytes:
    """Return the bytes of a message."""
    body = json.dumps(content).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _read(stream: BinaryIO) -> Any:
    """Return the content of the next message, or None at the end."""
    length = stream.read(LENGTH_BYTES)
    return json.loads(stream.read(int.from_bytes(length, "big"))) if length else None


def _fault(request: Any, vocabulary: GrammarVocabulary) -> tuple[str, str] | None:
    """Return the kind of fault of a constraint and the reason, or None if it is valid."""
    _limit_processor_time(request["limit_s"])
    spec = GrammarSpec(GrammarKind(request["kind"]), request["text"])
    bounds = GrammarBounds(request["max_bytes"], request["max_depth"])
    try:
        compile_grammar(spec, vocabulary, bounds)  # also finds that no text matches it
        if request["frame"]:
            compile_grammar(replace(spec, frame=request["frame"]), vocabulary, bounds)
    except InvalidGrammar as error:
        return error.fault.value, str(error)
    return None


def _limit_memory() -> None:
    """Limit the address space to what is mapped now and `_MEMORY_BYTES`."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY_BYTES, most))


def _limit_processor_time(limit_s: float) -> None:
    """Let the kernel end this process soon after the time limit, even if the gateway is gone."""
    used_s = time.process_time()
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used_s + limit_s) + 1, most))


def main() -> None:
    """Answer the messages of the gateway until it closes the pipe."""
    os.nice(_NICENESS)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    start = _read(source)
    vocabulary = GrammarVocabulary(start["tokenizer"], start["size"], start["eos_ids"])
    _limit_memory()
    while (request := _read(source)) is not None:
        target.write(message_of(_fault(request, vocabulary)))
        target.flush()


if __name__ == "__main__":
    main()
