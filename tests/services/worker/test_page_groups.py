"""A worker with three page groups is served, registered, counted and listed by the same code."""

from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from runtime.kv.dense import DenseFormat
from runtime.kv.format import Plane
from runtime.pages.groups import PageGroup, Part
from services.common.placement import Role
from services.decode.settings import DecodeSettings
from services.router.app import create_app
from services.router.settings import RouterSettings
from services.worker.lifecycle import _registration
from services.worker.registration import Registrar
from tests.runtime.tiny import CONFIG, tiny_checkpoint
from tests.services import workers
from tests.services.transfer.sampled_streams import ANSWER, idle, start, tokens_of
from tests.services.workers import Decode, Site, until

GROUPS = (
    PageGroup("full"),
    PageGroup("near", Part.ENDS, 0, 500),
    PageGroup("far", Part.ENDS, 0, 600),
)
LENGTHS = (5, 80, 300)


class LayeredFormat(DenseFormat):
    """`dense`, with windows that are longer than the context, so that tokens do not change."""

    name = "layered"

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        group = GROUPS[layer % len(GROUPS)]
        return tuple(replace(plane, group=group) for plane in super().planes(layer, page_size))


SPEC = f"{__name__}:{LayeredFormat.__name__}"


@pytest.fixture(autouse=True)
def three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the model a layer for each group."""
    config = replace(CONFIG, num_layers=len(GROUPS))
    monkeypatch.setattr(workers, "checkpoint_for", lambda _: tiny_checkpoint(config=config))


async def test_tokens_are_those_of_one_group(site: Site) -> None:
    dense = await site.prefill()
    expected = [start(dense.worker.service, dense, length, None) for length in LENGTHS]
    await until(lambda: idle(dense))
    prefill, decode = await site.prefill(kv_format=SPEC), await site.decode(kv_format=SPEC)
    remote = [start(decode.worker.service, decode, length, prefill) for length in LENGTHS]
    await until(lambda: idle(prefill, decode))
    assert [tokens_of(one) for one in remote] == [tokens_of(one) for one in expected]
    assert all(len(tokens_of(one)) == ANSWER for one in expected)


async def test_worker_is_registered_listed_and_measured_by_group(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await site.decode(kv_format=SPEC, pages=30)
    app = create_app(RouterSettings.model_validate({}))
    router = httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)))
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: router)
    registrar = registrar_of(decode)
    registrar.start()
    await until(lambda: not registrar.unregistered)
    listed = (await router.get("http://127.0.0.1/v1/workers")).json()["workers"][0]
    everything = dict.fromkeys(("full", "near", "far"), 30)
    assert listed["pages_total"] == listed["pages_free"] == everything
    plan = listed["compatibility"]["page_plan"]
    assert [group["name"] for group in plan["groups"]] == list(everything)
    assert list(listed["page_bytes"]) == list(everything)
    assert sum(listed["page_bytes"].values()) * 30 == sum(plane.nbytes for plane in decode.planes())
    decode.worker.observe()
    for group in everything:
        value = decode.worker.metrics.registry.get_sample_value
        assert value("headrace_kv_pages", {"group": group}) == 30
        assert value("headrace_kv_cache_usage_perc", {"group": group}) == 0
    await registrar.stop()


def registrar_of(decode: Decode) -> Registrar:
    worker = decode.worker
    known = _registration(worker, "127.0.0.1:1", DecodeSettings.model_validate({}), Role.DECODE)
    engine, transfers = worker.engine, worker.transfers
    return Registrar(known, engine, ["http://127.0.0.1"], transfers, token=None)
