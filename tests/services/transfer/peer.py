"""A process that serves a slab of known content until its stdin ends: peer.py NAME DEVICE."""

import json
import sys

import torch

from services.common.logging import configure_logging
from services.transfer.agent import TransferAgent
from services.transfer.slab import Slab

SLOTS = 16
SLOT_BYTES = 1 << 20


def content(slot: int) -> torch.Tensor:
    """Return the content of a slot, ``[SLOT_BYTES]`` uint8."""
    generator = torch.Generator().manual_seed(slot)
    return torch.randint(0, 256, (SLOT_BYTES,), dtype=torch.uint8, generator=generator)


def main() -> None:
    name, device = sys.argv[1:]
    configure_logging(name, level="warning")
    agent = TransferAgent(name, device)
    slab = Slab(SLOTS, SLOT_BYTES, device)
    for slot in range(SLOTS):
        slab.view(slot, SLOT_BYTES).copy_(content(slot))
    agent.register(slab)
    hello = {"metadata": agent.metadata.hex(), "address": slab.address}
    sys.stdout.write(json.dumps(hello) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    agent.close()


if __name__ == "__main__":
    main()
