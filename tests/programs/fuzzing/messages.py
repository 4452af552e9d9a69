"""Mutations of protobuf messages: of fields, with boundary values, and of the encoded bytes."""

import math
import struct
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_MAX_DEPTH = 4
_MAX_REPEATED = 40
_WIRE_SHARE = 0.07
"""Fraction of the mutations that change encoded bytes."""

_FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 1e-300, 5e-324, 1e38, 1e300),
    *(math.nan, math.inf, -math.inf, 2.0**31, -(2.0**63)),
)
_STRINGS = (
    *("", " ", "\0", "a\nb", "../../etc/passwd", "%s%n{0}", "\u202e\ufeff", "é" * 40, "x" * 5000),
    *(
        "NaN",
        "-1",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "[::1]:1",
        "unix:/tmp/x",
        "dns:///x",
        "0" * 32,
    ),
)
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_WIDE = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def mutated(message: Message, rng: Random) -> bytes:
    """Return an encoded message with one to three mutations."""
    changed = type(message)()
    changed.CopyFrom(message)
    if not changed.DESCRIPTOR.fields or rng.random() < _WIRE_SHARE:
        return mutated_bytes(changed.SerializeToString(), rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate_field(changed, rng)
    return changed.SerializeToString()


def mutate_field(message: Message, rng: Random) -> None:
    """Change one field of a message or of a message in it, chosen at random, in place."""
    owner = rng.choice([owner for owner in _messages(message) if owner.DESCRIPTOR.fields])
    fields: Sequence[Any] = owner.DESCRIPTOR.fields
    field = rng.choice(fields)
    if field.is_repeated:
        _mutate_repeated(owner, field, rng)
    elif rng.random() < 0.2:
        owner.ClearField(field.name)
    elif field.message_type is not None:
        getattr(owner, field.name).SetInParent()  # for a `oneof`, this clears the other members
    else:
        setattr(owner, field.name, _value(getattr(owner, field.name), field, rng))


def _messages(message: Message, depth: int = 0) -> Iterator[Message]:
    """Yield a message and those that it contains."""
    yield message
    if depth == _MAX_DEPTH:
        return
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for item in list(value)[:_MAX_REPEATED] if field.is_repeated else (value,):
            yield from _messages(item, depth + 1)


def _mutate_repeated(owner: Message, field: FieldDescriptor, rng: Random) -> None:
    values = getattr(owner, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        number = _value(_default(key), key, rng)
        values[number] = _value(_default(value), value, rng)
        return
    kind = rng.choice(("clear", "duplicate", "reverse", "add", "many"))
    items = list(values)
    if kind == "clear":
        owner.ClearField(field.name)
    elif kind in ("duplicate", "reverse") and items:
        changed = [*items, rng.choice(items)] if kind == "duplicate" else items[::-1]
        copies = [_copy(item) for item in changed]
        owner.ClearField(field.name)
        getattr(owner, field.name).extend(copies)
    elif field.message_type is not None:
        for _ in range(1 if kind == "add" else _MAX_REPEATED):
            values.add()
    else:
        count = 1 if kind == "add" else _MAX_REPEATED
        values.extend(_value(_default(field), field, rng) for _ in range(count))


def _default(field: FieldDescriptor) -> Any:
    """Return the zero of a field's type; of a repeated field, that of one item."""
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b""
    return "" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else 0


def _copy(item: Any) -> Any:
    if not isinstance(item, Message):
        return item
    copy = type(item)()
    copy.CopyFrom(item)
    return copy


def _value(current: Any, field: FieldDescriptor, rng: Random) -> Any:
    """Return a boundary value of a scalar field, or one that is close to the current value."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return not current
        case FieldDescriptor.CPPTYPE_FLOAT:
            return struct.unpack("f", struct.pack("f", _float32(rng.choice(_FLOATS))))[0]
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return mutated_bytes(current, rng)
            return rng.choice((*_STRINGS, current + "x", current[:-1], current.upper()))
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 7, 11, 12, 77, -1, 2**31 - 1))
    bits = 64 if field.cpp_type in _WIDE else 32
    low, high = (
        (0, 2**bits - 1)
        if field.cpp_type in _UNSIGNED
        else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    )
    near = (current + 1, current - 1, current * 2, current + 16)
    values = (0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, low, high, high - 1, *near)
    return min(max(rng.choice(values), low), high)


def _float32(value: float) -> float:
    return value if not math.isfinite(value) else min(max(value, -3e38), 3e38)


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """Return bytes with a few flipped, removed, added, moved or repeated ones."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
        match rng.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                del changed[at : min(end, at + 8)]
            case 3:
                changed[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
            case 4:
                changed[at:at] = changed[at : min(end, at + 64)]
            case 5:
                changed[at : at + 10] = b"\xff" * 9 + b"\x01"  # the largest number
            case 6:
                changed += changed[at:end]
                del changed[at:end]
    return bytes(changed)
