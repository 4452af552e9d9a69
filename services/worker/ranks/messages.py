"""Messages between the first rank and the process of another rank, through a pipe.

=====================  ======================  ===================================================
first rank             other rank              meaning
=====================  ======================  ===================================================
                       `Started`               the process runs, and beats
`HashedFiles`                                  load a part of the model from these files
                       `RankFacts`             its part of the model is loaded
`RankFacts`                                    allocate these slots and pages, then follow the steps
`Open`                                         the ranks are warm: serve the KV endpoint
                       `Opened`                the endpoint is ready
                       `Failed`                the rank has failed, and its process ends
=====================  ======================  ===================================================

The end of the pipe is the end of a process. Steps and calls of endpoints have channels of their own
(`runtime.engine.channel`, `services.transfer.remote_endpoint`).
"""

from dataclasses import dataclass
from enum import StrEnum

from services.worker.settings import WorkerSettings


class Stage(StrEnum):
    """Stage of the start of a rank."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING_UP = "warming up"
    SERVING = "serving"


@dataclass(frozen=True)
class RankStart:
    """Arguments of the process of a rank.

    Attributes:
        role: role of the worker, also the name of its service in logs.
        rank: number of the rank, from 1.
        decodes: whether the worker runs decode steps.
    """

    settings: WorkerSettings
    role: str
    rank: int
    decodes: bool


@dataclass(frozen=True)
class Started:
    """The process of the rank runs."""


@dataclass(frozen=True)
class Open:
    """Request to serve the KV endpoint.

    Attributes:
        agent: name of the endpoint's agent.
    """

    agent: str


@dataclass(frozen=True)
class Opened:
    """The KV endpoint is ready.

    Attributes:
        device_bytes: memory that the rank has allocated on its GPU; 0 on a CPU.
    """

    device_bytes: int


@dataclass(frozen=True)
class Failed:
    """An error that ends a rank.

    Attributes:
        text: the error.
        is_refusal: whether the rank cannot start with the settings of the worker.
    """

    text: str
    is_refusal: bool
