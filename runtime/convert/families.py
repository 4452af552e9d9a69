"""Whose names a factorized checkpoint's tensors have, and what they are in ours.

`y = U (V x) + b`. Where a family's names say less than its shapes, shapes decide.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from runtime.checkpoint.assemble import LM_HEAD
from runtime.errors import CheckpointError


class Family(StrEnum):
    """The codes whose checkpoints are read, and how they name the factors of ``q_proj``."""

    DENSE = "dense"  # q_proj
    SVD_LLM = "svd-llm"  # q_u_proj, q_v_proj
    SVD_LLM_V2 = "svd-llm-v2"  # q_proj.u_proj, q_proj.v_proj
    LINEAR_PAIR = "dobi-svd or asvd"  # q_proj.ALinear, q_proj.BLinear, in either order
    BASIS_SHARING = "basis-sharing"  # q_proj is U, q_basis is V, of several layers


_PROJECTION = r"(?P<projection>q|k|v|o|gate|up|down)"
_OF_LAYER = r"(?P<layer>model\.layers\.\d+\.(?:self_attn|mlp)\.)"
_END = r"\.(?P<kind>weight|bias)"
_PATTERNS = {
    Family.SVD_LLM: re.compile(rf"{_OF_LAYER}{_PROJECTION}_(?P<factor>[uv])_proj{_END}"),
    Family.SVD_LLM_V2: re.compile(rf"{_OF_LAYER}{_PROJECTION}_proj\.(?P<factor>[uv])_proj{_END}"),
    Family.LINEAR_PAIR: re.compile(
        rf"(?:{_OF_LAYER}{_PROJECTION}_proj|lm_head)\.(?P<factor>[AB])Linear{_END}"
    ),
    Family.BASIS_SHARING: re.compile(rf"{_OF_LAYER}{_PROJECTION}_(?P<factor>basis){_END}"),
}
_HEAD = LM_HEAD.removesuffix(".weight")
_BASIS_COPY = re.compile(rf"model\.{_PROJECTION}_basis\.(?P<number>\d+)\.weight")
_IGNORED = re.compile(r".*\.rotary_emb\..*")
_OTHERS = {
    "us_quan": "Dobi-SVD's remapped 8-bit weights",
    "fc1_u_proj": "OPT",
    "decoder.layers.": "OPT",
    "transformer.h.": "GPT-2",
}


@dataclass(frozen=True)
class Named:
    """Tensors under canonical names, and which family's they were."""

    family: Family
    tensors: dict[str, Tensor]
    head_was_factorized: bool = False


def to_canonical(tensors: Mapping[str, Tensor]) -> Named:
    """Rename the tensors of a state dict, of whatever family it is.

    Raises `CheckpointError` for a family that is not read, for two in one file, and for factors
    that do not fit together.
    """
    for mark, whose in _OTHERS.items():
        if any(mark in name for name in tensors):
            raise CheckpointError(f"{whose} is not supported")
    family = _family_of(tensors)
    renamed: dict[str, Tensor] = {}
    for name, tensor in _renamed(family, tensors):
        if name in renamed:
            raise CheckpointError(f"{name} is there twice, under different names")
        renamed[name] = tensor
    if family is not Family.LINEAR_PAIR:
        return Named(family, renamed)
    return Named(family, _by_shape(renamed), f"{_HEAD}.A.weight" in renamed)


def _family_of(names: Mapping[str, Tensor]) -> Family:
    found = {
        family
        for family, pattern in _PATTERNS.items()
        if any(pattern.fullmatch(name) for name in names)
    }
    if len(found) > 1:
        raise CheckpointError(f"tensors of several families: {', '.join(sorted(found))}")
    return found.pop() if found else Family.DENSE


def _renamed(family: Family, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    pattern = _PATTERNS.get(family)
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name) if pattern else None
        if _IGNORED.fullmatch(name):
            continue
        if match is None:
            yield from _unmatched(family, name, tensor, tensors)
            continue
        owner = _HEAD
        if match["layer"]:
            owner = f"{match['layer']}{match['projection']}_proj"
        factor = "v" if match["factor"] == "basis" else match["factor"]
        if match["kind"] == "bias" and family in (Family.SVD_LLM, Family.SVD_LLM_V2):
            if factor == "v":
                raise CheckpointError(f"{name}: a bias between the factors is not supported")
            yield f"{owner}.bias", tensor
        else:
            yield f"{owner}.{factor}.{match['kind']}", tensor


def _unmatched(
    family: Family, name: str, tensor: Tensor, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """A name that is Hugging Face's, unless basis sharing means something else by it."""
    if family is Family.BASIS_SHARING:
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
    """The model lists its bases once more, by layer; they must be those of the layers."""
    part = "mlp" if copy["projection"] in ("gate", "up", "down") else "self_attn"
    name = f"model.layers.{copy['number']}.{part}.{copy['projection']}_basis.weight"
    own = tensors.get(name)
    if own is None or not (own.data_ptr() == tensor.data_ptr() or torch.equal(own, tensor)):
        raise CheckpointError(f"{copy[0]} is not the basis of its layer, {name}")


def _by_shape(renamed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Which of A and B is V: Dobi-SVD's ``y = B A x``, ASVD's ``y = A B x``. One for a whole file.

    Dobi-SVD puts the bias of the whole on A and leaves one on B that was never set.
    """
    found = {name: t for name, t in renamed.items() if ".A." not in name and ".B." not in name}
    owners = sorted({re.sub(r"\.[AB]\.(weight|bias)$", "", n) for n in renamed if n not in found})
    orders = {_a_is_v(owner, renamed) for owner in owners} - {None}
    if len(orders) != 1:
        raise CheckpointError("factors named ALinear and BLinear do not say which comes first")
    a_is_v = orders.pop()
    for owner in owners:
        a, b = renamed[f"{owner}.A.weight"], renamed[f"{owner}.B.weight"]
        u, v = (b, a) if a_is_v else (a, b)
        if u.shape[1] != v.shape[0]:
            raise CheckpointError(f"{owner}: U {list(u.shape)} and V {list(v.shape)} do not fit")
        bias = renamed.get(f"{owner}.A.bias")
        if not a_is_v and f"{owner}.B.bias" in renamed:
            raise CheckpointError(f"{owner}: a bias between the factors is not supported")
        if bias is None and f"{owner}.B.bias" in renamed:
            bias = renamed[f"{owner}.B.bias"]
        if owner == _HEAD and (bias is not None or LM_HEAD in found):
            raise CheckpointError("a factorized head with a bias, or beside another head")
        if owner == _HEAD:
            found[LM_HEAD] = (u.float() @ v.float()).to(u.dtype)
            continue
        taken = {f"{owner}.weight", *([f"{owner}.bias"] if bias is not None else [])}
        if taken & found.keys():
            raise CheckpointError(f"{owner} is there twice, factorized and not")
        found[f"{owner}.u.weight"], found[f"{owner}.v.weight"] = u, v
        if bias is not None:
            found[f"{owner}.bias"] = bias
    return found


def _a_is_v(owner: str, renamed: Mapping[str, Tensor]) -> bool | None:
    """Whether A comes first, by the shapes of one pair; None if they do not say."""
    a, b = renamed.get(f"{owner}.A.weight"), renamed.get(f"{owner}.B.weight")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2:
        raise CheckpointError(f"{owner} has one factor of two")
    first, second = a.shape[0] == b.shape[1], b.shape[0] == a.shape[1]
    if first and second:  # both products exist: a factor pair is thinner in the middle
        first, second = a.shape[0] < a.shape[1], b.shape[0] < b.shape[1]
    if not (first or second) and not a.shape == b.shape[::-1]:
        raise CheckpointError(f"{owner}: {list(a.shape)} and {list(b.shape)} do not fit")
    return None if first == second else first
