"""Which elements of a plane each chunk holds: the table that the compiled loops walk."""

import numpy as np
from torch import Tensor

from codec.cpu.tables import CHUNKS, Table
from codec.format import CHUNK, Geometry


def chunk_table(pages: Tensor, geometry: Geometry) -> Table:
    """`CHUNKS` `[chunks]`, in the chunks' order.

    Args:
        pages: int64 `[geometry.num_pages]`, the page ids in token order.
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
