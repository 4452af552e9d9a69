"""Canonical description of everything that live objects refer to, suspended coroutines included.

Two instances with equal fingerprints behave alike, because they differ only in identity.
"""

import asyncio
import hashlib
import itertools
import marshal
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import Message

from services.transfer.codecs import SegmentCodecs
from services.transfer.frame import FrameHeader
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.slab import Slab
from tests.services.transfer.protocol.paged_engine import Thread

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_SHARED: tuple[type, ...] = (
    *(Slab, SegmentCodecs, asyncio.AbstractEventLoop, types.ModuleType, type),
    FrameHeader,  # follows from the segment
    LocalEndpoint,  # its agent is added, and the rest does not change
    Thread,  # its state is added
)


def fingerprint(*roots: object) -> bytes:
    """Return a digest, 16 bytes, of the graph of objects that can be reached from ``roots``."""
    walk = _Walk()
    for root in roots:
        walk.add(root)
    return hashlib.blake2b(marshal.dumps(walk.out, 2), digest_size=16).digest()


class _Walk:
    def __init__(self) -> None:
        self.out: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # an id must not be used again during the walk

    def add(self, item: Any) -> None:
        kind = type(item)
        if kind in _PLAIN:
            self.out.append(item)
            return
        handler = _HANDLERS.get(kind)
        if handler is None:
            handler = _HANDLERS[kind] = _handler_of(kind)
        if handler is _skip:
            return
        if handler in _BY_VALUE:
            handler(self, item)
            return
        number = self._numbers.get(id(item))
        if number is not None:
            self.out.append(number)
            return
        self._numbers[id(item)] = len(self._numbers)
        self._alive.append(item)
        handler(self, item)


def _skip(walk: _Walk, item: Any) -> None:
    return


def _items(walk: _Walk, item: Any) -> None:
    out = walk.out
    out.append(len(item))
    for each in item:
        if type(each) in _PLAIN:
            out.append(each)
        else:
            walk.add(each)


def _mapping(walk: _Walk, item: Any) -> None:
    walk.out.append(len(item))
    for key, value in item.items():
        walk.add(key)
        walk.add(value)


def _set(walk: _Walk, item: Any) -> None:
    """Strings and numbers are sorted. Other members are reached elsewhere."""
    walk.out.append(len(item))
    if all(type(each) in _PLAIN for each in item):
        walk.out.extend(sorted(item))


def _frame(walk: _Walk, frame: types.FrameType | None) -> None:
    if frame is None:
        walk.out.append("ended")
        return
    walk.out.append(frame.f_code.co_qualname)
    walk.out.append(frame.f_lasti)
    _items(walk, frame.f_locals.values())


def _coroutine(walk: _Walk, item: Any) -> None:
    _frame(walk, item.cr_frame)
    walk.add(item.cr_await)


def _generator(walk: _Walk, item: Any) -> None:
    _frame(walk, item.gi_frame)
    walk.add(item.gi_yieldfrom)


def _future(walk: _Walk, item: Any) -> None:
    walk.out.append(item._state)
    if item.done() and not item.cancelled():
        error = item.exception()
        walk.add(item.result() if error is None else error)
    for callback, _ in item._callbacks or ():
        walk.add(callback)


def _task(walk: _Walk, item: Any) -> None:
    _future(walk, item)
    if not item.done():
        walk.out.append((item._must_cancel, item.cancelling()))
        walk.add(item.get_coro())
        walk.add(item._fut_waiter)


def _thread_future(walk: _Walk, item: Any) -> None:
    walk.out.append(item._state)
    walk.add(item._result)
    walk.add(item._exception)
    walk.add(item._done_callbacks)


def _function(walk: _Walk, item: Any) -> None:
    walk.out.append(item.__code__.co_qualname)
    for cell in item.__closure__ or ():
        try:
            walk.add(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            walk.out.append("empty")


def _method(walk: _Walk, item: Any) -> None:
    walk.out.append(item.__name__)
    walk.add(item.__self__)


def _partial(walk: _Walk, item: Any) -> None:
    walk.add(item.func)
    walk.add(item.args)


def _exception(walk: _Walk, item: Any) -> None:
    walk.out.append(type(item).__name__)
    walk.out.append(str(item))


def _handle(walk: _Walk, item: Any) -> None:
    walk.out.append(item._cancelled)
    if not item._cancelled:
        walk.add(item._callback)
        walk.add(item._args)


def _message(walk: _Walk, item: Any) -> None:
    walk.out.append(item.SerializeToString(deterministic=True))


def _text(walk: _Walk, item: Any) -> None:
    walk.out.append(repr(item))


def _array(walk: _Walk, item: Any) -> None:
    walk.out.append(item.tobytes())


def _object(walk: _Walk, item: Any) -> None:
    walk.out.append(type(item).__name__)
    fields = getattr(item, "__dict__", None)
    if fields is None:
        for name in getattr(type(item), "__slots__", ()):
            walk.add(getattr(item, name, None))
        return
    _items(walk, fields.values())


def _tuple(walk: _Walk, item: Any) -> None:
    _items(walk, item)


def _record(walk: _Walk, item: Any) -> None:
    """A frozen dataclass."""
    _object(walk, item)


_Handler = Callable[[_Walk, Any], None]

_BY_TYPE: tuple[tuple[tuple[type, ...], _Handler], ...] = (
    (_SHARED, _skip),
    ((asyncio.Task,), _task),
    ((asyncio.Future,), _future),
    ((Future,), _thread_future),
    ((types.CoroutineType,), _coroutine),
    ((types.GeneratorType,), _generator),
    ((types.FunctionType,), _function),
    ((types.MethodType, types.BuiltinMethodType), _method),
    ((partial,), _partial),
    ((BaseException,), _exception),
    ((asyncio.Handle,), _handle),
    ((Message,), _message),
    ((np.ndarray,), _array),
    ((Enum, range, itertools.count), _text),
    ((tuple,), _tuple),
    ((list, deque), _items),
    ((dict, Counter, OrderedDict), _mapping),
    ((set, frozenset), _set),
)
_BY_VALUE = frozenset((_tuple, _record, _exception, _message, _text, _set))
"""Handlers of values: whether two of them are the same object makes no difference."""

_HANDLERS: dict[type, _Handler] = {}


def _handler_of(kind: type) -> _Handler:
    if kind.__module__ in ("_thread", "threading", "_weakref", "weakref", "_contextvars", "torch"):
        return _skip
    for kinds, handler in _BY_TYPE:
        if issubclass(kind, kinds):
            return handler
    if "__dict__" not in dir(kind) and not hasattr(kind, "__slots__"):
        return _opaque
    params = getattr(kind, "__dataclass_params__", None)
    return _record if params is not None and params.frozen else _object


def _opaque(walk: _Walk, item: Any) -> None:
    """A built-in wrapper, for example of a task that waits."""
    walk.out.append(type(item).__name__)
    walk.add(getattr(item, "__self__", None))
