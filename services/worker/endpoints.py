"""KV endpoints of a worker's ranks, from the start of their agents to their end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.transfer.agent import TransferAgent
from services.transfer.local_endpoint import Endpoints
from services.transfer.network import TransferNetwork
from services.worker.codec_warm_up import warm_up_transfers
from services.worker.loading import Loaded


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
    """
    rank = loaded.rank
    agent = TransferAgent(f"{role}-{loaded.identity.epoch}", rank.device, network=network)
    try:
        endpoint = rank.new_endpoint(agent)
        await warm_up_transfers(rank, endpoint)
        yield (endpoint,)
    finally:
        await asyncio.to_thread(agent.close)
