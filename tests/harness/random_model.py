"""Models of random weights at real shapes, with codebooks for their KV.

``python -m tests.harness.random_model`` writes one model. The benchmark runs it as a separate
process, so that the GPU memory that it uses is free again when a deployment starts.
"""

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.cache import cache_dir
from services.common.errors import SettingsError
from services.common.model_source import DEFAULT_MODEL, resolve_model
from services.local.artifacts import CODEBOOKS, artifact_folder
from services.local.lock import locked
from services.local.seal import seal
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer

_FOLDER = "bench-models-2"  # 2: the version of `runtime.checkpoint.canonical.FORMAT`
WRITE_S = 900.0
"""Time limit for writing one model, in seconds."""


@dataclass(frozen=True)
class RandomModel:
    """A model of random weights.

    Attributes:
        shape: key of `runtime.offline.bench.shapes.SHAPES`; the vocabulary is that of the
            tokenizer.
        keep: fraction of parameters that factor pairs keep; 1 for dense layers.
        tokenizer: name or path of the model that has the tokenizer.
    """

    shape: str
    keep: float = 1.0
    tokenizer: str = DEFAULT_MODEL

    @property
    def name(self) -> str:
        return f"{self.shape}-" + ("dense" if self.keep >= 1 else f"keep{self.keep:g}")

    @property
    def folder(self) -> Path:
        """Folder of the model in the cache; one for each tokenizer."""
        return cache_dir() / _FOLDER / resolve_model(self.tokenizer).stem / self.name

    def ensure(self) -> Path:
        """Write the model unless the cache has it, and return its folder.

        Waits while another process writes the same model.

        Raises:
            SettingsError: if the model cannot be written.
        """
        with locked(self.folder.with_name(f"{self.name}.lock"), wait=True):
            if self.folder.exists():
                return self.folder
            command = [sys.executable, "-m", "tests.harness.random_model", self.shape]
            command += ["--keep", str(self.keep), "--tokenizer", self.tokenizer]
            try:
                subprocess.run(command, check=True, timeout=WRITE_S)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                raise SettingsError(f"model {self.name} was not written: {error}") from error
        return self.folder


def write(model: RandomModel) -> None:
    """Write a model and the codebooks that `headrace up` looks for, on the GPU if there is one."""
    import torch

    from runtime.offline.bench.shapes import SHAPES, random_checkpoint
    from services.offline.output import write_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(resolve_model(model.tokenizer))
    config = replace(SHAPES[model.shape], vocab_size=tokenizer.vocab_size)
    with torch.inference_mode():
        checkpoint = random_checkpoint(config, model.keep, device=device, on_demand=True)
        # A logit of 0 is never the greatest of a vocabulary of random ones.
        checkpoint.lm_head[_tokens_to_avoid(tokenizer)] = 0
        model.folder.parent.mkdir(parents=True, exist_ok=True)
        write_model(checkpoint, tokenizer, model.folder)
        del checkpoint
    try:
        _calibrate(model.folder)
    except BaseException:
        shutil.rmtree(model.folder)  # the next run would find a model without codebooks
        raise


def _tokens_to_avoid(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end an answer, and those without complete text of their own.

    A server sends no event for a token without text, so that gaps between events would differ from
    gaps between tokens.
    """
    silent = [at for at, piece in enumerate(tokenizer.visible_pieces) if not _is_text(piece)]
    return [*tokenizer.eos_ids, *silent]


def _is_text(piece: bytes) -> bool:
    try:
        return bool(piece.decode())
    except UnicodeDecodeError:
        return False


def _calibrate(folder: Path) -> None:
    """Write codebooks of the model's KV where `headrace up` looks for them."""
    from services.offline.calibrate import calibrate

    artifacts = artifact_folder(folder, None)
    artifacts.mkdir(parents=True, exist_ok=True)
    path = artifacts / f"codebooks-{CODEBOOKS}.json"
    calibrate(str(folder), str(folder), path)
    seal(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.random_model")
    parser.add_argument("shape", help="key of runtime.offline.bench.shapes.SHAPES")
    parser.add_argument("--keep", type=float, default=1.0, help="1 for dense layers")
    parser.add_argument("--tokenizer", default=DEFAULT_MODEL, help="name or path of a model")
    own = parser.parse_args()
    write(RandomModel(own.shape, own.keep, own.tokenizer))


if __name__ == "__main__":
    main()
