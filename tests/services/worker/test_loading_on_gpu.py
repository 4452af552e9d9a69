"""A worker on a GPU: its kernels, warm-up and memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import codec
from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from runtime.checkpoint.assemble import nbytes
from runtime.core.request import SamplingParams
from runtime.engine import Add
from runtime.graphs.capture import Captured
from runtime.megakernel.decode_step import unsupported_by_megakernel
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount, pages_for
from runtime.steps.mixed import pass_shapes
from runtime.steps.replay import StepReplay
from runtime.steps.sampling import CAPTURED_FEATURES
from services.common.errors import SettingsError
from services.transfer.agent import TransferAgent
from services.worker.codec_warm_up import warm_up_transfers
from services.worker.kv_budget import RESERVE, ROW_BYTES
from services.worker.loading import Loaded, load_worker
from services.worker.model_loading import load_model
from services.worker.settings import WorkerSettings
from tests.runtime.tiny import CONFIG, drive, request_of, tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GIB = 1 << 30
MIXED = (9, 5, None, 12, 17, 11, 24)
CHECKPOINTS = {
    "dense": tiny_checkpoint(),
    "factorized": tiny_checkpoint(ranks=(9, 5, 8, 12, 17, 11, 24)),
    "mixed": tiny_checkpoint(ranks=MIXED, bias=True),
    "head norms": tiny_checkpoint(ranks=MIXED, head_norms=True),
}


def folder_of(checkpoint: Checkpoint, folder: Path) -> Path:
    write_checkpoint(checkpoint, folder / "model")
    return folder / "model"


def settings_of(model: Path, **changes: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {"model": str(model), "device": "cuda", "codec": "raw", "kv_tokens": 4096}
        | {"max_running": 12, "step_tokens": 64, "chunk_tokens": 32}
        | changes
    )


@pytest.fixture(params=list(CHECKPOINTS))
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Loaded]:
    """A kind of checkpoint, its path, and a loaded decode worker."""
    path = folder_of(CHECKPOINTS[request.param], tmp_path)
    return request.param, path, load_worker(settings_of(path), decodes=True)


def replay_of(loaded: Loaded) -> StepReplay:
    assert isinstance(loaded.rank.executor.steps, StepReplay)
    return loaded.rank.executor.steps


def reference_logits(model: Model, tokens: Sequence[int]) -> Tensor:
    """Return the logits after every token, `[len(tokens), vocab]`."""
    pages = range(pages_for(len(tokens), model.page_size))
    batch = Batch.of([SequenceSlice(tokens, 0, pages)])
    every = replace(batch, logit_rows=torch.arange(len(tokens)))
    return model.forward(every, model.new_cache(PageCount(len(pages))))


def test_gpu_uses_fused_kernels_and_agrees_with_the_cpu(
    loaded: tuple[str, Path, Loaded],
) -> None:
    """Compare greedy tokens with the logits of the same weights in fp32 on the CPU.

    The reference computes the logits after the GPU's tokens. The gap between the best logit
    and that of each token must be at most 0.08 of the largest magnitude of a logit. The bf16 error
    of each of the two logits is up to 0.04.
    """
    kind, path, worker = loaded
    model = worker.rank.executor.model
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert model.matmul == ("gemm" if hopper else "plain")
    if hopper:
        assert bool(unsupported_by_megakernel(model)) == (kind == "head norms")
    assert model.kv_format.kernels.startswith("triton-")
    assert model.dtype == torch.bfloat16

    requests = [request_of(f"r{n}", 3 + 9 * n, 12, seed=n) for n in range(7)]
    record = drive(worker.engine, *map(Add, requests))
    reference = build_model(load_checkpoint(path, dtype=torch.bfloat16), dtype=torch.float32)
    best = total = 0
    for request in requests:
        output = record.output(request.id)
        assert len(output) == 12
        logits = reference_logits(reference, (*request.tokens, *output[:-1]))
        for row, token in zip(logits[request.prompt_tokens - 1 :], output, strict=True):
            behind = float(row.max() - row[token])
            assert behind <= 0.08 * float(row.abs().max())
            best, total = best + (behind == 0), total + 1
    assert best > 0.8 * total


def test_warm_up_captures_every_graph(loaded: tuple[str, Path, Loaded]) -> None:
    _, _, worker = loaded
    replay = replay_of(worker)
    buckets = (1, 2, 4, 8, 12)
    captured: list[dict[Any, Any]]
    captured = [replay._decode._passes, replay._sampler._runs, replay._mixed._passes]
    expected: list[set[Any]] = [
        set(buckets),
        {(bucket, features) for bucket in buckets for features in CAPTURED_FEATURES},
        set(pass_shapes(64, 12, decodes=True)),
    ]
    assert [set(graphs) for graphs in captured] == expected
    assert all(isinstance(graph, Captured) for graphs in captured for graph in graphs.values())
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
    for sampling in (SamplingParams(), sampled, replace(sampled, presence_penalty=0.3, logprobs=4)):
        requests = [request_of(f"r{n}", 5 + n, 4 + n, sampling=sampling) for n in range(12)]
        record = drive(worker.engine, *map(Add, requests))
        assert len(record.ended) == 12
    assert [set(graphs) for graphs in captured] == expected


def test_layer_graphs_equal_step_graphs(tmp_path: Path) -> None:
    """Without the megakernel, both kinds of graph run the same kernels and give the same tokens."""
    path = folder_of(CHECKPOINTS["head norms"], tmp_path)
    requests = [request_of(f"r{n}", 3 + 9 * n, 12, seed=n) for n in range(7)]
    outputs = []
    for graphs in ("step", "layer"):
        worker = load_worker(settings_of(path, decode_graphs=graphs), decodes=True)
        record = drive(worker.engine, *map(Add, requests))
        outputs.append([record.output(request.id) for request in requests])
    assert outputs[0] == outputs[1]


def test_prefill_worker_is_compatible_and_has_no_decode_graphs(
    loaded: tuple[str, Path, Loaded],
) -> None:
    _, path, decode = loaded
    prefill = load_worker(settings_of(path), decodes=False)
    replay = replay_of(prefill)
    assert not replay._decode._passes
    assert all(shape.decoded == 0 for shape in replay._mixed._passes)
    assert prefill.identity.compatibility == decode.identity.compatibility
    request = request_of("r", 40, max_tokens=2)
    held = drive(prefill.engine, Add(request, hold=True))
    assert held.output("r") == drive(decode.engine, Add(request)).output("r")[:1]


def test_fp32_uses_the_torch_backend(tmp_path: Path) -> None:
    path = folder_of(CHECKPOINTS["dense"], tmp_path)
    worker = load_worker(settings_of(path, dtype="float32"), decodes=True)
    assert worker.rank.executor.model.matmul == "plain"
    assert worker.rank.executor.model.kv_format.kernels.startswith("triton-")
    assert len(drive(worker.engine, Add(request_of("r", 20))).output("r")) == 8


async def test_codec_is_warmed_up_with_the_workers_codebooks(tmp_path: Path) -> None:
    """Warm-up decodes its own segments; a worker that cannot do so does not start."""
    path = folder_of(CHECKPOINTS["dense"], tmp_path)
    generator = torch.Generator().manual_seed(0)
    book = codec.calibrate(torch.randn(1 << 14, generator=generator).bfloat16())
    books = codec.Codebooks.of(
        {(layer, name): book for layer in range(CONFIG.num_layers) for name in ("k", "v")}
    )
    books.save(tmp_path / "codebooks.json")
    settings = settings_of(path, codec="splitzip", codebooks=str(tmp_path / "codebooks.json"))
    worker = load_worker(settings, decodes=False)
    assert worker.identity.compatibility.codebook_id == books.id
    agent = TransferAgent("warm-up", worker.rank.device)
    try:
        warm_up_transfers(worker.rank, worker.rank.new_endpoint(agent))
    finally:
        agent.close()


def test_pages_fill_the_workers_share(tmp_path: Path) -> None:
    """The share is 3 GiB beside the memory that other tests of this process hold.

    A slab of the default size would depend on the GPU, and may exceed the share.
    """
    path = folder_of(CHECKPOINTS["dense"], tmp_path)
    torch.cuda.empty_cache()
    had = torch.cuda.memory_reserved()
    total = torch.cuda.mem_get_info()[1]
    share = (had + 3 * GIB) / total
    settings = settings_of(path, kv_tokens="auto", gpu_memory_utilization=share, slot_bytes=1 << 20)
    worker = load_worker(settings, decodes=True)
    logits = worker.rank.sizes.limits.max_running * CONFIG.vocab_size
    left = 3 * GIB - RESERVE - ROW_BYTES * logits - worker.rank.sizes.slab_bytes
    assert 0.95 * left < sum(plane.nbytes for plane in worker.rank.executor.cache.planes) <= left
    assert torch.cuda.memory_reserved() - had <= 3 * GIB


def test_share_without_room_for_a_page_is_refused(tmp_path: Path) -> None:
    path = folder_of(CHECKPOINTS["dense"], tmp_path)
    settings = settings_of(path, kv_tokens="auto", gpu_memory_utilization=1e-3)
    with pytest.raises(SettingsError, match=r"not enough GPU memory for KV, .* GiB short"):
        load_worker(settings, decodes=True)


@pytest.mark.parametrize("head_norms", [False, True])
def test_loading_never_holds_the_weights_twice(head_norms: bool, tmp_path: Path) -> None:
    """At most one of the twelve layers is in memory both unpacked and packed."""
    config = replace(
        CONFIG, hidden_size=512, intermediate_size=2048, num_layers=12, num_heads=8, head_dim=64
    )
    path = folder_of(tiny_checkpoint(config=config, head_norms=head_norms), tmp_path)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model, _ = load_model(path, settings_of(path), "cuda:0")
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    weights = nbytes(load_checkpoint(path, dtype=torch.bfloat16))
    assert model.config == config
    assert kept < 1.1 * weights
    assert peak < 1.3 * weights
