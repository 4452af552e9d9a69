"""Start-up of a worker from its settings, on the CPU."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import Checkpoint, Dense, load_checkpoint, write_checkpoint
from runtime.engine import Add
from runtime.gemm.plan import KernelPlan
from runtime.kv.int4 import Int4Format
from runtime.models.build import build_model
from runtime.offline.bench.ranks import SilentGroup
from runtime.parallel.group import RankGroup
from runtime.parallel.partition import Scheme
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.offline.tune import tune
from services.prefill.settings import PrefillSettings
from services.tokenizer.identity import TokenizerIdentity
from services.tokenizer.loading import load_tokenizer
from services.worker import model_loading
from services.worker.loading import load_worker
from services.worker.peers import NO_PEERS, Peers
from services.worker.settings import WorkerSettings
from tests.runtime.tiny import CONFIG, drive, engine_of, request_of, tiny_checkpoint
from tests.services.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker") / "model"
    write_checkpoint(tiny_checkpoint(ranks=(9, 5, None, 12, 17, 11, 24)), folder)
    return folder


def settings_of(model: Path, **changes: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {"model": str(model), "device": "cpu", "codec": "raw", "max_running": 4, **changes}
    )


def test_device_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = WorkerSettings.model_validate({"device": "cuda", "codec": "raw"})
    with pytest.raises(SettingsError, match=r"device cuda: torch .* sees no GPU"):
        load_worker(settings, decodes=True)


@pytest.mark.parametrize(("kv_tokens", "pages"), [("auto", 1024), (160, 10)])
def test_kv_tokens_set_the_number_of_pages(model: Path, kv_tokens: object, pages: int) -> None:
    loaded = load_worker(settings_of(model, kv_tokens=kv_tokens), decodes=True)
    assert loaded.engine.scheduler.pages.total == (pages,)
    assert len(loaded.rank.executor.cache.planes[0]) == pages
    assert loaded.identity.compatibility.page_plan == loaded.rank.executor.cache.layout.plan
    assert loaded.rank.executor.shape.config == CONFIG


def test_compressed_format_has_windows_for_the_batch_and_one_prompt(model: Path) -> None:
    """6 pages for each of 4 sequences, 25 for the context; 16,384 tokens of compressed pages."""
    settings = settings_of(model, kv_format="int4")
    loaded = load_worker(settings, decodes=True)
    assert loaded.engine.scheduler.pages.total == (6 * 4 + 25, 1024)
    assert loaded.identity.compatibility.kv_format == "int4"
    request = request_of("r", 120, 40)
    assert len(drive(loaded.engine, Add(request)).output("r")) == 40


def test_prefill_worker_has_as_many_pages_in_both_groups(model: Path) -> None:
    given = settings_of(model, kv_format="int4").model_dump()
    loaded = load_worker(PrefillSettings.model_validate(given), decodes=False)
    assert loaded.engine.scheduler.pages.total == (1024, 1024)


def test_eviction_is_part_of_the_engine_and_of_the_handshake(model: Path) -> None:
    loaded = load_worker(settings_of(model, kv_eviction=0.5), decodes=True)
    assert loaded.identity.compatibility.kv_eviction == 0.5
    assert loaded.identity.compatibility_message().kv_eviction == 0.5
    drive(loaded.engine, Add(request_of("r", 200), hold=True))
    assert loaded.engine.scheduler.pages.total.minus(loaded.engine.scheduler.pages.free) == (
        13 - 6,
    )


def test_format_without_eviction_is_refused_at_start_up(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Int4Format, "keeps_rope", False)
    settings = settings_of(model, kv_format="int4", kv_eviction=0.5)
    with pytest.raises(SettingsError, match="KV format int4 does not support kv_eviction"):
        load_worker(settings, decodes=True)


def test_embedder_without_lm_head_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **options: Any) -> Checkpoint:
        return replace(load_checkpoint(*arguments, **options), has_lm_head=False)

    monkeypatch.setattr(model_loading, "load_checkpoint", load)
    with pytest.raises(
        SettingsError, match="has no LM head: serve it with `headrace up --encoder`"
    ):
        load_worker(settings_of(model), decodes=True)


def test_kernel_plan_file_needs_a_gpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="kernel_plan_file needs the GEMM backend"):
        load_worker(settings_of(model, kernel_plan_file=tmp_path / "plan.json"), decodes=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="requires a GPU"):
        tune(str(model), tmp_path / "plan.json")


class SecondOfTwo(Peers):
    rank = 1
    size = 2

    def join(self, device: torch.device) -> RankGroup:
        return SilentGroup(self.rank, self.size)


def test_plan_decides_the_scheme_of_several_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of the base scheme are those of torch, so that its plan needs no GEMM backend."""

    def loaded(scheme: Scheme, peers: Peers) -> str:
        plan = KernelPlan(scheme=scheme)
        monkeypatch.setattr(model_loading, "_kernel_plan", lambda *_: plan)
        return model_loading.load_model(model, settings_of(model), "cpu", peers)[0].matmul

    assert loaded(Scheme.BASE, SecondOfTwo()) == "summed"
    for scheme, peers in ((Scheme.LOW_RANK, SecondOfTwo()), (Scheme.BASE, NO_PEERS)):
        with pytest.raises(SettingsError, match="needs the GEMM backend: the device is cpu"):
            loaded(scheme, peers)


def test_prefill_and_decode_workers_of_one_model_are_compatible(model: Path) -> None:
    prefill, decode = (load_worker(settings_of(model), decodes=one) for one in (False, True))
    assert prefill.identity.compatibility == decode.identity.compatibility
    request = request_of("r", 30)
    expected = drive(engine_of(build_model(load_checkpoint(model))), Add(request))
    assert drive(decode.engine, Add(request)).tokens == expected.tokens


def test_size_of_chunks_is_compared(model: Path) -> None:
    """It is limited by ``step_tokens``, also if only one of two workers sets that."""
    sizes: list[dict[str, Any]] = [
        {},
        {"step_tokens": 1024, "chunk_tokens": 512},
        {"step_tokens": 256},
    ]
    default, larger, smaller = (
        load_worker(settings_of(model, **given), decodes=True).identity.compatibility
        for given in sizes
    )
    assert default.mismatches(larger) == []
    assert default.mismatches(smaller) == ["chunk_tokens"]


def test_tokens_that_end_the_output_are_registered_and_compared(tmp_path: Path) -> None:
    """They are those of all files, also of files that are not part of the model's hash."""
    folder = save_tiny_model(tmp_path / "tiny")
    one = load_worker(settings_of(folder), decodes=True).identity
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "A"}')
    other = load_worker(settings_of(folder), decodes=True).identity
    letter = load_tokenizer(folder).encode("A")
    assert (one.model.eos_token_ids, one.compatibility.eos_token_ids) == ((), ())
    assert other.model.eos_token_ids == tuple(sorted([3, 7, *letter]))
    assert list(other.compatibility_message().eos_token_ids) == [*other.model.eos_token_ids]
    assert one.compatibility.mismatches(other.compatibility) == ["eos_token_ids"]


def test_hash_of_the_tokenizer_is_registered(tmp_path: Path) -> None:
    write_checkpoint(tiny_checkpoint(), tmp_path)
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    assert load_worker(settings_of(tmp_path), decodes=False).identity.model.tokenizer_hash == ""
    tokenizer.save(tmp_path)
    loaded = load_worker(settings_of(tmp_path), decodes=False)
    assert loaded.identity.model.tokenizer_hash == TokenizerIdentity.of(tokenizer).hash


def test_checkpoint_is_freed_after_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that stays in memory would double the memory for weights."""
    read: list[weakref.ref[Any]] = []

    def watched(path: Path, **options: Any) -> Checkpoint:
        checkpoint = load_checkpoint(path, **options)
        value = checkpoint.layers[0].v
        assert isinstance(value, Dense)
        read.extend([weakref.ref(checkpoint), weakref.ref(value.weight)])
        return checkpoint

    monkeypatch.setattr(model_loading, "load_checkpoint", watched)
    loaded = load_worker(settings_of(model), decodes=False)
    gc.collect()
    assert loaded.identity.model.model_hash
    assert [found() for found in read] == [None, None]
