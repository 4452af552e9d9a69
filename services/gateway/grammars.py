"""Checks of the constraints that clients put on output, before requests are placed."""

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable
from typing import TypeVar

import structlog

from runtime.grammar.spec import GrammarBounds, GrammarFault, GrammarSpec, InvalidGrammar
from services.common.errors import InvalidRequest, Unavailable
from services.common.fair_slots import FairSlots
from services.common.interpreter import python_command
from services.gateway.constraints import Constraint
from services.gateway.grammar_process import LENGTH_BYTES, message_of
from services.gateway.keys import Tenant
from services.gateway.metrics import GrammarMetrics
from services.gateway.settings import GatewaySettings
from services.tokenizer.tokenizer import Tokenizer

log = structlog.get_logger()

_PROCESSES = 2
_PROCESSES_OF_OWNER = 1
_START_S = 60.0
"""Maximum time in which a process starts, seconds."""
_CHECKED_OF_OWNER = 256
_OWNERS = 256
"""Numbers of constraints of an owner, and of owners, whose results are kept."""
_NO_EOS = (0,)

_T = TypeVar("_T")
_Results = OrderedDict[bytes, InvalidGrammar | None]
"""Errors of constraints by their hashes; None for valid ones."""


class _Compiler:
    """A process that compiles constraints, one at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "_Compiler":
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *python_command("-m", "services.gateway.grammar_process"),
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,  # a signal from the terminal is for the gateway
        )
        return cls(process)

    async def send(self, message: bytes) -> None:
        """Send a message. Raises OSError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(message)
        await self._process.stdin.drain()

    async def receive(self) -> InvalidGrammar | None:
        """Return the error of the last constraint, or None if it is valid.

        Raises EOFError if the process has ended.
        """
        assert self._process.stdout is not None
        length = await self._process.stdout.readexactly(LENGTH_BYTES)
        found = json.loads(await self._process.stdout.readexactly(int.from_bytes(length, "big")))
        return found and InvalidGrammar(found[1], GrammarFault(found[0]))

    async def end(self) -> None:
        """Kill the process."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class GrammarChecker:
    """Compiles constraints in processes that are ended after ``grammar_timeout_s``.

    A process starts with the first constraint. Owners share the processes fairly, so that the
    constraints of one do not delay those of another. Results are kept for each owner.
    """

    def __init__(
        self, settings: GatewaySettings, tokenizer: Tokenizer, metrics: GrammarMetrics
    ) -> None:
        self.metrics = metrics
        self._settings = settings
        self._bounds = GrammarBounds(settings.max_grammar_bytes, settings.max_grammar_depth)
        self._tokenizer = tokenizer
        self._slots = FairSlots(
            _PROCESSES, per_tenant=_PROCESSES_OF_OWNER, max_waiting=settings.max_concurrent
        )
        self._idle: list[_Compiler] = []
        self._checked: OrderedDict[str, _Results] = OrderedDict()

    async def check(self, constraint: Constraint | None, owner: Tenant) -> None:
        """Check a constraint.

        Raises:
            InvalidRequest: it is malformed, too large, or takes too long to compile; ``param`` is
                the client's field.
            Overloaded: too many constraints wait.
            Unavailable: no process can be started.
        """
        if constraint is None:
            return
        spec = constraint.spec
        try:
            self._bounds.check(spec)
        except InvalidGrammar as exceeded:
            raise self.refusal(constraint.field, exceeded) from None
        key = hashlib.sha256(repr(spec).encode()).digest()
        checked = self._results(owner)
        if key not in checked:
            cost = len(spec.text) + len(spec.frame) + 1
            async with self._slots.hold(owner.name, weight=owner.weight, cost=cost):
                error = checked[key] = await self._compile(spec)
            if len(checked) > _CHECKED_OF_OWNER:
                checked.popitem(last=False)
        else:
            error = checked[key]
            checked.move_to_end(key)
            self.metrics.cache_hits.inc()
        if error is not None:
            raise self.refusal(constraint.field, error)

    async def close(self) -> None:
        """End all idle processes."""
        for compiler in self._idle:
            await compiler.end()
        self._idle.clear()

    def refusal(self, field: str, error: InvalidGrammar) -> InvalidRequest:
        """Count a refused constraint, and return the error for the client.

        Args:
            field: the client's field with the constraint.
        """
        self.metrics.refused.labels(error.fault.value).inc()
        return InvalidRequest(f"{field}: {error}", param=field)

    def _results(self, owner: Tenant) -> _Results:
        """Return the kept results of an owner."""
        results = self._checked.setdefault(owner.name, OrderedDict())
        self._checked.move_to_end(owner.name)
        if len(self._checked) > _OWNERS:
            self._checked.popitem(last=False)
        return results

    async def _compile(self, spec: GrammarSpec) -> InvalidGrammar | None:
        """Return the error of a constraint, or None if it is valid."""
        compiler = self._idle.pop() if self._idle else await self._start()
        request = {
            "kind": spec.kind.value,
            "text": spec.text,
            "frame": spec.frame,
            "max_bytes": self._bounds.max_bytes,
            "max_depth": self._bounds.max_depth,
            "limit_s": self._settings.grammar_timeout_s,
        }
        limit_s = self._settings.grammar_timeout_s
        begin = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                await compiler.send(message_of(request))
                error = await compiler.receive()
        except TimeoutError:
            await compiler.end()
            reason = f"it takes more than {limit_s:g} s to compile"
            return InvalidGrammar(reason, GrammarFault.TIMEOUT)
        except (OSError, EOFError):
            await compiler.end()
            log.warning("the compiler of grammars has ended")
            return InvalidGrammar("it is too complex to compile", GrammarFault.TOO_COMPLEX)
        except asyncio.CancelledError:
            await _finish(compiler.end())
            raise
        finally:
            self.metrics.compile_seconds.observe(time.monotonic() - begin)
        self._idle.append(compiler)
        if error is None:
            self.metrics.compiled.labels(spec.kind.value).inc()
        return error

    async def _start(self) -> _Compiler:
        """Start a process and wait until it has read the tokenizer."""
        tokenizer = self._tokenizer
        start = {
            "tokenizer": await asyncio.to_thread(lambda: tokenizer.json),
            "size": tokenizer.vocab_size,
            "eos_ids": tokenizer.eos_ids or _NO_EOS,
        }
        anything = {"kind": "regex", "text": "a", "frame": "", "max_bytes": 1, "max_depth": 1}
        anything["limit_s"] = _START_S
        compiler = await _Compiler.start()
        try:
            async with asyncio.timeout(_START_S):
                await compiler.send(await asyncio.to_thread(message_of, start))
                await compiler.send(message_of(anything))
                await compiler.receive()
        except (OSError, EOFError, TimeoutError) as error:
            await compiler.end()
            raise Unavailable(f"constraints on output cannot be compiled: {error!r}") from None
        except asyncio.CancelledError:
            await _finish(compiler.end())
            raise
        return compiler


async def _finish(work: Awaitable[_T]) -> _T:
    """Wait for work also if the caller is cancelled again."""
    return await asyncio.shield(work)
