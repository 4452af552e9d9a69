"""Endpoints of a worker's ranks: names, sizes, and their end."""

import pytest

from services.common.errors import SettingsError
from services.transfer.agent import TransferAgent
from services.transfer.errors import TransferClosed, TransferUnavailable
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.network import TransferNetwork
from services.transfer.slab import Slab
from services.worker import rank_endpoint
from services.worker.endpoints import open_endpoints
from tests.services.workers import LIMIT_S, load

NETWORK = TransferNetwork(loopback=True)


def assert_closed(endpoint: LocalEndpoint) -> None:
    with pytest.raises(TransferClosed):
        endpoint.codec_idle().result(LIMIT_S)


async def test_endpoints_are_open_until_the_worker_ends() -> None:
    loaded = load()
    async with open_endpoints(loaded, "decode", NETWORK) as opened:
        assert len(opened) == 1
        endpoint = opened[0]
        assert endpoint.readable.agent_name == f"decode-{loaded.identity.epoch}"
        sizes = loaded.rank.sizes
        assert (endpoint.readable.slots, endpoint.slot_bytes) == (sizes.slots, sizes.slot_bytes)
        assert endpoint.codecs is loaded.rank.codecs
        endpoint.codec_idle().result(LIMIT_S)
    assert_closed(endpoint)


async def test_endpoint_is_closed_if_its_codec_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[LocalEndpoint] = []

    def refuse(rank: object, endpoint: LocalEndpoint) -> None:
        opened.append(endpoint)
        raise SettingsError("the codec does not work with this model")

    monkeypatch.setattr(rank_endpoint, "warm_up_transfers", refuse)
    with pytest.raises(SettingsError):
        async with open_endpoints(load(), "prefill", NETWORK):
            pass
    assert_closed(opened[0])


async def test_agent_is_closed_if_its_slab_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    agents: list[TransferAgent] = []

    def refuse(agent: TransferAgent, slab: Slab) -> None:
        agents.append(agent)
        raise TransferUnavailable("the memory is refused")

    monkeypatch.setattr(TransferAgent, "register", refuse)
    with pytest.raises(TransferUnavailable):
        async with open_endpoints(load(), "prefill", NETWORK):
            pass
    with pytest.raises(TransferClosed):
        agents[0].codec_idle().result(LIMIT_S)
