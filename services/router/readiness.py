"""Whether requests for each model can be placed, and the reason if they cannot."""

from collections.abc import Mapping, Sequence
from itertools import product

from services.common.listings import ModelReadiness
from services.common.placement import ModelInfo, Role
from services.router.capacity import WorkerHealth, WorkerSnapshot
from services.router.policy import can_serve, context_length

_MAX_NAMED = 4  # workers that a reason names
_MAX_VALUE_CHARS = 24  # of a property of a worker


def readiness(
    workers: Sequence[WorkerSnapshot],
    infos: Mapping[str, ModelInfo] | None = None,
    *,
    settled: bool = True,
) -> list[ModelReadiness]:
    """Return the readiness of each registered model, sorted by name.

    Args:
        infos: models as the workers registered them, by id of the worker.
        settled: whether all live workers have registered. Otherwise no context length is reported,
            because larger workers may still register.
    """
    names = sorted({w.model for w in workers})
    found = [_readiness(model, workers, infos or {}) for model in names]
    if settled:
        return found
    return [model.model_copy(update={"context_length": None}) for model in found]


def unmatched(workers: Sequence[WorkerSnapshot]) -> dict[str, str]:
    """Return why workers get no requests although they are registered, by id of the worker.

    These are prefill and decode workers of which every worker with the other role, for the same
    model, has other properties. A prefill worker that decodes serves requests alone.
    """
    reasons = {}
    for worker in workers:
        if worker.role is Role.COLOCATED or len(worker.roles) > 1:
            continue
        others = [
            other
            for other in workers
            if other.model == worker.model and other.role not in (worker.role, Role.COLOCATED)
        ]
        differing = [worker.compatibility.mismatches(other.compatibility) for other in others]
        if others and all(differing):
            reasons[worker.worker_id] = _difference([worker, *others])
    return reasons


def _readiness(
    model: str, workers: Sequence[WorkerSnapshot], infos: Mapping[str, ModelInfo]
) -> ModelReadiness:
    serving = [worker for worker in workers if worker.model == model]
    ready = [worker for worker in serving if worker.health is WorkerHealth.READY]
    longest = context_length(serving)
    if not can_serve(ready):
        reason = _reason(serving, ready)
        return ModelReadiness(model=model, ready=False, reason=reason, context_length=longest)
    found: list[ModelInfo] = []
    for worker in ready:
        info = infos.get(worker.worker_id)
        if info and info not in found:
            found.append(info)
    return ModelReadiness(model=model, ready=True, infos=found, context_length=longest)


def _reason(serving: Sequence[WorkerSnapshot], ready: Sequence[WorkerSnapshot]) -> str:
    if all(worker.role is Role.COLOCATED for worker in serving):
        return f"no worker is ready: {_states(serving)}"
    for role in (Role.PREFILL, Role.DECODE):
        if not any(worker.role is role for worker in ready):
            registered = [w for w in serving if w.role in (role, Role.COLOCATED)]
            if not registered:
                return f"no {role.value} worker is registered"
            return f"no {role.value} worker is ready: {_states(registered)}"
    return _difference(ready)


def _states(workers: Sequence[WorkerSnapshot]) -> str:
    named = [_state(worker) for worker in workers[:_MAX_NAMED]]
    further = [f"{len(workers) - _MAX_NAMED} more"] if len(workers) > _MAX_NAMED else []
    return ", ".join(named + further)


def _state(worker: WorkerSnapshot) -> str:
    state = worker.health.value.replace("_", " ")
    return f"{worker.worker_id} is {state}" + (f" ({worker.reason})" if worker.reason else "")


def _difference(ready: Sequence[WorkerSnapshot]) -> str:
    """Return the properties in which the most similar pair of workers differs."""
    roles = {role: [w for w in ready if w.role is role] for role in (Role.PREFILL, Role.DECODE)}
    prefill, decode = min(
        product(roles[Role.PREFILL], roles[Role.DECODE]),
        key=lambda pair: len(pair[0].compatibility.mismatches(pair[1].compatibility)),
    )
    differing = [
        f"{name} is {_value(prefill, name)} and {_value(decode, name)}"
        for name in prefill.compatibility.mismatches(decode.compatibility)
    ]
    names = f"{prefill.worker_id} and {decode.worker_id}"
    return f"the workers {names} are not compatible: {', '.join(differing)}"


def _value(worker: WorkerSnapshot, name: str) -> str:
    value = getattr(worker.compatibility, name)
    return repr(value[:_MAX_VALUE_CHARS] if isinstance(value, str) else value)
