"""A decode step as one launch (`kernels.step`): weights as it reads them, its list of passes, and
the same weights layer by layer."""

from runtime.step.decode_step import MOST, DecodeStep
from runtime.step.layers import StepProjection, parts_of
from runtime.step.plan import KernelPlan
from runtime.step.products import Norm
from runtime.step.weights import StepWeights, refusal

__all__ = [
    "MOST",
    "DecodeStep",
    "KernelPlan",
    "Norm",
    "StepProjection",
    "StepWeights",
    "parts_of",
    "refusal",
]
