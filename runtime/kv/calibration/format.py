"""Base class of the KV formats that read a calibration."""

import os
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import torch

from runtime.config import ModelConfig
from runtime.errors import CalibrationError
from runtime.kv.calibration.artifact import Artifact
from runtime.kv.compressed import CompressedFormat, CompressedLayer
from runtime.kv.format import Plane

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.gpu import CompressedPageKernels
    from runtime.kv.kernel_source import KernelSource

LayerT = TypeVar("LayerT", bound=CompressedLayer)


class CalibratedFormat(CompressedFormat, Generic[LayerT]):
    """A compressed format with layers read from an artifact.

    Subclasses define ``name``, ``version``, `planes` and `_read_layers`.

    Args:
        config: model to be served.
        artifact: calibration of this format, with a tensor ``k_basis.<layer>`` for each layer.
        model_hash: hash of the model to be served; empty to skip the comparison.

    Raises:
        CalibrationError: the artifact belongs to another model or format.
        KVFormatError: the format does not support the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        artifact: Artifact,
        model_hash: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        artifact.check(self.name, self.version, model_hash)
        artifact.check_layers(config.num_layers, "k_basis")
        self.artifact_hash = artifact.hash
        self._config = config
        self._layers = self._read_layers(artifact, device)

    @classmethod
    def load(
        cls,
        path: Path,
        config: ModelConfig,
        model_hash: str = "",
        device: torch.device | str = "cpu",
    ) -> Self:
        """Read an artifact.

        Raises:
            CalibrationError: it cannot be read, or belongs to another model or format.
            KVFormatError: the format does not support the model.
        """
        artifact = Artifact.load(path)
        try:
            return cls(config, artifact, model_hash, device)
        except CalibrationError as error:
            raise CalibrationError(f"{path}: {error}") from error

    @abstractmethod
    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        """Return the compressed planes of one layer, in the order in which they are sent."""

    @abstractmethod
    def describe(self, layer: int) -> str:
        """Return the ranks or bits of one layer as text."""

    def layer(self, index: int) -> LayerT:
        """Return the encoding of one layer."""
        return self._layers[index]

    def kernel_source(self) -> "KernelSource":
        """Return the format's Triton functions; called only where Triton is installed."""
        raise NotImplementedError(f"KV format {self.name} has no kernels")

    @cached_property
    def _kernels(self) -> "CompressedPageKernels":
        from runtime.kv.gpu import CompressedPageKernels

        return CompressedPageKernels(self._config, self.kernel_source())

    def kernels(self, device: torch.device) -> "CompressedPageKernels | None":
        """Return the fused kernels that the layers share; None if they do not run on a device.

        They run on GPUs, and on CPUs in Triton's interpreter.
        """
        on_device = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
        return self._kernels if self.fused and on_device else None

    @abstractmethod
    def _read_layers(self, artifact: Artifact, device: torch.device | str) -> list[LayerT]:
        """Return the encodings of all layers, with their tensors on ``device``.

        Raises:
            CalibrationError: a tensor is missing or does not fit the model ``self._config``.
        """
