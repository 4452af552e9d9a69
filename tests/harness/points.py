"""Points at which a test holds the processes of a deployment.

`hooks/sitecustomize.py` is loaded into every service. A process that reaches a point blocks while
the file ``<process>.<point>.hold`` exists, and creates ``<process>.<point>.reached``. A process is
named like its worker; that of rank 1 is ``decode-0.1``.

| point | the process is held |
|---|---|
| loading | on ranks other than the first, before they read the model, which the first has hashed |
| queued | before the engine takes new requests |
| computing | on the first rank, before a forward pass, with its sequences planned |
| launching | on any rank, before its part of a step, for which other ranks wait in a collective |
| encoded | on a prefill worker, when a segment is encoded and its reader does not know |
| pull | on a decode worker, before a READ is started |
| reading | on a decode worker, after a READ was started |

Other control files: ``damage`` (what the next prefill worker does to one segment),
``notifications`` (lost or doubled), ``clock`` (seconds added to the wall clock) and
``<process>.gpu`` (how its next forward pass fails: "out of memory" or "kernel"). A process adds a
byte to ``<process>.preempted`` for each preemption.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 90.0
"""Time limit of every wait for a deployment, also of a restart on a busy machine."""
_HOOKS = Path(__file__).with_name("hooks")


class Points:
    """Control files of a deployment.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which the services must be started."""
        paths = [str(_HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "HEADRACE_FAULT_POINTS": str(self._folder),
        }

    def hold(self, point: str, processes: Sequence[str], after: int = 0) -> None:
        """Hold processes at a point, which each of them passes ``after`` times first."""
        for process in processes:
            self.set(f"{process}.{point}.hold", str(after))

    def has_reached(self, point: str) -> list[str]:
        """Return the processes that have reached a point since it is held."""
        suffix = f".{point}.reached"
        return [path.name.removesuffix(suffix) for path in self._folder.glob(f"*{suffix}")]

    async def reached(self, point: str, limit_s: float = LIMIT_S) -> str:
        """Wait until a process is held at a point, and return its name. Others may then pass it.

        Raises:
            TimeoutError: no process has reached the point after ``limit_s`` seconds.
        """
        until = time.monotonic() + limit_s
        while not (found := self.has_reached(point)):
            if time.monotonic() > until:
                held = [path.name for path in self._folder.glob(f"*.{point}.hold")]
                names = ", ".join(sorted(name.removesuffix(f".{point}.hold") for name in held))
                raise TimeoutError(
                    f"no process reached the point {point!r} within {limit_s:g} s; "
                    f"held there: {names or 'none'}"
                )
            await asyncio.sleep(0.01)
        for path in self._folder.glob(f"*.{point}.hold"):
            if path.name != f"{found[0]}.{point}.hold":
                path.unlink()
        return found[0]

    def release(self, point: str = "*") -> None:
        """Let the processes continue that are held at a point, by default at any."""
        for kind in ("hold", "reached"):
            for path in tuple(self._folder.glob(f"*.{point}.{kind}")):
                path.unlink(missing_ok=True)

    def set(self, name: str, value: str) -> None:
        """Write a control file."""
        part = self._folder / f"{name}.part"  # renamed, since processes poll for the name
        part.write_text(value)
        part.rename(self._folder / name)

    def clear(self, name: str) -> None:
        """Remove a control file."""
        (self._folder / name).unlink(missing_ok=True)

    @property
    def preemptions(self) -> int:
        """Number of preempted sequences and prompts of all processes, also of those that ended."""
        return sum(path.stat().st_size for path in self._folder.glob("*.preempted"))

    def is_set(self, name: str) -> bool:
        """Return whether a control file exists."""
        return (self._folder / name).exists()
