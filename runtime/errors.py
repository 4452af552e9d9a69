"""The error tree of the runtime.

RuntimeFault
├── CheckpointError       a checkpoint cannot be read, or is of an unsupported kind
├── CompressionError      a factorization cannot be made
├── PlanError             a kernel plan cannot be read
├── KVFormatError         a KV format is unknown, cannot be loaded, or is malformed
├── OutOfPages            a sequence does not fit the page pool, now or ever
├── QueueFull             more sequences wait than the limits allow
├── NotFinite             the model's logits are no numbers: there is nothing to draw from
└── InvalidRequest        a sequence's parameters are outside the model's bounds
"""


class RuntimeFault(Exception):
    """Root of every error the runtime raises on purpose."""


class CheckpointError(RuntimeFault):
    """A checkpoint cannot be read: missing, malformed, or of an unsupported architecture."""


class CompressionError(RuntimeFault):
    """A factorization cannot be made from the given weights and statistics."""


class PlanError(RuntimeFault):
    """A kernel plan cannot be read."""


class KVFormatError(RuntimeFault):
    """A KV format is unknown, cannot be loaded, or does not have the interface."""


class OutOfPages(RuntimeFault):
    """The page pool cannot hold what was asked of it."""


class QueueFull(RuntimeFault):
    """More sequences wait than the limits allow."""


class NotFinite(RuntimeFault):
    """The model gave a sequence logits that are not finite."""


class InvalidRequest(RuntimeFault):
    """A sequence's tokens or sampling parameters are outside what the model accepts."""
