"""Server process: ``python -m tests.loadgen.synthetic BEHAVIOUR``, with the behaviour as JSON."""

import asyncio
import gc
import os
import select
import selectors
import sys
from typing import Any
from weakref import WeakSet

import orjson
from grpc import aio

from headrace.v1 import inference_pb2_grpc
from tests.loadgen.synthetic import Behaviour
from tests.loadgen.synthetic.http import Connection
from tests.loadgen.synthetic.rpc import Servicer
from tests.loadgen.synthetic.schedule import Schedule


class _PreciseSelector(selectors.EpollSelector):
    """Selector with microsecond timeouts.

    Timeouts of epoll are in milliseconds. This selector waits with ``select`` on the epoll file
    descriptor instead, whose timeouts are in microseconds.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            select.select([self.fileno()], [], [], timeout)
        return super().select(0)


class _Server:
    """Current schedule, and the connections that use it."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.schedule = Schedule(behaviour)
        self._connections: WeakSet[Connection] = WeakSet()

    def connect(self) -> Connection:
        connection = Connection(self.schedule)
        self._connections.add(connection)
        return connection

    def reset(self, behaviour: Behaviour) -> None:
        """Drop all connections and start with an empty log."""
        for connection in tuple(self._connections):
            connection.abort()
        self.schedule = Schedule(behaviour)
        gc.collect()


async def _main(behaviour: Behaviour) -> None:
    """Serve until stdin ends.

    An empty line on stdin requests the log, written as a line of JSON. Another line is the JSON of
    the behaviour from now on; the ports are written as the answer.
    """
    loop = asyncio.get_running_loop()
    server = _Server(behaviour)
    over = asyncio.Event()
    lines = b""
    http = await loop.create_server(server.connect, "127.0.0.1", 0, backlog=4096)
    rpc = aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = Servicer(lambda: server.schedule)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, rpc)
    ports = {"http_port": http.sockets[0].getsockname()[1]}
    ports["grpc_port"] = rpc.add_insecure_port("127.0.0.1:0")
    await rpc.start()

    def write_line(content: Any) -> None:
        sys.stdout.buffer.write(orjson.dumps(content) + b"\n")
        sys.stdout.buffer.flush()

    def read_lines() -> None:
        nonlocal lines
        received = os.read(0, 65536)
        if not received:
            over.set()
        *whole, lines = (lines + received).split(b"\n")
        for line in whole:
            if line:
                server.reset(Behaviour.from_json(line.decode()))
            write_line(ports if line else server.schedule.log)

    loop.add_reader(0, read_lines)
    gc.disable()  # a collection would make events late
    write_line(ports)
    await over.wait()
    os._exit(0)  # the test has ended; open connections are dropped


def _new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_PreciseSelector())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_main(Behaviour.from_json(sys.argv[1])))
