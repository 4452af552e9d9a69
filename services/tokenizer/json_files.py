"""JSON files of a Hugging Face directory."""

import json
from pathlib import Path
from typing import Any

from services.tokenizer.pieces import TokenizerError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no such file.

    Raises:
        TokenizerError: if the content is not an object.
    """
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TokenizerError(f"{path.name} is not a JSON object")
    return content
