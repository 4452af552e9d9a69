"""The systems that are compared, the places where they run, and the loads of the paper."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.offline.bench.deinfer import paper
from runtime.offline.bench.deinfer.cases import Load, Place, System, Weights
from runtime.offline.bench.ranks import Collectives
from runtime.offline.bench.shapes import Kept
from runtime.parallel.partition import Scheme

MANY_OPT = {"high load": 768, "mild load": 192}
"""Numbers of prompts of the OPT model."""
LOADS = {
    "high load": Load(512, 32, 128),
    "mild load": Load(64, 64, 448),
    "serving": Load(128, 32, 256),
}
"""The loads of the paper's sections 5.2 and 5.3."""


@dataclass(frozen=True)
class Setting:
    """Models, ranks and systems for which the tables are reproduced.

    Attributes:
        shapes: names of the models. Tables of one model use the first.
        ranks: numbers of ranks.
        schemes: schemes to compare with `Scheme.BASE`.
        kv_formats: KV formats of these schemes; the baseline has ``dense``.
        divide: number by which all numbers of sequences are divided.
    """

    shapes: Sequence[str]
    ranks: Sequence[int]
    schemes: Sequence[Scheme]
    kv_formats: Sequence[str]
    divide: int = 1

    @property
    def most(self) -> int:
        """Largest number of ranks."""
        return max(self.ranks)

    def places(self, *, nvlink: bool) -> list[Place]:
        """Return the places with and without NVLink. One rank counts as with NVLink."""
        return [Place(ranks, nvlink) for ranks in self.ranks if nvlink or ranks > 1]

    @property
    def all_places(self) -> list[Place]:
        """All places, those with NVLink first."""
        return [*self.places(nvlink=True), *self.places(nvlink=False)]

    def load(self, name: str, shape: str) -> Load:
        """Return a load of `LOADS` with its number of prompts for a model."""
        load = LOADS[name]
        count = MANY_OPT.get(name, load.prompts) if "opt" in shape else load.prompts
        return replace(load, prompts=max(1, count // self.divide))


@dataclass(frozen=True)
class Competitor:
    """A system in one place.

    Attributes:
        name: name in our tables.
        method: name in `paper`; None if the paper has no such system.
    """

    system: System
    name: str
    method: str | None = None


def competitors(
    setting: Setting,
    place: Place,
    shape: str,
    fraction: float = paper.FRACTION,
    kept: Kept = Kept.RANKS,
) -> list[Competitor]:
    """Return the systems to compare in a place. With several ranks, the first is the baseline.

    The baseline uses NCCL. Dense models are divided as in Megatron-LM.
    """
    dense = fraction >= 1
    whole = Weights(shape, fraction, Kept.PARAMETERS if dense else kept, Scheme.LOW_RANK)
    fast = Collectives.PUSH if place.nvlink else Collectives.NCCL
    if place.ranks == 1:
        kv_formats = setting.kv_formats[:1] if dense else setting.kv_formats
        return [
            Competitor(System(replace(whole, kv_format=each), fast), f"one rank{_suffix(each)}")
            for each in kv_formats
        ]
    both = list(dict.fromkeys((Collectives.NCCL, fast)))
    if dense:
        return [Competitor(System(whole, each), f"dense, {each}") for each in both]
    base = replace(whole, scheme=Scheme.BASE)
    found = [Competitor(System(base, each), f"base, {each}") for each in both]
    found[0] = replace(found[0], method="base")
    for kv_format in setting.kv_formats:
        method = "deinfer" if kv_format == "dense" else "latents"
        for scheme in setting.schemes:
            system = System(replace(whole, scheme=scheme, kv_format=kv_format), fast)
            found.append(Competitor(system, f"{scheme}, {fast}{_suffix(kv_format)}", method))
    return found


def _suffix(kv_format: str) -> str:
    return "" if kv_format == "dense" else f", {kv_format}"
