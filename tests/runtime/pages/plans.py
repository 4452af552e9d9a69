"""Page plans like those of the KV formats."""

from runtime.pages.groups import PageGroup, Part
from runtime.pages.plan import PagePlan
from runtime.pages.window import SINK_PAGES, WINDOW


def compressed_plan(
    page_size: int = 16, sink_pages: int = SINK_PAGES, window: int = WINDOW
) -> PagePlan:
    """The plan of a compressed format."""
    return PagePlan(
        page_size,
        (
            PageGroup("full_precision", Part.ENDS, sink_pages, window),
            PageGroup("compressed", Part.MIDDLE, sink_pages, window),
        ),
    )


def sliding_plan(page_size: int = 16, window: int = WINDOW) -> PagePlan:
    """The plan of a dense format of a model with full and sliding attention."""
    return PagePlan(page_size, (PageGroup("kv"), PageGroup("window", Part.ENDS, 0, window)))
