"""A peer that is added again during its removal is known by its new metadata."""

from concurrent.futures import Future

import pytest
import torch

from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.errors import PeerRefused
from services.transfer.slab import Slab

NBYTES = 1 << 20


def test_adding_a_peer_during_its_removal_takes_the_new_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second slab of the peer is registered after the reader has got the first metadata."""
    monkeypatch.setenv("UCX_TLS", "tcp,self,cuda_copy" if torch.cuda.is_available() else "tcp,self")
    reader, source = TransferAgent("metadata-reader"), TransferAgent("metadata-source")
    try:
        landing, first, second = Slab(2, NBYTES), Slab(1, NBYTES), Slab(1, NBYTES)
        reader.register(landing)
        source.register(first)
        reader.add_peer(source.name, source.metadata).result(30)
        second.view(0, NBYTES).fill_(5)
        source.register(second)
        hold = Future[None]()
        reader.run_on_codec_stream(lambda: hold.result(30))  # the next commands run without a poll

        def read(slab: Slab, slot: int) -> Future[ReadDone]:
            into = landing.view(slot, NBYTES)
            return reader.read(source.name, slab.address, NBYTES, into, deadline_s=30)

        running = read(first, 0)
        removal = reader.remove_peer(source.name)
        refused = reader.add_peer(source.name, b"junk")
        adding = reader.add_peer(source.name, source.metadata)
        later = read(second, 1)
        hold.set_result(None)
        for future in (running, adding, removal, later):
            future.result(30)
        assert isinstance(refused.exception(30), PeerRefused)
        assert bool((landing.view(1, NBYTES) == 5).all())
    finally:
        reader.close()
        source.close()
