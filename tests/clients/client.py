"""Calls of functions in `programs`, each in a process of the client's environment."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.environments import NODE_PACKAGES, node_modules, python_of
from tests.harness.deployment import Running

ENCODER = "all-MiniLM-L6-v2"
"""Name of the encoder that the deployment serves."""
PROGRAMS = Path(__file__).parent / "programs"
_NOT_INHERITED = ("PYTHONPATH", "OPENAI_", "ANTHROPIC_", "LANGSMITH_", "LANGCHAIN_", "LITELLM_")
_SET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
}


@dataclass(frozen=True)
class Client:
    """A client package.

    Attributes:
        environment: name of its requirements file, without suffix.
        program: name of its module in `programs`.
    """

    environment: str
    program: str

    def call(
        self, running: Running, function: str, *, timeout_s: float = 240, **variables: str
    ) -> Any:
        """Return the result of a function of the program.

        Args:
            variables: environment variables of the process.

        Raises:
            AssertionError: with the end of the output, if the function raises an error.
        """
        command = [str(python_of(self.environment)), str(PROGRAMS / f"{self.program}.py"), function]
        output = output_of(command, variables_of(running) | variables, timeout_s)
        return json.loads(output.splitlines()[-1])


@dataclass(frozen=True)
class NodeClient:
    """A client package for Node.js.

    Attributes:
        program: name of its module in `node`.
    """

    program: str

    def call(self, running: Running, function: str) -> Any:
        """Return the result of a function of the program.

        Raises:
            AssertionError: with the end of the output, if the function raises an error.
        """
        folder = node_modules()  # modules import packages from the folder in which they are
        for file in NODE_PACKAGES.glob("*.mjs"):
            shutil.copy(file, folder)
        command = ["node", str(folder / f"{self.program}.mjs"), function]
        output = output_of(command, variables_of(running), 240)
        return json.loads(output.splitlines()[-1])


def output_of(command: list[str], variables: dict[str, str], timeout_s: float) -> str:
    """Return what a command prints.

    Raises:
        AssertionError: with the end of the output, if it fails.
    """
    result = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=timeout_s
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}{result.stderr[-6000:]}"
    return result.stdout


def variables_of(running: Running) -> dict[str, str]:
    """Return the environment of a process that uses a deployment."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    served = {"HEADRACE_MODEL": running.model, "HEADRACE_ENCODER": ENCODER}
    return own | _SET | served | {"HEADRACE_URL": running.url}
