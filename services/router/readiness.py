"""Whether requests for each model can be placed, and the reason if they cannot."""

from collections.abc import Sequence

from services.common.listings import ModelReadiness
from services.common.placement import Role
from services.router.capacity import WorkerHealth, WorkerSnapshot
from services.router.matching import difference
from services.router.policy import can_serve, context_length

_MAX_NAMED = 4
"""Maximum number of workers that a reason names."""


def readiness(workers: Sequence[WorkerSnapshot], *, settled: bool = True) -> list[ModelReadiness]:
    """Return the readiness of each registered model, sorted by name.

    Args:
        settled: whether all live workers have registered. Otherwise no context length is reported,
            because larger workers may still register.
    """
    names = sorted({w.model.name for w in workers})
    found = [_readiness(model, workers) for model in names]
    if settled:
        return found
    return [model.model_copy(update={"context_length": None}) for model in found]


def _readiness(model: str, workers: Sequence[WorkerSnapshot]) -> ModelReadiness:
    serving = [worker for worker in workers if worker.model.name == model]
    matched = [worker for worker in serving if worker.health is WorkerHealth.READY]
    unmatched = [worker for worker in serving if worker.health is WorkerHealth.UNMATCHED]
    ready = matched if can_serve(matched) else matched + unmatched
    longest = context_length(serving)
    if not can_serve(ready):
        reason = _reason(serving, ready)
        return ModelReadiness(model=model, ready=False, reason=reason, context_length=longest)
    infos = list(dict.fromkeys(worker.model for worker in ready))
    return ModelReadiness(model=model, ready=True, infos=infos, context_length=longest)


def _reason(serving: Sequence[WorkerSnapshot], ready: Sequence[WorkerSnapshot]) -> str:
    if all(worker.role is Role.COLOCATED for worker in serving):
        return f"no worker is ready: {_states(serving)}"
    for role in (Role.PREFILL, Role.DECODE):
        if not any(worker.role is role for worker in ready):
            registered = [w for w in serving if w.role in (role, Role.COLOCATED)]
            if not registered:
                return f"no {role.value} worker is registered"
            return f"no {role.value} worker is ready: {_states(registered)}"
    return difference(ready)


def _states(workers: Sequence[WorkerSnapshot]) -> str:
    named = [_state(worker) for worker in workers[:_MAX_NAMED]]
    further = [f"{len(workers) - _MAX_NAMED} more"] if len(workers) > _MAX_NAMED else []
    return ", ".join(named + further)


def _state(worker: WorkerSnapshot) -> str:
    state = worker.health.value.replace("_", " ")
    return f"{worker.worker_id} is {state}" + (f" ({worker.reason})" if worker.reason else "")
