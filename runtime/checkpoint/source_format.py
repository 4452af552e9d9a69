"""Detection of the project that wrote a checkpoint, from the names of its tensors.

Servers read none of the factorized formats below. `runtime.offline.convert` converts them.
"""

import re
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

from runtime.errors import CheckpointError


class SourceFormat(StrEnum):
    """Formats that `runtime.offline.convert` reads.

    Attributes:
        DENSE: no factor pairs; the linear of q is ``q_proj``.
        SVD_LLM: U and V of q are ``q_u_proj`` and ``q_v_proj``, those of OPT's fc1 ``fc1_u_proj``
            and ``fc1_v_proj``.
        SVD_LLM_V2: U and V of q are ``q_proj.u_proj`` and ``q_proj.v_proj``.
        LINEAR_PAIR: U and V of q are ``q_proj.ALinear`` and ``q_proj.BLinear``, or the reverse.
            These two also occur in encoders, where q is ``attention.self.query``.
        BASIS_SHARING: U of q is ``q_proj``, and V ``q_basis``, which layers share.
    """

    DENSE = "dense"
    SVD_LLM = "svd-llm"
    SVD_LLM_V2 = "svd-llm-v2"
    LINEAR_PAIR = "dobi-svd or asvd"
    BASIS_SHARING = "basis-sharing"


PROJECTION = r"(?P<projection>q|k|v|o|gate|up|down)"
_OF_LAYER = r"(?P<layer>model\.layers\.\d+\.(?:self_attn|mlp)\.)"
_ANY_LAYER = r"(?P<layer>model\.(?:decoder\.)?layers\.\d+\.(?:self_attn\.|mlp\.)?)"
_PROJECTED = r"q|k|v|o|out|gate|up|down"
_LINEAR = rf"(?P<linear>(?:{_PROJECTED})_proj|fc[12])"
"""Pattern of a linear's module name. All but OPT's fc1 and fc2 end with ``_proj``."""
_OF_ENCODER = (
    r"(?P<encoder>(?:(?:bert|roberta)\.)?encoder\.layer\.\d+\."
    r"(?:attention\.self\.(?:query|key|value)|(?:attention\.output|intermediate|output)\.dense))"
)
"""Pattern of a linear of an encoder, with its layer."""
_END = r"\.(?P<kind>weight|bias)"
PATTERNS = {
    SourceFormat.SVD_LLM: re.compile(
        rf"{_ANY_LAYER}(?P<linear>{_PROJECTED}|fc[12])_(?P<factor>[uv])_proj{_END}"
    ),
    SourceFormat.SVD_LLM_V2: re.compile(
        rf"(?:{_ANY_LAYER}{_LINEAR}|{_OF_ENCODER})\.(?P<factor>[uv])_proj{_END}"
    ),
    SourceFormat.LINEAR_PAIR: re.compile(
        rf"(?:{_ANY_LAYER}{_LINEAR}|{_OF_ENCODER}|lm_head)\.(?P<factor>[AB])Linear{_END}"
    ),
    SourceFormat.BASIS_SHARING: re.compile(
        rf"{_OF_LAYER}(?P<linear>{_PROJECTED})_(?P<factor>basis){_END}"
    ),
}


def format_of(names: Collection[str]) -> SourceFormat:
    """Return the format of a checkpoint with these tensors.

    Raises:
        CheckpointError: names of several factorized formats occur.
    """
    found = {
        source_format
        for source_format, pattern in PATTERNS.items()
        if any(pattern.fullmatch(name) for name in names)
    }
    if len(found) > 1:
        raise CheckpointError(f"tensors of several formats: {', '.join(sorted(found))}")
    return found.pop() if found else SourceFormat.DENSE


def conversion(path: Path) -> str:
    """Return what to do with a checkpoint that must be converted, as the end of a message."""
    folder = path if path.is_dir() else path.parent
    tokenizer = "" if (folder / "tokenizer.json").is_file() else " --tokenizer ORIGINAL_MODEL"
    return f"convert it with `headrace convert --model {path} --out FOLDER{tokenizer}`"
