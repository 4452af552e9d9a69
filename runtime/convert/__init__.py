"""Offline conversion of other projects' factorized checkpoints into canonical ones."""

from runtime.convert.convert import Source, convert
from runtime.convert.formats import SourceFormat

__all__ = ["Source", "SourceFormat", "convert"]
