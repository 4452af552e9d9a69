"""The process of a rank other than the first.

It computes the steps of the first rank (main thread), and transfers KV for it (a second thread). It
has no scheduler and no port of its own. It ends when the first rank closes its channel or ends, and
when it fails itself.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import structlog
import torch

from runtime.checkpoint.hashed_files import HashedFiles
from runtime.engine import StepReader, follow
from runtime.errors import FirstRankEnded
from runtime.parallel.group import RankGroup
from services.common.errors import SettingsError
from services.common.file_limit import raise_file_limit
from services.common.logging import configure_logging
from services.common.memory import freeze_loaded, limit_arenas
from services.common.signals import end_with_parent
from services.transfer.remote_endpoint import serve_endpoint
from services.worker.device import allocated_bytes, torch_device, use_device
from services.worker.peers import Peers, RankFacts
from services.worker.rank_endpoint import open_endpoint
from services.worker.rank_loading import LoadedRank, load_rank, refusal_of, refusing
from services.worker.ranks.messages import Failed, Open, Opened, RankStart, Started
from services.worker.ranks.rendezvous import Rendezvous
from services.worker.stall import Stall
from services.worker.threads import set_switch_interval

log = structlog.get_logger()

_WATCH_S = 0.25
"""Time between two looks at the current step, seconds."""
_CLOSE_S = 10.0
"""Maximum time in which the KV endpoint is closed after the last step, seconds."""


def run_rank(
    start: RankStart,
    rendezvous: Rendezvous,
    reader: StepReader,
    control: Connection,
    endpoint: Connection,
) -> None:
    """Run a rank in this process, and end the process.

    Args:
        reader: steps of the first rank.
        control: pipe for the messages of `services.worker.ranks.messages`.
        endpoint: pipe for the calls of the KV endpoint.
    """
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the first rank decides
    settings = start.settings
    configure_logging(
        start.role, format=settings.log_format, level=settings.log_level, rank=start.rank
    )
    limit_arenas()
    raise_file_limit()
    set_switch_interval()
    process = RankProcess(start, rendezvous, reader, control, endpoint)
    try:
        with reader.beating():
            process.run()
    except BaseException as error:  # noqa: BLE001 - reported, and the process ends
        process.fail(error)
    # The destructors of a communicator may wait for other ranks.
    os._exit(0)


class RankProcess(Peers):
    """State of the process of a rank; see `run_rank`."""

    def __init__(
        self,
        start: RankStart,
        rendezvous: Rendezvous,
        reader: StepReader,
        control: Connection,
        endpoint: Connection,
    ) -> None:
        self.rank = start.rank
        self.size = rendezvous.size
        self._start = start
        self._rendezvous = rendezvous
        self._reader = reader
        self._control = control
        self._endpoint = endpoint
        self._serves = False
        self._failing = threading.Lock()

    def run(self) -> None:
        """Load the rank, and follow the steps of the first one until it closes its channel."""
        settings = self._start.settings
        self._send(Started())
        with refusing(settings, self.rank):
            _thread("watch", self._watch, torch_device(settings.device, self.rank))
            rank = load_rank(settings, self, decodes=self._start.decodes)
        transfers = _thread("transfers", self._transfer, rank)
        follow(rank.executor, self._reader)
        if self._serves:
            transfers.join(_CLOSE_S)

    def fail(self, error: BaseException) -> None:
        """Report an error to the first rank, and end the process."""
        with self._failing:  # held until the end: only the first error is reported
            if isinstance(error, FirstRankEnded):
                log.warning("the first rank has ended", reason=repr(error))
                os._exit(1)
            if isinstance(error, torch.OutOfMemoryError) and not self._serves:  # in the warm-up
                error = refusal_of(error, self._start.settings, self.rank) or error
            is_refusal = isinstance(error, SettingsError)
            if not is_refusal:
                log.error("ending on an error", exc_info=error)
            with suppress(OSError):  # the first rank has ended
                self._control.send(Failed(str(error) if is_refusal else repr(error), is_refusal))
            os._exit(1)

    def _send(self, message: object) -> None:
        """Send a message to the first rank.

        Raises:
            FirstRankEnded: its process has ended.
        """
        try:
            self._control.send(message)
        except OSError as error:
            raise FirstRankEnded("the first rank has closed its pipe") from error

    def _receive(self) -> Any:
        """Wait for a message of the first rank.

        Raises:
            FirstRankEnded: its process has ended.
        """
        try:
            return self._control.recv()
        except (EOFError, OSError) as error:
            raise FirstRankEnded("the first rank has closed its pipe") from error

    def known_files(self) -> HashedFiles:
        files: HashedFiles = self._receive()
        return files

    def join(self, device: torch.device) -> RankGroup:
        return self._rendezvous.join(self.rank, device)

    def agree(self, facts: RankFacts) -> RankFacts:
        self._send(facts)
        agreed: RankFacts = self._receive()
        return facts.within(agreed)

    def _transfer(self, rank: LoadedRank) -> None:
        """Serve the KV endpoint until the first rank closes it."""
        settings, device = self._start.settings, rank.executor.device
        try:
            use_device(device)
            message: Open = self._receive()
            with refusing(settings, self.rank):
                endpoint = open_endpoint(rank, message.agent, settings.transfer_network)
            endpoint.fault.add_done_callback(self._transfer_failed)
            freeze_loaded()
            self._serves = True
            self._send(Opened(allocated_bytes(device)))
            serve_endpoint(self._endpoint, endpoint)
        except BaseException as error:  # noqa: BLE001 - reported, and the process ends
            self.fail(error)

    def _transfer_failed(self, fault: "Future[None]") -> None:
        if error := fault.exception():
            self.fail(error)

    def _watch(self, device: torch.device) -> None:
        """End the process if a step of the worker hangs.

        Steps have no limit before the endpoint serves, because a rank that warms up compiles.
        """
        limit_s = self._start.settings.rank_timeout_s
        main = f"self/task/{threading.main_thread().native_id}"
        stall = Stall(lambda: main, by_processor=device.type == "cpu", pause_s=2 * _WATCH_S)
        while True:
            time.sleep(_WATCH_S)
            stalled_s = stall.seconds(self._reader.busy_s)
            if self._serves and stalled_s > limit_s:
                self.fail(TimeoutError(f"a step has made no progress for {stalled_s:.0f} s"))


def _thread(name: str, run: Callable[[Any], None], argument: object) -> threading.Thread:
    """Start a thread that does not prevent the end of the process."""
    thread = threading.Thread(target=run, args=(argument,), name=name, daemon=True)
    thread.start()
    return thread
