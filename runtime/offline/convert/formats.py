"""Rename the tensors of a factorized checkpoint to canonical names.

A linear is ``y = U (V x) + b``; where names do not distinguish U from V, shapes do.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.checkpoint.source_format import PATTERNS, PROJECTION, SourceFormat, format_of
from runtime.errors import CheckpointError
from runtime.models.llama import LLAMA

_LM_HEAD = LLAMA.tensor_names.lm_head
_HEAD = _LM_HEAD.removesuffix(".weight")
_BASIS_COPY = re.compile(rf"model\.{PROJECTION}_basis\.(?P<number>\d+)\.weight")
_IGNORED = re.compile(r".*\.rotary_emb\..*")
_UNSUPPORTED = {
    "us_quan": "Dobi-SVD's remapped 8-bit weights",
    "transformer.h.": "GPT-2",
}


@dataclass(frozen=True)
class Named:
    """Tensors under canonical names.

    Attributes:
        format: the detected format.
        head_was_factorized: whether the LM head was a factor pair and has been multiplied out.
    """

    format: SourceFormat
    tensors: dict[str, Tensor]
    head_was_factorized: bool = False


def to_canonical(tensors: Mapping[str, Tensor]) -> Named:
    """Rename the tensors of a state dict of any supported format.

    Raises:
        CheckpointError: the format is not supported, formats are mixed, or the shapes of factors do
            not match.
    """
    for mark, description in _UNSUPPORTED.items():
        if any(mark in name for name in tensors):
            raise CheckpointError(f"{description} is not supported")
    found = format_of(tensors)
    renamed: dict[str, Tensor] = {}
    for name, tensor in _renamed(found, tensors):
        if name in renamed:
            raise CheckpointError(f"two tensors map to the name {name}")
        renamed[name] = tensor
    if found is not SourceFormat.LINEAR_PAIR:
        return Named(found, renamed)
    return Named(found, _by_shape(renamed), f"{_HEAD}.A.weight" in renamed)


def _renamed(
    source_format: SourceFormat, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    pattern = PATTERNS.get(source_format)
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name) if pattern else None
        if _IGNORED.fullmatch(name):
            continue
        if match is None:
            yield from _unmatched(source_format, name, tensor, tensors)
            continue
        owner = _owner(match.groupdict())
        factor = "v" if match["factor"] == "basis" else match["factor"]
        bias_on_u = source_format in (SourceFormat.SVD_LLM, SourceFormat.SVD_LLM_V2)
        if match["kind"] == "bias" and bias_on_u:
            if factor == "v":
                raise CheckpointError(f"{name}: a bias between the factors is not supported")
            yield f"{owner}.bias", tensor
        else:
            yield f"{owner}.{factor}.{match['kind']}", tensor


def _owner(match: Mapping[str, str | None]) -> str:
    """Return the canonical name of the linear to which a factor belongs."""
    if encoder := match.get("encoder"):
        return encoder
    layer, linear = match["layer"], match["linear"]
    if layer is None or linear is None:
        return _HEAD
    whole = linear.endswith("_proj") or linear.startswith("fc")
    return layer + (linear if whole else f"{linear}_proj")


def _unmatched(
    source_format: SourceFormat, name: str, tensor: Tensor, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor whose name does not match the format's pattern.

    In Basis Sharing, the weight of a linear that has a basis is U. Other tensors keep their Hugging
    Face names.
    """
    if source_format is SourceFormat.BASIS_SHARING:
        if copy := _BASIS_COPY.fullmatch(name):
            _check_copy(copy, tensor, tensors)
            return
        owner, _, kind = name.rpartition(".")
        basis = f"{owner.removesuffix('_proj')}_basis.weight"
        if owner.endswith("_proj") and kind == "weight" and basis in tensors:
            yield f"{owner}.u.weight", tensor
            return
    yield name, tensor


def _check_copy(copy: "re.Match[str]", tensor: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Check that a basis in the model-wide list equals the basis in its layer."""
    part = "mlp" if copy["projection"] in ("gate", "up", "down") else "self_attn"
    name = f"model.layers.{copy['number']}.{part}.{copy['projection']}_basis.weight"
    own = tensors.get(name)
    if own is None or not (own.data_ptr() == tensor.data_ptr() or torch.equal(own, tensor)):
        raise CheckpointError(f"{copy[0]} differs from the basis in its layer, {name}")


def _by_shape(renamed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename A and B to U and V by their shapes; all pairs of a file have the same order.

    Dobi-SVD computes ``y = B A x``, ASVD ``y = A B x``. Dobi-SVD stores the bias on A; its bias on
    B is uninitialized and ignored.
    """
    found = {name: t for name, t in renamed.items() if ".A." not in name and ".B." not in name}
    owners = sorted({re.sub(r"\.[AB]\.(weight|bias)$", "", n) for n in renamed if n not in found})
    orders = {_a_is_v(owner, renamed) for owner in owners} - {None}
    if len(orders) != 1:
        raise CheckpointError("the shapes of ALinear and BLinear do not determine their order")
    a_is_v = orders.pop()
    for owner in owners:
        a, b = renamed[f"{owner}.A.weight"], renamed[f"{owner}.B.weight"]
        u, v = (b, a) if a_is_v else (a, b)
        if u.shape[1] != v.shape[0]:
            raise CheckpointError(f"{owner}: U {list(u.shape)} and V {list(v.shape)} do not match")
        bias = renamed.get(f"{owner}.A.bias")
        if not a_is_v and f"{owner}.B.bias" in renamed:
            raise CheckpointError(f"{owner}: a bias between the factors is not supported")
        if bias is None and f"{owner}.B.bias" in renamed:
            bias = renamed[f"{owner}.B.bias"]
        if owner == _HEAD and (bias is not None or _LM_HEAD in found):
            raise CheckpointError("a factorized LM head has a bias, or there is a second LM head")
        if owner == _HEAD:
            found[_LM_HEAD] = (u.float() @ v.float()).to(u.dtype)
            continue
        taken = {f"{owner}.weight", *([f"{owner}.bias"] if bias is not None else [])}
        if taken & found.keys():
            raise CheckpointError(f"{owner} is stored twice, factorized and dense")
        found[f"{owner}.u.weight"], found[f"{owner}.v.weight"] = u, v
        if bias is not None:
            found[f"{owner}.bias"] = bias
    return found


def _a_is_v(owner: str, renamed: Mapping[str, Tensor]) -> bool | None:
    """Return whether A is V according to the shapes of one pair; None if both orders fit."""
    a, b = renamed.get(f"{owner}.A.weight"), renamed.get(f"{owner}.B.weight")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2:
        raise CheckpointError(f"{owner} does not have two factor matrices")
    first, second = a.shape[0] == b.shape[1], b.shape[0] == a.shape[1]
    if first and second:  # both products are defined: the rank is the smaller size
        first, second = a.shape[0] < a.shape[1], b.shape[0] < b.shape[1]
    if not (first or second) and not a.shape == b.shape[::-1]:
        raise CheckpointError(f"{owner}: {list(a.shape)} and {list(b.shape)} do not match")
    return None if first == second else first
