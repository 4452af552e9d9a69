"""Offline conversion of other codes' factorized checkpoints into canonical ones."""

from runtime.convert.convert import Source, convert
from runtime.convert.formats import SourceFormat

__all__ = ["Source", "SourceFormat", "convert"]
