"""Text files to calibrate on."""

from collections.abc import Sequence
from pathlib import Path

from services.common.errors import SettingsError


def read_texts(files: Sequence[Path]) -> str:
    """Return the contents of UTF-8 text files, joined in order.

    Raises:
        SettingsError: a file cannot be read.
    """
    try:
        return "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the calibration text: {error}") from error
