"""A KV format defined in this file is served, colocated and disaggregated.

No other file mentions it: the workers import it through ``--kv-format module:Class``.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import grpc
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from headrace.v1 import prefill_pb2 as pb
from headrace.v1.prefill_pb2_grpc import PrefillStub
from runtime.attention.base import Batch
from runtime.attention.reference import ReferenceAttention
from runtime.checkpoint import write_checkpoint
from runtime.config import ModelConfig
from runtime.kv.format import Plane
from services.common.grpc_server import MessageStream, credentials, next_message, open_channel
from services.common.placement import Compatibility
from services.prefill.settings import PrefillSettings
from services.worker.loading import load_worker
from tests.harness.deployment import Running, deployed
from tests.programs.equality import Answer, Case, ask_all, digests
from tests.runtime.tiny import CONFIG, tiny_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SPEC = f"{__name__}:Int8Values"
TINY = replace(CONFIG, vocab_size=256, context_length=1024)
LENGTHS = (1, 17, 64, 333)  # tokens of the prompts


class Int8Values:
    """K as in `dense`; V as int8 codes with one fp32 scale for each KV head and token."""

    name = "test-int8-values"
    version = 3
    artifact_hash = "none"
    graph_safe = False
    dense_bf16 = False
    kernels = "test-reference-1"

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._attention = ReferenceAttention()

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        by_halves: bool = False,
    ) -> Self:
        if by_halves:
            raise ValueError("this format is for unpacked weights")
        return cls(config)

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        heads, dim = self._config.num_kv_heads, self._config.head_dim
        return (
            Plane("k", torch.bfloat16, (heads, page_size, dim)),
            Plane("v", torch.int8, (heads, page_size, dim), encodable=False),
            Plane("v_scale", torch.float32, (heads, page_size, 1), encodable=False),
        )

    def layer(self, index: int) -> Self:
        return self

    def append(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        keys, codes, scales = planes
        unused = torch.empty_like(keys)
        q = self._attention.write(qkv, rope, keys, unused, batch)
        kv_heads, page_size, dim = keys.shape[1:]
        values = qkv.view(len(qkv), -1, dim)[:, -kv_heads:].float()  # [n, kv_heads, dim]
        scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127
        pages = batch.page_table[batch.sequences, batch.positions // page_size].long()
        slots = batch.positions % page_size
        codes[pages, :, slots] = (values / scale).round().to(torch.int8)
        scales[pages, :, slots] = scale
        return q

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        keys, codes, scales = planes
        return self._attention.attend(q, keys, codes.float() * scales, batch)


@dataclass(frozen=True)
class Served:
    """Answers of one deployment, and the digests and metrics of its workers."""

    answers: dict[str, Answer]
    computed: dict[str, str]
    arrived: dict[str, str]
    segments: dict[str, float]


def cases() -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (n,), generator=generator).tolist() for n in LENGTHS]
    return [
        Case(f"{len(prompt)} tokens", tuple(prompt), 0.8 * (at % 2), at, max_tokens=24)
        for at, prompt in enumerate(prompts)
    ]


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer with one token for each byte."""
    vocab = {piece: at for at, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random model on disk, and an environment in which workers find this module."""
    folder = tmp_path_factory.mktemp("kv-format")
    write_checkpoint(tiny_checkpoint(config=TINY), folder / "tiny")
    byte_tokenizer().save(str(folder / "tiny" / "tokenizer.json"))
    root = Path(__file__).parents[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(folder / "cache"))
        patch.setenv("PYTHONPATH", f"{root}:{root / 'proto'}")
        for role in ("PREFILL", "DECODE"):
            patch.setenv(f"HEADRACE_{role}_KV_TOKENS", "2048")
            patch.setenv(f"HEADRACE_{role}_KV_DIGEST", "true")
            patch.setenv(f"HEADRACE_{role}_LOG_FORMAT", "json")
        yield folder / "tiny"


def flags(model: Path) -> tuple[str, ...]:
    return (
        *("--model", str(model), "--device", "cpu"),
        *("--codec", "splitzip", "--kv-format", SPEC),
    )


def serve(running: Running) -> Served:
    answers = asyncio.run(ask_all(running, cases(), concurrency=1))
    if "prefill-0" not in running.state.pids:
        return Served(answers, {}, {}, {})
    running.wait_until_idle()  # digests and metrics may be later than the answers
    return Served(
        answers,
        digests(running, "prefill-0", "kv computed"),
        digests(running, "decode-0", "kv verified"),
        {
            mode: running.metric("prefill-0", "headrace_kv_segments_total", mode=mode)
            for mode in ("raw", "splitzip")
        },
    )


@pytest.fixture(scope="module")
def colocated(model: Path) -> Served:
    with deployed("--colocated", *flags(model)) as running:
        return serve(running)


@pytest.fixture(scope="module")
def disaggregated(model: Path) -> Iterator[Running]:
    with deployed(*flags(model)) as running:
        yield running


def test_disaggregated_output_equals_colocated_output(
    colocated: Served, disaggregated: Running
) -> None:
    served = serve(disaggregated)
    assert served.answers == colocated.answers
    assert all(len(answer.tokens) > 1 for answer in served.answers.values())
    assert len(served.arrived) == len(LENGTHS)
    assert served.arrived == {key: served.computed[key] for key in served.arrived}
    assert all(digest.count("-") == 2 for digest in served.arrived.values()), "three plane groups"
    assert served.segments["splitzip"] >= len(LENGTHS), "K has codebooks"
    assert served.segments["raw"] == 2 * served.segments["splitzip"], "codes and scales have none"


def test_handshake_refuses_another_kv_format(model: Path, disaggregated: Running) -> None:
    codebooks = next((model.parent / "cache").rglob("codebooks-*.json"))
    settings = PrefillSettings.model_validate(
        {"model": str(model), "device": "cpu", "kv_format": SPEC, "codebooks": codebooks}
    )
    ours = load_worker(settings, decodes=False).identity.compatibility
    assert (ours.kv_format, ours.kv_format_version) == (Int8Values.name, Int8Values.version)
    assert asyncio.run(refusal(disaggregated, ours)) is None
    for field, value in (
        ("kv_format", "dense"),
        ("kv_format_version", 4),
        ("kv_format_hash", "another"),
    ):
        refused = asyncio.run(refusal(disaggregated, ours.model_copy(update={field: value})))
        assert refused is not None
        assert refused.startswith(f"{field}: decode worker has {value!r}")
        assert ";" not in refused, "nothing else differs"


async def refusal(running: Running, compatibility: Compatibility) -> str | None:
    """Return the prefill worker's reason to refuse this handshake, or None if it accepts it."""
    ready = running.records("prefill-0", "ready")[-1]
    hello = pb.Hello(
        worker_id="reader",
        epoch="0" * 32,
        expected_epoch=str(ready["epoch"]),
        compatibility=pb.Compatibility(**compatibility.model_dump()),
        slot_bytes=4 << 20,
    )
    async with open_channel(f"127.0.0.1:{ready['port']}") as channel:
        session: MessageStream = PrefillStub(channel).Session(
            metadata=credentials(running.state.cluster_token)
        )
        await session.write(pb.PrefillCommands(commands=[pb.PrefillCommand(hello=hello)]))
        try:
            message = await asyncio.wait_for(next_message(session), 60)
        except grpc.aio.AioRpcError as error:
            return error.details()
        assert message is not None
        assert message.events[0].WhichOneof("event") == "welcome"
        session.cancel()
        return None
