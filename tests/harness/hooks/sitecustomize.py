"""Fault points of a service process, which loads this module through ``PYTHONPATH`` at its start.

`tests.harness.points` describes the files by which a test controls the points. They hold threads
other than the event loop, so that a held process still answers, sends heartbeats and sees clients
leave.
"""

import importlib.machinery
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_SERVICES = ("gateway", "router", "prefill", "decode")
_SPAWNED = "--multiprocessing-fork"
"""Argument of every process that multiprocessing spawns."""
_POLL_S = 0.005


class _Faults:
    """The control files of this process."""

    def __init__(self, folder: Path, process: str) -> None:
        self._folder = folder
        self._process = process
        self._slots: dict[int, int] = {}  # slot of each announced segment, by nonce
        self._slab: Any = None
        self._passed: Counter[tuple[str, int]] = Counter()

    def hold(self, point: str) -> None:
        """Report that a point was reached and block while the test holds it."""
        held = self._folder / f"{self._process}.{point}.hold"
        try:
            order = (point, held.stat().st_mtime_ns)
            passes = int(held.read_text())
        except FileNotFoundError:
            return
        self._passed[order] += 1
        if self._passed[order] > passes:
            held.with_suffix(".reached").touch()
            while held.exists():
                time.sleep(_POLL_S)

    def value(self, name: str) -> str:
        """Return the content of a control file, or "" if there is none."""
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return ""

    def take(self, *kinds: str) -> str | None:
        """Return the ordered damage if it is one of ``kinds``; it is done once."""
        kind = self.value("damage")
        if kind not in kinds:
            return None
        try:
            (self._folder / "damage").rename(self._folder / f"damage.{self._process}")
        except FileNotFoundError:  # another process was faster
            return None
        return kind

    def engine_thread(self, module: ModuleType) -> None:
        """Hold the engine before it takes new requests."""
        step = module.EngineThread._step

        def held(thread: Any, commands: list[Any]) -> None:
            if any(hasattr(command, "request") for command in commands):
                self.hold("queued")
            step(thread, commands)

        module.EngineThread._step = held

    def engine(self, module: ModuleType) -> None:
        """Hold the engine before a forward pass."""
        compute = module.Engine.compute

        def held(engine: Any) -> Any:
            if engine.has_work:  # else a step that only frees what an ended request held
                self.hold("computing")
            return compute(engine)

        module.Engine.compute = held

    def scheduler(self, module: ModuleType) -> None:
        """Count preemptions in the length of a file."""
        requeue = module.Scheduler._requeue
        counter = self._folder / f"{self._process}.preempted"

        def counted(scheduler: Any, group: Any) -> None:
            with counter.open("ab") as file:
                file.write(b".")
            requeue(scheduler, group)

        module.Scheduler._requeue = counted

    def executor(self, module: ModuleType) -> None:
        """Hold a rank before its part of a step; the other ranks wait in their first collective."""
        launch = module.LocalExecutor.launch

        def held(executor: Any, plan: Any) -> Any:
            self.hold("launching")
            self.damage_gpu()
            return launch(executor, plan)

        module.LocalExecutor.launch = held

    def rank(self, module: ModuleType) -> None:
        """Add the number of the rank to the name of its process; hold it before it loads."""
        run, known_files = module.RankProcess.run, module.RankProcess.known_files

        def named(process: Any) -> None:
            self._process += f".{process.rank}"
            run(process)

        def held(process: Any) -> Any:
            files = known_files(process)
            self.hold("loading")
            return files

        module.RankProcess.run = named
        module.RankProcess.known_files = held

    def damage_gpu(self) -> None:
        """Run out of GPU memory, or launch a kernel with an invalid index, if this is ordered."""
        name = f"{self._process}.gpu"
        if not (kind := self.value(name)):
            return
        import torch

        (self._folder / name).unlink()
        if kind == "out of memory":
            if torch.cuda.is_available():
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            raise torch.OutOfMemoryError("out of memory")
        torch.zeros(1, device="cuda")[torch.tensor([1 << 20], device="cuda")]

    def owner(self, module: ModuleType) -> None:
        """Hold READs before and after their start; lose or double notifications."""
        owner = module.NixlAgent
        read, notify = owner.read, owner.notify

        def held_read(own: Any, *args: Any) -> None:
            self.hold("pull")
            read(own, *args)
            self.hold("reading")

        def sent(own: Any, peer: str, message: bytes) -> None:
            times = {"lost": 0, "doubled": 2}.get(self.value("notifications"), 1)
            for _ in range(times):
                notify(own, peer, message)

        owner.read = held_read
        owner.notify = sent

    def agent(self, module: ModuleType) -> None:
        """Hold a prefill worker when a segment is encoded; damage segments in the slab."""
        from headrace.v1 import prefill_pb2 as pb

        notify = module.TransferAgent.notify

        def held(agent: Any, peer: str, message: bytes) -> None:
            self.hold("encoded")
            ready = pb.SegmentReady.FromString(message)
            kind = self.take("payload bit", "header epoch", "truncated")
            if kind == "truncated":
                ready.length = 96 + 3
            elif kind is not None:
                at = 16 if kind == "header epoch" else ready.length // 2  # the end may be padding
                self._slab.view(self._slots[ready.nonce], ready.length)[at] ^= 0x10
            notify(agent, peer, ready.SerializeToString())

        module.TransferAgent.notify = held

    def sender(self, module: ModuleType) -> None:
        """Damage announcements of segments."""
        entry, open_sequence = module._manifest_entry, module.Sender.open

        def recorded(extent: Any, outgoing: Any, rank: Any, ref: Any, mode: Any) -> Any:
            segment = entry(extent, outgoing, rank, ref, mode)
            self._slots[segment.nonce] = ref.slot
            return segment

        def opened(sender: Any, outgoing: Any) -> None:
            self._slab = sender._endpoints[0].slab
            emit = outgoing.emit

            def damaged(event: Any) -> None:
                if event.WhichOneof("event") == "segment":
                    segment = event.segment
                    kind = self.take("slot", "generation", "layers", "tokens", "group", "repeated")
                    if kind == "slot":
                        segment.slot = 1 << 20
                    elif kind == "generation":
                        segment.generation -= 1
                    elif kind == "layers":
                        segment.num_layers = (1 << 32) - 1
                    elif kind == "tokens":
                        segment.first_token += 1 << 20
                    elif kind == "group":
                        segment.plane_group = 77
                    elif kind == "repeated":
                        emit(event)
                emit(event)

            outgoing.emit = damaged
            open_sequence(sender, outgoing)

        module.Sender.open = opened
        setattr(module, "_manifest_entry", recorded)  # noqa: B010 - mypy knows no such attribute

    def placement(self, module: ModuleType) -> None:
        """Claim other properties, as a worker of another version would."""
        if version := os.environ.get("HEADRACE_FAULT_CODEC_VERSION"):
            make = module.Compatibility.__init__

            def changed(compatibility: Any, **fields: Any) -> None:
                make(compatibility, **{**fields, "codec_version": int(version)})

            module.Compatibility.__init__ = changed

    def wall_clock(self) -> None:
        """Add the seconds in the control file to the wall clock."""
        real, real_ns = time.time, time.time_ns
        time.time = lambda: real() + float(self.value("clock") or 0)
        time.time_ns = lambda: real_ns() + int(float(self.value("clock") or 0) * 1e9)


class _Finder(MetaPathFinder):
    """Changes modules right after their import."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _process_name(command: list[str]) -> str | None:
    """Return the worker's id, or the name of the gateway or router; None for other processes.

    The process of another rank than the first has the name of its parent, until it runs the rank.
    """
    if _SPAWNED in command:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
        command = parent.split("\0")
    arguments = command[command.index("services.cli") + 1 :] if "services.cli" in command else []
    if not arguments or arguments[0] not in _SERVICES:
        return None
    if "--worker-id" in arguments:
        return arguments[arguments.index("--worker-id") + 1]
    return arguments[0]


def _install() -> None:
    folder = os.environ.get("HEADRACE_FAULT_POINTS")
    process = _process_name(sys.orig_argv)
    if folder is None or process is None:
        return
    faults = _Faults(Path(folder), process)
    faults.wall_clock()
    changes: dict[str, Callable[[ModuleType], None]] = {
        "services.worker.engine_thread": faults.engine_thread,
        "runtime.engine.engine": faults.engine,
        "runtime.engine.local_executor": faults.executor,
        "runtime.engine.scheduler": faults.scheduler,
        "services.worker.ranks.process": faults.rank,
        "services.transfer.nixl_agent": faults.owner,
        "services.transfer.agent": faults.agent,
        "services.transfer.sender": faults.sender,
        "services.common.placement": faults.placement,
    }
    sys.meta_path.insert(0, _Finder(changes))


_install()
