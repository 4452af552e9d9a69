"""Table of the chunks of a plane, for the compiled loops."""

import numpy as np
from torch import Tensor

from codec.cpu.tables import CHUNKS, Table
from codec.format import CHUNK, Geometry


def chunk_table(pages: Tensor, geometry: Geometry) -> Table:
    """Return a table of `CHUNKS` records, one for each chunk of a plane, in segment order.

    Args:
        pages: int64 `[geometry.num_pages]` page ids, in token order.
        geometry: geometry of the segment.
    """
    runs = [
        (page, 0, start, min(CHUNK, run - start))
        for page, run in zip(pages.tolist(), geometry.head_runs, strict=True)
        for start in range(0, run, CHUNK)
    ]
    one_head = np.array(runs, dtype=CHUNKS)
    table = np.tile(one_head, geometry.kv_heads)
    table["head"] = np.repeat(np.arange(geometry.kv_heads), len(one_head))
    return table
