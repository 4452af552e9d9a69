"""KV endpoints of a worker's ranks, from the start of their agents to their end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.transfer.endpoint import KVEndpoint
from services.transfer.local_endpoint import Endpoints
from services.transfer.network import TransferNetwork
from services.worker.loading import Loaded
from services.worker.rank_endpoint import open_endpoint


@asynccontextmanager
async def open_endpoints(
    loaded: Loaded, role: str, network: TransferNetwork
) -> AsyncIterator[Endpoints]:
    """Open the endpoint of each rank and warm up its codec; close the endpoints at the end.

    Args:
        role: prefix of the names of the agents.

    Raises:
        SettingsError: the codec does not reproduce its input.
        TransferUnavailable: the transport cannot be used.
        RankFault: a rank has failed.
    """
    name = f"{role}-{loaded.identity.epoch}"
    opened: list[KVEndpoint] = []
    loaded.followers.start_endpoints(name)
    first = await asyncio.to_thread(open_endpoint, loaded.rank, name, network)
    try:
        opened += await asyncio.to_thread(loaded.followers.endpoints, loaded.rank.codebooks)
        yield (first, *opened)
    finally:
        for endpoint in (first, *opened):
            await asyncio.to_thread(endpoint.close)
