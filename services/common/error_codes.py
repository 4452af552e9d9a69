"""Names of the error codes that services exchange."""

from headrace.v1 import error_pb2


def error_reason(code: "error_pb2.ErrorCode.ValueType") -> str:
    """Return the name of an error code for labels, such as ``prefill_lost``."""
    if code not in error_pb2.ErrorCode.values():
        return "unknown"
    return error_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_").lower()
