"""The error tree of the runtime.

RuntimeFault
├── CheckpointError       a checkpoint cannot be read or is not supported
├── CompressionError      a model cannot be factorized as requested
├── PlanError             a kernel plan cannot be read
├── KVFormatError         a KV format is unknown, cannot be loaded, or is malformed
│   └── CalibrationError  the calibration of a KV format is missing, or does not fit
├── QualityError          the quality of a format cannot be measured, or results not be compared
├── OutOfPages            the page pool is too small for a sequence
├── QueueFull             the limit of waiting sequences is reached
├── NotFinite             logits are NaN or infinite
├── GrammarFailed         the tokens that a grammar allows cannot be computed
├── NotCached             pages of a prefix are not cached, or are evicted
├── PeerAccessError       GPUs of a worker cannot access the memory of one another
├── EventTimeout          a rank did not launch a step in time
├── RankTimeout           a rank did not take the messages of the first rank in time
├── RanksDisagree         ranks of a worker did not compute the same steps or tokens
├── FirstRankEnded        the first rank of a worker ended without ending the other ranks
└── InvalidRequest        a request is outside the model's bounds
"""


class RuntimeFault(Exception):
    """Base class of all errors of the runtime."""


class CheckpointError(RuntimeFault):
    """A checkpoint is missing, malformed or of an unsupported architecture."""


class CompressionError(RuntimeFault):
    """A model cannot be factorized with the given weights, tokens and settings."""


class PlanError(RuntimeFault):
    """A kernel plan cannot be read."""


class KVFormatError(RuntimeFault):
    """A KV format is unknown, cannot be loaded, or does not implement the interface."""


class CalibrationError(KVFormatError):
    """A calibration is missing or malformed, or is for another format, version or model."""


class QualityError(RuntimeFault):
    """The quality of a KV format cannot be measured, or results cannot be compared."""


class OutOfPages(RuntimeFault):
    """The page pool has too few free pages, or is too small for the sequence."""


class QueueFull(RuntimeFault):
    """The number of waiting sequences has reached its limit."""


class NotFinite(RuntimeFault):
    """A sequence's logits are NaN or infinite, so no token can be sampled."""


class GrammarFailed(RuntimeFault):
    """A grammar allows no token, or finding those that it allows takes more work than allowed."""


class NotCached(RuntimeFault):
    """The KV of a prefix is not in cached pages, for example because they were evicted."""


class PeerAccessError(RuntimeFault):
    """The GPUs of a worker's ranks cannot access the memory of one another."""


class EventTimeout(RuntimeFault):
    """An event was not recorded in time, for example because a rank did not launch its step."""


class RankTimeout(RuntimeFault):
    """A rank did not take the messages of the first rank of its worker in time."""


class RanksDisagree(RuntimeFault):
    """A rank sampled other tokens than the first rank, or lost one of its messages."""


class FirstRankEnded(RuntimeFault):
    """The first rank of a worker ended without ending the other ranks."""


class InvalidRequest(RuntimeFault):
    """A request's tokens or sampling parameters are outside the model's bounds."""
