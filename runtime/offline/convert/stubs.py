"""Placeholders for pickled objects of unknown classes, and the tensors in them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from runtime.errors import CheckpointError

_MAX_MODULES, _MAX_DEPTH = 1 << 17, 64
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts save a state dict or module beside other values."""
_PREFIXES = ("_orig_mod.", "module.")
"""Prefixes of all names in modules from `torch.compile` and `DistributedDataParallel`."""


class Stub:
    """Placeholder for an object whose class is not imported.

    Attributes:
        state: attributes of the object.
        items: items, if it is like a dict.
        elements: elements, if it is like a list or a set.
    """

    state: dict[str, Any]
    items: dict[Any, Any]
    elements: list[Any]

    def __new__(cls, *_arguments: Any, **_kwargs: Any) -> "Stub":
        made = super().__new__(cls)
        made.state = {}
        made.items = {}
        made.elements = []
        return made

    def __init__(self, *_arguments: Any, **_kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.state.update(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, element: Any) -> None:
        self.elements.append(element)

    def extend(self, elements: Any) -> None:
        self.elements.extend(elements)

    def add(self, element: Any) -> None:
        self.elements.append(element)


def tensors_of(value: Any) -> dict[str, Tensor]:
    """Return the tensors of a state dict or of a pickled module by their dotted names.

    Args:
        value: a module, a state dict, or a dict with either under one of the names in `_WRAPPERS`.

    Raises:
        CheckpointError: ``value`` is none of these, has no tensors, or contains a tensor of an
            unsupported type.
    """
    found = unwrapped(value)
    if is_module(found):
        tensors = dict(_parameters(found, "", [_MAX_MODULES]))
    elif isinstance(found, dict) and all(isinstance(name, str) for name in found):
        tensors = {name: tensor for name, tensor in found.items() if _is_tensor(name, tensor)}
    else:
        raise CheckpointError("the pickle holds neither a state dict nor a module")
    if not tensors:
        raise CheckpointError("the pickle holds no tensors")
    for prefix in _PREFIXES * 2:  # in either order
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def unwrapped(value: Any) -> Any:
    """Return the state dict or module that training scripts save beside other values."""
    for _ in range(_MAX_DEPTH):
        inner = [value.get(key) for key in _WRAPPERS] if isinstance(value, dict) else []
        value = next((one for one in inner if isinstance(one, dict) or is_module(one)), value)
    return value


def is_module(value: Any) -> bool:
    """Return whether ``value`` is a pickled `torch.nn.Module`."""
    return isinstance(value, Stub) and "_modules" in value.state


def _is_tensor(name: str, value: Any) -> bool:
    """Return whether an entry is a tensor.

    Raises:
        CheckpointError: it is a stub, which may stand for a tensor of an unknown class.
    """
    if isinstance(value, Stub):
        raise CheckpointError(f"{name} is a {type(value).__name__}, which is not supported")
    return isinstance(value, Tensor)


def _parameters(module: Stub, prefix: str, left: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under the names of `state_dict`.

    Args:
        left: a list with one element, the number of modules that may still be visited. It ends the
            recursion of a module that contains itself.
    """
    left[0] -= 1
    if left[0] < 0 or prefix.count(".") > _MAX_DEPTH:
        raise CheckpointError("modules are nested too deeply, or there are too many")
    names = module.state.get("_non_persistent_buffers_set", ())
    skipped = set(names) if isinstance(names, set | frozenset | tuple | list) else set()
    for kind in ("_parameters", "_buffers"):
        for name, tensor in _entries(module.state.get(kind)):
            if not (kind == "_buffers" and name in skipped) and _is_tensor(prefix + name, tensor):
                yield prefix + name, tensor
    for name, child in _entries(module.state.get("_modules")):
        if isinstance(child, Stub):
            yield from _parameters(child, f"{prefix}{name}.", left)


def _entries(mapping: Any) -> Iterator[tuple[str, Any]]:
    items = mapping.items if isinstance(mapping, Stub) else mapping
    for name, value in items.items() if isinstance(items, dict) else ():
        if not isinstance(name, str):
            raise CheckpointError("a module has a name that is not a string")
        yield name, value
