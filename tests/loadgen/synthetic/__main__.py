"""Server process: ``python -m tests.loadgen.synthetic BEHAVIOUR``, with the behaviour as JSON."""

import asyncio
import gc
import os
import select
import selectors
import sys
from typing import Any

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


async def _main(behaviour: Behaviour) -> None:
    """Serve until stdin ends. Each line on stdin requests the log, written as a line of JSON."""
    loop = asyncio.get_running_loop()
    server, over = Schedule(behaviour), asyncio.Event()
    http = await loop.create_server(lambda: Connection(server), "127.0.0.1", 0, backlog=4096)
    rpc = aio.server(options=[("grpc.so_reuseport", 0)])
    inference_pb2_grpc.add_InferenceServicer_to_server(Servicer(server), rpc)
    ports = {"http_port": http.sockets[0].getsockname()[1]}
    ports["grpc_port"] = rpc.add_insecure_port("127.0.0.1:0")
    await rpc.start()

    def write_line(content: Any) -> None:
        sys.stdout.buffer.write(orjson.dumps(content) + b"\n")
        sys.stdout.buffer.flush()

    def log_requested() -> None:
        if os.read(0, 1):
            write_line(server.log)
        else:
            over.set()

    loop.add_reader(0, log_requested)
    gc.disable()  # a collection would make events late
    write_line(ports)
    await over.wait()
    os._exit(0)  # the test has ended; open connections are dropped


def _new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_PreciseSelector())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_main(Behaviour.from_json(sys.argv[1])))
