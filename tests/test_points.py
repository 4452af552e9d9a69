"""Points at which fault tests hold processes."""

import asyncio
from pathlib import Path

import pytest

from tests.harness.points import Points


async def test_first_process_at_a_point_is_returned_and_others_may_pass(tmp_path: Path) -> None:
    points = Points(tmp_path)
    points.hold("pull", ["decode-0", "decode-1"])
    waiting = asyncio.create_task(points.reached("pull"))
    await asyncio.sleep(0)
    points.set("decode-1.pull.reached", "")
    assert await waiting == "decode-1"
    assert points.is_set("decode-1.pull.hold")
    assert not points.is_set("decode-0.pull.hold")


async def test_wait_for_a_point_that_no_process_reaches_ends(tmp_path: Path) -> None:
    points = Points(tmp_path)
    points.hold("pull", ["decode-0", "decode-1"])
    points.hold("queued", ["prefill-0"])
    message = "no process reached the point 'pull' within 0.1 s; held there: decode-0, decode-1"
    with pytest.raises(TimeoutError, match=message):
        await points.reached("pull", limit_s=0.1)
