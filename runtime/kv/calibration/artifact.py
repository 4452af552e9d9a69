"""Results of a calibration as one safetensors file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from runtime.errors import CalibrationError

_METADATA = "headrace"
"""The only metadata entry, a JSON object. With several, their order would vary between runs."""


@dataclass(frozen=True)
class Artifact:
    """Result of a calibration, with the format and the model that it is for.

    Attributes:
        format: name of the KV format.
        version: version of the KV format.
        model_hash: `runtime.checkpoint.Checkpoint.model_hash` of the calibrated model.
        options: options of the calibration, JSON values.
        tensors: tensors by name, on the CPU.
    """

    format: str
    version: int
    model_hash: str
    options: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @cached_property
    def hash(self) -> str:
        """The sha256 of the file, in hex."""
        return sha256(self._content).hexdigest()

    @cached_property
    def _content(self) -> bytes:
        text = json.dumps(
            {
                "format": self.format,
                "version": self.version,
                "model_hash": self.model_hash,
                "options": dict(self.options),
            },
            sort_keys=True,
        )
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        return bytes(save_tensors(tensors, metadata={_METADATA: text}))

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_bytes(self._content)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            CalibrationError: the file cannot be read or is not an artifact.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CalibrationError(
                f"cannot read the calibration of a KV format: {error}; create it with "
                "`headrace calibrate --kv-format`"
            ) from error
        try:
            tensors = load_tensors(content)
            size = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + size])
            fields = json.loads(header["__metadata__"][_METADATA])
            found = cls(
                str(fields["format"]),
                int(fields["version"]),
                str(fields["model_hash"]),
                dict(fields["options"]),
                tensors,
            )
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CalibrationError(
                f"{path} is not a calibration of a KV format: {error}"
            ) from error
        # The hash must be that of the file, even if another version of safetensors wrote it.
        found.__dict__["_content"] = content
        return found

    def check(self, name: str, version: int, model_hash: str) -> None:
        """Check that the calibration is for this format, version and model.

        Args:
            model_hash: hash of the model to be served; empty to accept a calibration of any model.

        Raises:
            CalibrationError: it is for another format, version or model.
        """
        if (self.format, self.version) != (name, version):
            raise CalibrationError(
                f"this calibration is of KV format {self.format} version {self.version}, "
                f"not of {name} version {version}: calibrate again"
            )
        if model_hash and self.model_hash != model_hash:
            raise CalibrationError(
                f"this calibration of KV format {name} belongs to model {self.model_hash}, "
                f"not to {model_hash}: calibrate again"
            )

    def tensor(
        self, name: str, shape: tuple[int | None, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return a tensor.

        Args:
            shape: required shape; None accepts any size.

        Raises:
            CalibrationError: it is missing, has another shape or dtype, or has values that are not
                finite.
        """
        found = self.tensors.get(name)
        if found is None:
            raise CalibrationError(f"the calibration of {self.format} has no tensor {name!r}")
        fits = found.ndim == len(shape) and all(
            required in (None, size) for required, size in zip(shape, found.shape, strict=True)
        )
        if not fits or found.dtype != dtype:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise CalibrationError(
                f"calibration of {self.format}: {name!r} is {found.dtype} {list(found.shape)}, "
                f"but this model needs {dtype} [{wanted}]"
            )
        if dtype.is_floating_point and not found.isfinite().all():
            raise CalibrationError(f"calibration of {self.format}: {name!r} has NaN or infinity")
        return found

    def check_layers(self, num_layers: int, prefix: str) -> None:
        """Check that the tensors ``prefix.<layer>`` are those of ``num_layers`` layers.

        Raises:
            CalibrationError: there are more or fewer.
        """
        count = sum(name.startswith(f"{prefix}.") for name in self.tensors)
        if count != num_layers:
            raise CalibrationError(
                f"the calibration of {self.format} has {count} layers, but this model {num_layers}"
            )
