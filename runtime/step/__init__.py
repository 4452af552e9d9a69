"""A decode step of a few sequences as one launch: what it reads, in which order, and the launch.

The kernel, and how its programs work together, are in `runtime/kernels/step`.
"""

from runtime.step.decode_step import MOST, DecodeStep
from runtime.step.layers import parts_of
from runtime.step.weights import StepWeights, refusal

__all__ = ["MOST", "DecodeStep", "StepWeights", "parts_of", "refusal"]
