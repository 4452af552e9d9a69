"""Address and key of the deployment, and a command line that calls functions by name."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

URL = os.environ.get("HEADRACE_URL", "")
"""Base URL of the deployment, without /v1."""
MODEL = os.environ.get("HEADRACE_MODEL", "")
ENCODER = os.environ.get("HEADRACE_ENCODER", "")
"""Name of the model for embeddings."""
KEY = "unused"

QUESTION = "What is the capital of France?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Parameters of the tool `get_weather`."""


def run(*functions: Callable[[], Any]) -> None:
    """Call the function that the first argument names, and print its result as the last line."""
    (name,) = sys.argv[1:]
    result = {function.__name__: function for function in functions}[name]()
    print(f"\n{json.dumps(result)}")
