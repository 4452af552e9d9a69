"""Random events: the dispatcher gives the same answers as a slow one that examines everything."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from runtime.pages.plan import PageCount, PagePlan
from services.common.placement import (
    Heartbeat,
    Outcome,
    Placement,
    Release,
    Role,
    StepPace,
    WorkerState,
)
from services.router.admission import Admission, AdmissionLimits
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.errors import Refusal
from services.router.fleet import Fleet, FleetLimits
from services.router.queue import PendingPlacement, PlacementQueue
from tests.runtime.pages.plans import compressed_plan
from tests.services.router.samples import COMPATIBLE, beat, place_request, registration
from tests.services.router.slow_dispatcher import SlowDispatcher, SlowQueue
from tests.services.router.slow_policy import KeyedRandom

EVENTS = 200
LIMITS = FleetLimits(
    suspect_after_s=2.0, gone_after_s=4.0, placement_ttl_s=4.0, prompt_backlog_s=0.25
)
WEIGHTS = {"a": 1, "b": 3, "c": 2}
OTHER = COMPATIBLE.model_copy(update={"codec": "raw"})
COMPRESSED = COMPATIBLE.model_copy(update={"page_plan": compressed_plan(window=16)})


class Both:
    """A dispatcher and its slow reference, which get the same events.

    Times are multiples of 1/64 s, which floats represent exactly.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.now = 0.0
        self.number = 0
        policy = list(PolicyName)[seed % 4] if seed % 8 < 4 else PolicyName.SHORTEST_QUEUE
        self.routers = [
            kind(
                Fleet(LIMITS),
                queue(24),
                policy,
                KeyedRandom(seed),
                output_reserve=48,
                max_wait_s=3.0,
                admission=Admission(AdmissionLimits(shed_after_s=1.0 if seed % 2 else 100.0)),
            )
            for kind, queue in ((Dispatcher, PlacementQueue), (SlowDispatcher, SlowQueue))
        ]
        self.roles: dict[str, Role] = {}
        self.epochs: dict[str, int] = {}
        self.plans: dict[str, PagePlan] = {}
        self.open: list[str] = []  # ids of placements
        self.calls: list[tuple[PendingPlacement, ...]] = []
        self.models = ["small"] if seed % 3 else ["small", "large"]
        for index in range(self.rng.randint(20, 50)):
            name = f"w{index}"
            self.roles[name] = self.rng.choice([*Role, Role.PREFILL, Role.DECODE])
            self.epochs[name] = 0
            self.register(name)
            if self.rng.random() < 0.9:
                self.heartbeat(name)

    def register(self, name: str) -> None:
        rng = self.rng
        self.epochs[name] += self.epochs[name] == 0 or rng.random() < 0.5
        compatibility = rng.choice([COMPATIBLE, COMPATIBLE, OTHER, COMPRESSED])
        pages = [rng.choice([6, 12, 12, 12, 30]), rng.choice([20, 40])]
        self.plans[name] = plan = compatibility.page_plan
        worker = registration(
            name,
            self.roles[name],
            epoch=f"e{self.epochs[name]}",
            model=rng.choice(self.models),
            pages_total=PageCount(*pages[: len(plan.groups)]),
            max_running=rng.choice([2, 4]),
            compatibility=compatibility,
            decodes=rng.random() < 0.3,
            overflow_tokens=rng.choice([None, 30]),
        )
        for router in self.routers:
            router.register(worker, self.now)

    def heartbeat(self, name: str) -> None:
        rng = self.rng
        computes = self.roles[name] is not Role.DECODE
        tokens = rng.choice([0, 0, 5, 40, 200])
        pace = StepPace(
            step_s=rng.choice([1, 1, 1, 1, 1 if self.seed % 4 else 5]), tokens=8, context=8
        )
        free = [rng.choice([0, 2, 4, 8, 20]), rng.choice([0, 4, 20])]
        load = beat(
            name,
            epoch=f"e{self.epochs[name]}",
            state=rng.choice([WorkerState.READY] * 39 + [WorkerState.DRAINING]),
            queue_tokens=tokens,
            pending_prompt_tokens=tokens if computes else 0,
            prompt_tokens_per_s=rng.choice([0, 64, 400]) if computes else 0,
            plan=self.plans[name],
            pages_free=PageCount(*free[: len(self.plans[name].groups)]),
            running=rng.choice([0, 0, 1, 2, 3]),
            waiting=rng.choice([0, 0, 1]),
            pace=pace if rng.random() < 0.5 else None,
            admitted=[id for id in self.open if rng.random() < 0.2],
        )
        self.each("heartbeat", load)

    def submit(self) -> None:
        rng = self.rng
        self.number += 1
        tenant, most = rng.choice("aaabc"), rng.choice([1, 16, 64, 300])
        length = rng.choice([1, 15, 16, 17, 17, 33, 63, 100, 180])
        text = rng.choice([b"a", b"b", b"c"])
        prefix = tuple(text + bytes([end]) for end in (64, 128) if end <= length)
        request = place_request(
            length,
            most,
            placement_id=f"p{self.number}",
            required_tokens=rng.choice([None, 1, most]),
            choices=rng.choice([1, 1, 1, 2, 3]),
            model=rng.choice([None, *self.models * 20, "none"]),
            tenant=tenant,
            weight=WEIGHTS[tenant],
            priority=rng.choice([0, 0, 0, 1, -1]),
            admitted=rng.random() < 0.2,
            exclude=rng.sample(sorted(self.roles), 3) if rng.random() < 0.2 else [],
            wait_s=rng.choice([0, 0.5, 2, *[60] * 9]),
        )
        self.calls.append(
            tuple(router.submit(request, self.now, prefix) for router in self.routers)
        )

    def release(self) -> None:
        if not self.open:
            return
        placement_id = self.rng.choice([*self.open, f"p{self.number - 3}"])
        outcome = self.rng.choice([Outcome.OK, Outcome.OK, *Outcome])
        blame = self.rng.choice(sorted(self.roles)) if outcome is Outcome.FAILED else None
        self.each("release", Release(placement_id=placement_id, outcome=outcome, blame=blame))

    def cancel(self) -> None:
        if self.calls:
            calls = self.rng.choice(self.calls)
            for router, call in zip(self.routers, calls, strict=True):
                router.cancel(call, self.now)

    def step(self) -> None:
        """Send a random event to both."""
        self.now += self.rng.choice([0, 1, 1, 2, 4]) / 64
        name = self.rng.choice(sorted(self.roles))
        match self.rng.choices(
            ["submit", "heartbeat", "release", "advance", "cancel", "register", "leave"],
            [45, 35, 10, 6, 2, 1, 1],
        )[0]:
            case "submit":
                self.submit()
            case "heartbeat":
                self.heartbeat(name)
            case "release":
                self.release()
            case "advance":
                assert len({str(router.advance(self.now)) for router in self.routers}) == 1
            case "cancel":
                self.cancel()
            case "register":
                self.register(name)
            case "leave":
                for router in self.routers:
                    router.fleet.deregister(name, f"e{self.epochs[name]}")
                self.epochs[name] += 1
        self.compare()

    def each(self, event: str, body: Heartbeat | Release) -> None:
        """Call a method of both."""
        for router in self.routers:
            getattr(router, event)(body, self.now)

    def compare(self) -> None:
        """Check that all answers are equal, and that placements were made in the same order."""
        for fast, slow in self.calls:
            assert _answer(fast) == _answer(slow), fast.request
        one, other = (
            [replace(w, reason=None) for w in r.fleet.snapshots(self.now)] for r in self.routers
        )
        assert one == other, "number of the last placement, promised load and health of each worker"
        assert [c.request for c in self.routers[0].queue] == [
            c.request for c in self.routers[1].queue
        ]
        placed = [fast.answer for fast, _ in self.calls if isinstance(fast.answer, Placement)]
        self.open = [answer.placement_id for answer in placed][-20:]


def _answer(call: PendingPlacement) -> Any:
    answer = call.answer
    if isinstance(answer, Refusal):
        return type(answer), str(answer), answer.retry_after_s
    return answer


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(8))
def test_random_events_have_the_same_answers_in_the_same_order(seed: int) -> None:
    both = Both(seed)
    for _ in range(EVENTS):
        both.step()
    placed = [call for call, _ in both.calls if isinstance(call.answer, Placement)]
    assert placed
