"""Page groups of compressed formats."""

from torch import Tensor

from runtime.attention.base import Batch
from runtime.pages.groups import PageGroup, Part
from runtime.pages.window import SINK_PAGES, WINDOW

FULL_PRECISION = PageGroup("full_precision", Part.ENDS, SINK_PAGES, WINDOW)
"""Page group of full-precision K and V."""
COMPRESSED = PageGroup("compressed", Part.MIDDLE, SINK_PAGES, WINDOW)
"""Page group of the planes of compressed formats."""


def compressed_table(batch: Batch) -> Tensor | None:
    """Return the page table of the compressed pages of a decode batch; None for prompts."""
    return batch.page_tables[1] if batch.page_tables else None
