"""What the ranks of a worker exchange while they load."""

from dataclasses import dataclass

import torch

from runtime.checkpoint.hashed_files import HashedFiles
from runtime.pages.plan import PageCount
from runtime.parallel.group import ONE_RANK, RankGroup
from services.common.placement import Compatibility, ModelInfo
from services.worker.sizes import WorkerSizes


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank once its part of the model is loaded.

    Attributes:
        model, compatibility, sizes: equal on all ranks of a worker.
        pages: numbers of pages for which the rank has memory.
        weight_bytes: size of the rank's weights.
    """

    model: ModelInfo
    compatibility: Compatibility
    sizes: WorkerSizes
    pages: PageCount
    weight_bytes: int

    def mismatches(self, other: "RankFacts") -> list[str]:
        """Return what differs from another rank and must not, as text."""
        pairs = [
            *(
                (name, self.compatibility, other.compatibility)
                for name in Compatibility.model_fields
            ),
            *((name, self.sizes, other.sizes) for name in ("limits", "slots", "slot_bytes")),
        ]
        return [
            f"{name} is {getattr(own, name)!r}, not {getattr(wanted, name)!r}"
            for name, own, wanted in pairs
            if getattr(own, name) != getattr(wanted, name)
        ]


class Peers:
    """The other ranks of a worker, seen from one that loads. This class has none.

    Methods are called in the order in which they are defined.

    Attributes:
        rank: number of this rank.
        size: number of all ranks.
    """

    rank = 0
    size = 1

    def known_files(self) -> HashedFiles | None:
        """Return the files of the checkpoint if another rank has hashed them, or None."""
        return None

    def share_files(self, files: HashedFiles) -> None:
        """Send the files, which this rank has hashed, to the others."""

    def join(self, device: torch.device) -> RankGroup:  # noqa: ARG002 - the rank's device
        """Wait for the other ranks, and return the group of all of them."""
        return ONE_RANK

    def agree(self, facts: RankFacts) -> PageCount:
        """Compare the facts of this rank with those of the others.

        Returns:
            The pages for which all ranks have memory.

        Raises:
            SettingsError: the ranks differ.
        """
        return facts.pages


NO_PEERS = Peers()
"""The peers of a worker's only rank."""
