"""A prefill worker with one precomputed prompt, so that only the transfer takes time.

``python -m tests.programs.kept_prompt --workload FILE --codec auto`` computes a prompt with the
engine, then serves `headrace.v1.Prefill`. It answers every request with the KV of that prompt,
chunk by chunk. It prints a line of JSON when it is ready, and a report as a line of JSON for each
line on stdin.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from pathlib import Path
from typing import Any

import uvloop

from headrace.v1 import prefill_pb2_grpc
from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.engine import Add, Command, Computed, Engine, StepOutput
from runtime.offline.compress import documentation
from runtime.pages.plan import PAGE_SIZE
from runtime.pages.sent import SentTokens
from services.common.grpc_server import GrpcServer
from services.common.logging import configure_logging
from services.common.model_source import resolve_model
from services.prefill.service import PrefillWorker
from services.prefill.settings import PrefillSettings
from services.tokenizer.loading import load_tokenizer
from services.transfer.agent import TransferAgent
from services.worker.codec_warm_up import warm_up_transfers
from services.worker.loading import load_worker
from services.worker.prefill_service import SERVICE
from services.worker.threads import set_switch_interval

SMOLLM2 = "smollm2-135m"


@dataclass(frozen=True)
class Workload:
    """KV to transfer: that of one prompt, once for each of several concurrent requests.

    Attributes:
        model: "smollm2-135m", or a checkpoint folder whose prompt is made of arbitrary tokens.
        device: "cpu" or "cuda".
        tokens: length of the prompt, a multiple of ``chunk``.
        chunk: tokens of each chunk that the prefill worker announces as computed.
        prompts: number of concurrent requests.
        codebooks: file of codebooks for the model's KV.
    """

    model: str
    device: str
    tokens: int
    chunk: int
    prompts: int
    codebooks: str

    def prompt(self) -> tuple[int, ...]:
        """Return the tokens; for SmolLM2, those of real text that calibration does not use."""
        if self.model != SMOLLM2:
            return tuple(100 + 31 * number % 397 for number in range(self.tokens))
        tokens = load_tokenizer(resolve_model(SMOLLM2)).encode(documentation()[1])
        return tuple(tokens[: self.tokens])

    def settings(self, prompts: int) -> dict[str, Any]:
        """Return the settings of a worker with pages for some prompts."""
        return {
            "model": self.model,
            "codebooks": self.codebooks,
            "device": self.device,
            "kv_tokens": prompts * self.tokens + PAGE_SIZE,
            "max_running": 1,
            "step_tokens": self.chunk,
        }


class KeptPrompt(Engine):
    """Engine that computes one prompt at the start and answers every request with its pages."""

    def __init__(self, engine: Engine, workload: Workload) -> None:
        vars(self).update(vars(engine))
        self._workload = workload
        self._pending: list[str] = []
        self.page_tables = self._prefill_once()

    @property
    def has_work(self) -> bool:
        return bool(self._pending)

    def plan(self, incoming: Sequence[Command]) -> StepOutput:
        ids = [command.request.id for command in incoming if isinstance(command, Add)]
        self._pending += ids
        return StepOutput(started=ids)

    def compute(self) -> StepOutput:
        output = StepOutput()
        token = SampledToken(choice=0, index=0, token=1)
        chunk = self._workload.chunk
        for request_id in self._pending:
            for first in range(0, self._workload.tokens, chunk):
                pages = slice(first // PAGE_SIZE, (first + chunk) // PAGE_SIZE)
                tables = tuple(table[pages] for table in self.page_tables)
                last = first + chunk >= self._workload.tokens
                computed = Computed(request_id, first, chunk, tables, completes=last, samples=last)
                output.computed.append(computed)
            output.tokens.append((request_id, token))
        self._pending.clear()
        return output

    def _prefill_once(self) -> tuple[tuple[int, ...], ...]:
        tokens = self._workload.prompt()
        request = Request("kept", tokens, len(tokens), SamplingParams(), max_tokens=2)
        tables: tuple[tuple[int, ...], ...] = ((),) * len(self.executor.shape.plan.groups)
        commands: list[Command] = [Add(request, hold=True)]
        while len(tables[0]) < len(tokens) // PAGE_SIZE:
            Engine.plan(self, commands)
            for chunk in Engine.compute(self).computed:
                tables = tuple(map(add, tables, chunk.page_tables))
            commands = []
        return tables


async def serve(workload: Workload, codec: str) -> None:
    """Serve until stdin is closed."""
    settings = PrefillSettings.model_validate(
        {**workload.settings(prompts=1), "codec": codec, "worker_id": f"prefill-{codec}"}
    )
    loaded = load_worker(settings, decodes=False)
    engine = KeptPrompt(loaded.engine, workload)
    agent = TransferAgent(
        f"prefill-{loaded.identity.epoch}", loaded.rank.device, network=settings.transfer_network
    )
    endpoint = loaded.rank.new_endpoint(agent)
    worker = PrefillWorker(settings, replace(loaded, engine=engine), (endpoint,))
    server = GrpcServer(settings.endpoint, [SERVICE])
    prefill_pb2_grpc.add_PrefillServicer_to_server(worker.prefills, server.server)
    warm_up_transfers(loaded.rank, endpoint)
    set_switch_interval()
    worker.engine.start()
    await server.start()
    ready = {
        "worker_id": loaded.identity.worker_id,
        "epoch": loaded.identity.epoch,
        "address": f"127.0.0.1:{server.port}",
        "digest": repr(
            endpoint.digest(
                engine.page_tables, SentTokens.whole(endpoint.layout.plan, workload.tokens)
            )
        ),
    }
    print(json.dumps(ready), flush=True)  # noqa: T201
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(_report(worker)), flush=True)  # noqa: T201
    await server.stop(0)
    await worker.close()
    endpoint.close()


def _report(worker: PrefillWorker) -> dict[str, object]:
    """Return the metrics of the link policy by name and labels."""
    worker.observe()
    names = ("kv_segments", "kv_wire_mode", "kv_link", "kv_encode_bytes", "kv_decode_bytes")
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in worker.metrics.registry.collect()
        if family.name.startswith(tuple(f"headrace_{name}" for name in names))
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--codec", required=True)
    arguments = parser.parse_args()
    configure_logging(f"prefill-{arguments.codec}", level="warning")
    workload = Workload(**json.loads(arguments.workload.read_text()))
    uvloop.run(serve(workload, arguments.codec))


if __name__ == "__main__":
    main()
