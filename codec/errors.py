"""Exceptions of the codec.

CodecError
├── PayloadError          the payload cannot be decoded
│   ├── FormatError       a header field, an entry start or an entry is invalid
│   │   └── TruncatedPayload   the payload is shorter than its header states
│   ├── CodebookMismatch  the payload was encoded with another codebook
│   └── ChecksumMismatch  the decoded content differs from the encoded content
├── ArgumentError         an argument is invalid or does not fit the others
│   ├── UnsupportedDtype  a dtype that the codec does not store
│   ├── InvalidPlanes     invalid shape, strides, device or number of planes
│   ├── InvalidPages      page ids out of range or repeated, or too many or too few of them
│   ├── ShapeMismatch     a shape with another number of elements than the payload
│   └── InvalidBuffer     wrong dtype, shape, layout or device of a payload or an output
│       └── BufferTooSmall     the output is shorter than the largest possible segment
└── CodebookError
    ├── InvalidCodebook   exponents that do not fit the mode, an empty sample, a damaged artifact,
    │                     codebooks of different dtypes in one model
    └── CodebookMissing   the artifact has no codebook for a (layer, plane)

A `PayloadError` is caused by the sender or the transfer and may be retried. The other errors are
caused by the caller.
"""


class CodecError(Exception):
    """Base class of the codec's exceptions."""


class PayloadError(CodecError):
    """The payload cannot be decoded."""


class FormatError(PayloadError):
    """A header field, an entry start or an entry is invalid.

    On a CPU nothing was written. On a GPU the destination may hold garbage.
    """


class TruncatedPayload(FormatError):
    """The payload is shorter than its header states. Nothing was written."""


class CodebookMismatch(PayloadError):
    """The payload was encoded with another codebook than the given one. Nothing was written."""


class ChecksumMismatch(PayloadError):
    """The decoded content differs from the encoded content.

    The destination was already written and holds garbage, which the caller must discard.
    """


class ArgumentError(CodecError):
    """An argument is invalid, or does not fit the other arguments."""


class UnsupportedDtype(ArgumentError):
    """The codec does not store this dtype."""


class InvalidPlanes(ArgumentError):
    """The shape, strides, device or number of the planes is invalid."""


class InvalidPages(ArgumentError):
    """Page ids are out of range or repeated, or their number does not fit the number of tokens."""


class ShapeMismatch(ArgumentError):
    """The shape has another number of elements than the payload."""


class InvalidBuffer(ArgumentError):
    """A payload or an output has the wrong dtype, shape, layout or device."""


class BufferTooSmall(InvalidBuffer):
    """The output is shorter than the largest possible segment. Nothing was written."""


class CodebookError(CodecError):
    """A codebook cannot be built, read or found."""


class InvalidCodebook(CodebookError):
    """The exponents do not fit the mode, the sample is empty, or the artifact is damaged."""


class CodebookMissing(CodebookError):
    """The artifact has no codebook for this (layer, plane)."""
