"""Stale, forged and repeated handles, damaged KV, and notifications lost or doubled.

One segment of a request is damaged. The decode worker refuses it before the first attention, and
the request continues on the other prefill worker.
"""

import pytest

from tests.harness.trial import Trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

ANNOUNCEMENTS = ("slot", "generation", "layers", "tokens", "group", "repeated")
CONTENTS = ("payload bit", "header epoch", "truncated")


@pytest.mark.parametrize(
    "damage",
    [
        "generation",
        "payload bit",
        *(
            pytest.param(damage, marks=pytest.mark.campaign)
            for damage in (*ANNOUNCEMENTS, *CONTENTS)
            if damage not in ("generation", "payload bit")
        ),
    ],
)
async def test_damaged_segment_is_not_attended(deployment: Trial, damage: str) -> None:
    failures = deployment.sum_of("decode", "headrace_kv_integrity_failures_total")
    failovers = deployment.failovers()
    deployment.points.set("damage", damage)
    async with deployment.client() as client:
        await client.ask(deployment.long).check()
    assert not deployment.points.is_set("damage"), "nothing was damaged"
    assert deployment.failovers() > failovers
    if damage in CONTENTS:
        assert deployment.sum_of("decode", "headrace_kv_integrity_failures_total") > failures
    await deployment.check_recovered()


@pytest.mark.parametrize("kind", ["lost", pytest.param("doubled", marks=pytest.mark.campaign)])
async def test_notifications_lost_or_doubled(deployment: Trial, kind: str) -> None:
    deployment.points.set("notifications", kind)
    failovers = deployment.failovers()
    async with deployment.client() as client:
        replies = [client.ask(deployment.long) for _ in range(6)]
        for reply in replies:
            await reply.check()
    deployment.points.clear("notifications")
    assert deployment.failovers() == failovers
    await deployment.check_recovered()
