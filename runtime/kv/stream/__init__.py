"""KV formats `stream8`, `stream4` and `stream4-qjl`: data-oblivious Lloyd-Max codes."""

from runtime.kv.stream.reference import StreamFormat

__all__ = ["StreamFormat"]
