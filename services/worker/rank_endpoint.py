"""Start of the KV endpoint of a rank, in the rank's process."""

from services.transfer.agent import TransferAgent
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.network import TransferNetwork
from services.worker.codec_warm_up import warm_up_transfers
from services.worker.rank_loading import LoadedRank


def open_endpoint(rank: LoadedRank, name: str, network: TransferNetwork) -> LocalEndpoint:
    """Start an agent, register the rank's slab with it, and warm up its codec. Blocks.

    Args:
        name: name of the agent.

    Raises:
        SettingsError: the codec does not reproduce its input.
        TransferUnavailable: the transport cannot be used.
    """
    agent = TransferAgent(name, rank.device, network=network)
    try:
        endpoint = rank.new_endpoint(agent)
        warm_up_transfers(rank, endpoint)
    except BaseException:
        agent.close()
        raise
    return endpoint
