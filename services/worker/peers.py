"""Facts that the ranks of a worker compare while they load, and the interface to other ranks."""

from dataclasses import dataclass, replace

import torch

from runtime.checkpoint.hashed_files import HashedFiles
from runtime.models.kernel_plan_hash import KernelFacts
from runtime.pages.plan import PageCount
from runtime.parallel.group import ONE_RANK, RankGroup
from services.common.placement import Compatibility, ModelInfo
from services.worker.sizes import WorkerSizes


@dataclass(frozen=True)
class RankFacts:
    """Facts about a rank whose part of the model is loaded.

    Attributes:
        model, compatibility: equal on all ranks of a worker.
        sizes: equal on all ranks but for ``slot_bytes``, for which the rank has memory.
        pages: numbers of pages for which the rank has memory.
        weight_bytes: bytes of the rank's weights in memory.
        kernels: what `Compatibility.kernel_plan_hash` is the hash of, equal on all ranks.
    """

    model: ModelInfo
    compatibility: Compatibility
    sizes: WorkerSizes
    pages: PageCount
    weight_bytes: int
    kernels: KernelFacts

    def within(self, other: "RankFacts") -> "RankFacts":
        """Return these facts with the slots and pages for which both ranks have memory."""
        slot_bytes = min(self.sizes.slot_bytes, other.sizes.slot_bytes)
        pages = PageCount(*map(min, zip(self.pages, other.pages, strict=True)))
        return replace(self, sizes=replace(self.sizes, slot_bytes=slot_bytes), pages=pages)

    def mismatches(self, other: "RankFacts") -> list[str]:
        """Return what differs from another rank and must not, as text."""
        own, wanted = self._compared(), other._compared()
        return [
            f"{name} is {own[name]!r}, not {wanted[name]!r}"
            for name in own
            if own[name] != wanted[name]
        ]

    def _compared(self) -> dict[str, object]:
        """Return what must be equal on all ranks, by name."""
        facts = {name: getattr(self.compatibility, name) for name in Compatibility.model_fields}
        del facts["kernel_plan_hash"]
        facts |= {f"{name} of kernels": value for name, value in self.kernels.items()}
        return facts | {
            name: getattr(self.sizes, name) for name in ("limits", "slots", "history_slots")
        }


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

    def agree(self, facts: RankFacts) -> RankFacts:
        """Compare the facts of this rank with those of the others.

        Returns:
            These facts with the slots and pages for which all ranks have memory.

        Raises:
            SettingsError: the ranks differ.
        """
        return facts


NO_PEERS = Peers()
"""The peers of a worker's only rank."""
