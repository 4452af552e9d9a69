"""Workers without a partner: no worker with the other role is compatible with them."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice, product

from services.common.placement import Compatibility, Registration, Role
from services.router.capacity import WorkerSnapshot

_MAX_COMPARED = 16
"""Maximum number of workers that are compared to find the most similar one for a reason."""
_MAX_VALUE_CHARS = 24
"""Maximum characters of a property's value in a reason."""
_REMEDIES = {
    "chunk_tokens": " (start both with the same chunk_tokens; auto depends on step_tokens)"
}
"""Advice on properties that follow from settings, by name of the property."""
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def unmatched(workers: Sequence[Registration]) -> dict[str, str]:
    """Return the workers without a partner, and the reason, by id of the worker.

    A prefill or decode worker has no partner if there are workers with the other role for its
    model, but none of them is compatible with it. If there are none at all, the model is not ready,
    and `services.router.readiness` has the reason.
    """
    offered: defaultdict[tuple[str, Role], set[Compatibility]] = defaultdict(set)
    for worker in workers:
        offered[worker.model.name, worker.role].add(worker.compatibility)
    reasons = {}
    for worker in workers:
        model = worker.model.name
        role = _OTHER.get(worker.role)
        if role and (others := offered.get((model, role))) and worker.compatibility not in others:
            candidates = (w for w in workers if w.model.name == model and w.role is role)
            reasons[worker.worker_id] = difference([worker, *islice(candidates, _MAX_COMPARED)])
    return reasons


def difference(workers: Sequence[Registration | WorkerSnapshot]) -> str:
    """Return a sentence about the most similar pair of a prefill and a decode worker.

    It names the workers and the properties in which they differ. ``workers`` must include both
    roles.
    """
    prefill, decode = min(
        product(*([w for w in workers if w.role is role] for role in _OTHER)),
        key=lambda pair: len(pair[0].compatibility.mismatches(pair[1].compatibility)),
    )
    ours, theirs = prefill.compatibility, decode.compatibility
    differing = [
        f"{name} is {_value(ours, theirs, name)} and {_value(theirs, ours, name)}"
        + _REMEDIES.get(name, "")
        for name in ours.mismatches(theirs)
    ]
    names = f"{prefill.worker_id} and {decode.worker_id}"
    return f"the workers {names} are not compatible: {', '.join(differing)}"


def _value(of: Compatibility, other: Compatibility, name: str) -> str:
    """Return a property as text; of a page plan, the groups that the other worker does not have."""
    if name == "page_plan":
        groups = [
            f"{g.name} ({g.part}, {g.sink_pages} sinks, window {g.window})"
            for g in of.page_plan.groups
            if g not in other.page_plan.groups
        ]
        return ", ".join([f"{of.page_plan.page_size} tokens per page", *groups])
    value = getattr(of, name)
    return repr(value[:_MAX_VALUE_CHARS] if isinstance(value, str) else value)
