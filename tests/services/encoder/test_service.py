"""An encoder worker with a tiny random model behind its gRPC service, with a real router."""

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.v1 import encode_pb2, encode_pb2_grpc, error_pb2
from runtime.encoder.model import EncoderInput, load_encoder
from services.common.errors import SettingsError
from services.common.grpc_server import GrpcServer, open_channel
from services.common.token_ids import pack_tokens
from services.encoder.encoding_thread import EncodeFailure
from services.encoder.loading import LoadedEncoder, load_worker
from services.encoder.service import SERVICE, EncoderServicer, EncoderWorker
from services.encoder.settings import EncoderSettings
from services.router.app import build_encoder_dispatcher
from services.router.settings import RouterSettings
from services.worker import process
from tests.services.encoder.samples import MAX_TOKENS, write_embedder
from tests.services.tls_ports import router_port
from tests.services.workers import until

TOKENS = (2, 10, 11, 12, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedEncoder:
    settings = {"model": str(folder), "worker_id": "e0", "served_model_name": "tiny"}
    return load_worker(EncoderSettings.model_validate({**settings, "device": "cpu"}))


@pytest.fixture
async def worker(loaded: LoadedEncoder) -> AsyncIterator[EncoderWorker]:
    made = EncoderWorker(loaded)
    made.thread.start()
    yield made
    await made.close()


@pytest.fixture
async def call(worker: EncoderWorker) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that calls the service of the worker."""
    server = GrpcServer("127.0.0.1:0", [SERVICE])
    encode_pb2_grpc.add_EncoderServicer_to_server(EncoderServicer(worker), server.server)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = encode_pb2_grpc.EncoderStub(channel)

        async def encode(*inputs: tuple[int, ...], **values: Any) -> encode_pb2.EncodeReply:
            known = {"epoch": worker.epoch, "deadline_s": 20.0, "placement_id": "p"}
            messages = [encode_pb2.EncoderInput(tokens=pack_tokens(each)) for each in inputs]
            reply: encode_pb2.EncodeReply = await stub.Encode(
                encode_pb2.EncodeRequest(inputs=messages, **{**known, **values})
            )
            return reply

        yield encode
    await server.stop(0)


def test_registered_facts_are_those_of_the_encoder(loaded: LoadedEncoder) -> None:
    model = loaded.model
    assert (model.name, model.task, model.dimension) == ("tiny", "embed", 48)
    assert model.max_tokens == MAX_TOKENS
    assert model.tokenizer_hash


async def test_outputs_are_the_embeddings(call: Callable[..., Any], folder: Path) -> None:
    inputs = [TOKENS, (2, 3), tuple(range(2, 60))]
    reply = await call(*inputs)
    expected = load_encoder(folder).encode([EncoderInput(each) for each in inputs])
    found = torch.tensor([struct.unpack("<48f", output) for output in reply.outputs])
    assert torch.equal(found, expected)
    assert reply.tokens == sum(map(len, inputs))


@pytest.mark.parametrize(
    ("inputs", "values", "code"),
    [
        ((), {}, error_pb2.ERROR_CODE_INVALID),
        (((),), {}, error_pb2.ERROR_CODE_INVALID),
        (((1,) * (MAX_TOKENS + 1),), {}, error_pb2.ERROR_CODE_INVALID),
        (((97,),), {}, error_pb2.ERROR_CODE_INVALID),
        ((TOKENS,), {"placement_id": "../x"}, error_pb2.ERROR_CODE_INVALID),
        ((TOKENS,), {"deadline_s": float("nan")}, error_pb2.ERROR_CODE_INVALID),
        ((TOKENS,), {"deadline_s": -1.0}, error_pb2.ERROR_CODE_DEADLINE),
        ((TOKENS,), {"epoch": "earlier"}, error_pb2.ERROR_CODE_INCOMPATIBLE),
    ],
)
async def test_call_without_result_gets_a_typed_error(
    call: Callable[..., Any], inputs: Any, values: dict[str, Any], code: int, worker: EncoderWorker
) -> None:
    reply = await call(*inputs, **values)
    assert (reply.error.code, reply.error.worker_id) == (code, "e0")
    assert not reply.outputs
    assert worker.idle
    assert len((await call(TOKENS)).outputs) == 1


async def test_malformed_input_is_refused(call: Callable[..., Any], worker: EncoderWorker) -> None:
    request = encode_pb2.EncodeRequest(
        epoch=worker.epoch,
        deadline_s=9,
        placement_id="p",
        inputs=[encode_pb2.EncoderInput(tokens=b"abc")],
    )
    reply = await EncoderServicer(worker).Encode(request, Any)  # type: ignore[arg-type]
    assert reply.error.code == error_pb2.ERROR_CODE_INVALID


async def test_draining_worker_refuses_and_ends_calls(
    call: Callable[..., Any], worker: EncoderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = threading.Event()
    encode = worker.loaded.encoder.encode

    def wait(inputs: Any) -> torch.Tensor:
        assert blocked.wait(20)
        return encode(inputs)

    monkeypatch.setattr(worker.loaded.encoder, "encode", wait)
    running = asyncio.create_task(call(TOKENS))
    await until(lambda: not worker.idle)
    worker.draining = True
    assert (await call(TOKENS)).error.code == error_pb2.ERROR_CODE_DRAINING
    worker.end_requests()
    assert (await running).error.code == error_pb2.ERROR_CODE_DRAINING
    assert worker.idle
    blocked.set()


async def test_call_of_a_gone_gateway_is_dropped(
    call: Callable[..., Any], worker: EncoderWorker
) -> None:
    task = asyncio.create_task(call(*[TOKENS] * 2000))
    await until(lambda: not worker.idle)
    task.cancel()
    await until(lambda: worker.idle)
    await until(lambda: worker.thread.load.queue_tokens == 0)


async def test_worker_whose_test_input_is_not_finite_is_not_ready(
    worker: EncoderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        broken = torch.full((1, 48), torch.nan)
        patched.setattr(worker.loaded.encoder, "encode", lambda inputs: broken)
        worker.thread.not_finite += 1
        worker.observe()
        await until(lambda: worker.not_ready is not None)
        assert worker._testing is not None
        await worker._testing
    worker.observe()
    await until(lambda: worker.not_ready is None)


async def test_self_test_that_is_refused_is_repeated(
    worker: EncoderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(inputs: object) -> None:
        raise EncodeFailure(error_pb2.ERROR_CODE_OVERLOADED, "the queue is full")

    worker.thread.not_finite += 1
    with monkeypatch.context() as patched:
        patched.setattr(worker.thread, "submit", refuse)
        worker.observe()
        assert worker._testing is not None
        await worker._testing
    broken = torch.full((1, 48), torch.nan)
    monkeypatch.setattr(worker.loaded.encoder, "encode", lambda inputs: broken)
    worker.observe()
    await until(lambda: worker.not_ready is not None)


async def test_life_of_a_worker_with_a_router(
    loaded: LoadedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It registers, is ready, reports its load, drains and deregisters."""
    stop = asyncio.Event()
    monkeypatch.setattr(process, "stop_on_signals", lambda: stop)
    monkeypatch.setattr(process, "freeze_loaded", lambda: None)
    monkeypatch.setattr(process, "set_switch_interval", lambda: None)
    encoders = build_encoder_dispatcher(RouterSettings.model_validate({}), 0.0)
    async with router_port(encoders=encoders) as port:
        worker = EncoderWorker(loaded)
        values = {"routers": [f"http://127.0.0.1:{port}"], "heartbeat_s": 0.02}
        of_worker = EncoderSettings.model_validate(values)
        server = GrpcServer("127.0.0.1:0", [SERVICE])
        encode_pb2_grpc.add_EncoderServicer_to_server(EncoderServicer(worker), server.server)
        living = asyncio.create_task(
            process.run_process(
                worker, server, of_worker, "encoder", lambda at: worker.start(at, of_worker)
            )
        )
        await until(lambda: bool(encoders.fleet.models))
        await until(lambda: encoders.fleet.readiness(0.0)[0].ready)
        (ready,) = encoders.fleet.readiness(0.0)
        assert ready.model == "tiny"
        stop.set()
        await living
        assert not encoders.fleet.models


@pytest.mark.parametrize(
    "values", [{"model": "/nowhere"}, {"backend": "unknown"}, {"max_tokens": 1 << 20}]
)
def test_model_that_cannot_be_served_is_a_settings_error(
    folder: Path, values: dict[str, Any]
) -> None:
    settings = EncoderSettings.model_validate({"model": str(folder), "device": "cpu", **values})
    with pytest.raises(SettingsError):
        load_worker(settings)
