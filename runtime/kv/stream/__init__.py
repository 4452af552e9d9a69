"""KV formats `stream8`, `stream4` and `stream4-qjl`: data-oblivious Lloyd-Max codes."""

from runtime.kv.stream.reference import Stream4Format, Stream8Format

__all__ = ["Stream4Format", "Stream8Format"]
