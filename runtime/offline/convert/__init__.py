"""Offline conversion of other projects' factorized checkpoints into canonical ones."""

from runtime.checkpoint.source_format import SourceFormat
from runtime.offline.convert.convert import Source, convert

__all__ = ["Source", "SourceFormat", "convert"]
