"""Everything that can go wrong in the codec.

CodecError
├── PayloadError          the bytes are not what they should be
│   ├── FormatError       a header field, a start or an entry is invalid
│   │   └── TruncatedPayload   fewer bytes than the header announces
│   ├── CodebookMismatch  encoded with another codebook, or with none
│   └── ChecksumMismatch  everything parsed, but is not what was encoded
├── ArgumentError         the caller's tensors do not fit the call
│   ├── UnsupportedDtype  an element type that the codec does not carry
│   ├── InvalidPlanes     shapes, strides, devices or counts of planes
│   ├── InvalidPages      page ids out of range, repeated, or of the wrong number
│   └── InvalidBuffer     a payload or output of another kind than the call needs
│       └── BufferTooSmall     the output cannot hold the largest payload
└── CodebookError
    ├── InvalidCodebook   exponents that do not fit the mode, an empty sample, a damaged artifact,
    │                     codebooks of several element types together
    └── CodebookMissing   the artifact has no codebook for a (layer, plane)

A `PayloadError` blames the sender or the wire and may be retried; the other two blame the caller.
"""


class CodecError(Exception):
    """Root of the codec's errors."""


class PayloadError(CodecError):
    """The payload cannot be decoded."""


class FormatError(PayloadError):
    """A header field, a start or an entry is invalid. Nothing was written."""


class TruncatedPayload(FormatError):
    """The payload ends before its header says so. Nothing was written."""


class CodebookMismatch(PayloadError):
    """The payload names another codebook than the given one. Nothing was written."""


class ChecksumMismatch(PayloadError):
    """The payload is not what was encoded.

    The destination was written by then: it holds garbage, and the caller discards it.
    """


class ArgumentError(CodecError):
    """The arguments of a call do not fit one another."""


class UnsupportedDtype(ArgumentError):
    """The codec does not carry this element type."""


class InvalidPlanes(ArgumentError):
    """The planes' shapes, strides, devices or number do not fit the call."""


class InvalidPages(ArgumentError):
    """Page ids are out of range, repeated, or not as many as the tokens need."""


class InvalidBuffer(ArgumentError):
    """A payload or an output has another dtype, shape, layout or device than the call needs."""


class BufferTooSmall(InvalidBuffer):
    """The output cannot hold the largest payload of this input. Nothing was written."""


class CodebookError(CodecError):
    """A codebook cannot be made, read or found."""


class InvalidCodebook(CodebookError):
    """Exponents that do not fit the mode, an empty sample, a damaged artifact, or mixed types."""


class CodebookMissing(CodebookError):
    """The artifact has no codebook for this (layer, plane)."""
