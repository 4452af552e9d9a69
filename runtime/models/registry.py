"""Find the family of a model, and register families.

Families outside this package are found in two ways: a package lists them under the entry-point
group ``headrace.models``, as in

    [project.entry-points."headrace.models"]
    neox = "my_package.neox:NEOX"

or a program calls `register` before it loads a checkpoint.
"""

from typing import Any

from runtime.checkpoint.family import family_of, register
from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.models.family import ModelFamily

__all__ = ["model_family", "register"]


def model_family(config: ModelConfig) -> ModelFamily[Any]:
    """Return the family that implements a model's architecture.

    Raises:
        CheckpointError: no family supports the architecture, or the family has no forward pass.
    """
    family = family_of(config.architecture)
    if not isinstance(family, ModelFamily):
        raise CheckpointError(f"the {family.name} family has no forward pass")
    return family
