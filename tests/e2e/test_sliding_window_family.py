"""A model family with sliding windows, defined in this file, served colocated and disaggregated.

Every second layer has a sliding window. The reference is Qwen2 in transformers, whose config can
describe such layers. No other file mentions the family: workers find it by an entry point.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.attention import dense_attention
from runtime.checkpoint import load_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.config import ModelConfig
from runtime.core.sequence import FREED
from runtime.engine import Add, Arrived, Cancel, Engine, Reserve
from runtime.errors import KVFormatError
from runtime.gemm.model import unsupported_by_gemm
from runtime.models.build import build_model
from runtime.models.llama import LlamaFamily
from runtime.models.model import Model
from runtime.models.registry import register
from runtime.pages.plan import PageCount
from tests.e2e.test_kv_format_plugin import byte_tokenizer
from tests.harness.deployment import Running, deployed
from tests.programs.equality import Case, ask_all
from tests.runtime.offline.convert.samples import save_folder
from tests.runtime.tiny import (
    CONFIG,
    Record,
    drive,
    engine_of,
    executor_of,
    request_of,
    tiny_checkpoint,
)

WINDOW = 40  # tokens, which are not whole pages
TINY = replace(
    CONFIG,
    architecture="AlternatingForCausalLM",
    vocab_size=256,
    num_layers=4,
    context_length=1024,
    windows=(WINDOW, None, WINDOW, None),
)
LENGTHS = (1, 17, 40, 41, 64, 150, 333)  # tokens of the prompts
OUTPUT = 24
SLIDING, FULL = f"window_{WINDOW}", "kv"
"""Names of the page groups."""


class AlternatingFamily(LlamaFamily):
    """Qwen2 with the windows of ``layer_types``."""

    name = "Alternating"
    architectures = (TINY.architecture,)
    gguf = None  # one family reads the files of an architecture

    def optional_tensors(self, hf_config: Mapping[str, Any]) -> frozenset[str]:
        return super().optional_tensors(_qwen2(hf_config))

    def parse_config(
        self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        config = super().parse_config(_qwen2(hf_config), generation)
        windows = {"full_attention": None, "sliding_attention": hf_config["sliding_window"]}
        return replace(
            config,
            architecture=TINY.architecture,
            windows=tuple(windows[kind] for kind in hf_config["layer_types"]),
        )

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **super().to_huggingface(config),
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": max(window or 0 for window in config.windows),
            "layer_types": [
                "full_attention" if window is None else "sliding_attention"
                for window in config.windows
            ],
        }


def _qwen2(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a Qwen2 model without windows."""
    own = {"architectures", "use_sliding_window", "sliding_window", "layer_types"}
    kept = {key: value for key, value in hf_config.items() if key not in own}
    return {**kept, "architectures": ["Qwen2ForCausalLM"]}


ALTERNATING = AlternatingFamily()
register(ALTERNATING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model on disk."""
    folder = tmp_path_factory.mktemp("sliding") / "tiny"
    checkpoint = tiny_checkpoint(bias=True, config=TINY)
    tensors = named_tensors(checkpoint)
    save_folder(checkpoint, tensors, folder, architecture=TINY.architecture)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return build_model(load_checkpoint(folder))


def prompt(length: int) -> tuple[int, ...]:
    return request_of("r", length).tokens


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    """Greedy outputs of transformers by length of the prompt, with K and V rounded to bf16."""
    from transformers import Qwen2ForCausalLM
    from transformers.models.qwen2 import modeling_qwen2

    attend = modeling_qwen2.eager_attention_forward

    def rounded(module: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any, **named: Any) -> Any:
        return attend(module, q, k.bfloat16().float(), v.bfloat16().float(), *more, **named)

    found = {}
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(modeling_qwen2, "eager_attention_forward", rounded)
        peer = Qwen2ForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        assert peer.config.layer_types == ["sliding_attention", "full_attention"] * 2
        for length in LENGTHS:
            tokens = list(prompt(length))
            for _ in range(OUTPUT):
                logits = peer(torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
            found[length] = tokens[length:]
    return found


@pytest.mark.parametrize("replay", [False, True])
def test_engine_generates_the_tokens_of_transformers(
    model: Model, expected: dict[int, list[int]], replay: bool
) -> None:
    assert model.layout.plan.by_name(PageCount(1, 2)) == {SLIDING: 1, FULL: 2}
    engine = engine_of(model, replay=replay)
    together = drive(engine, *(Add(request_of(f"r{n}", n, OUTPUT)) for n in LENGTHS))
    assert {n: together.output(f"r{n}") for n in LENGTHS} == expected
    config = replace(TINY, windows=())
    full = build_model(replace(tiny_checkpoint(bias=True, config=TINY), config=config))
    assert drive(engine_of(full), Add(request_of("r", 150, OUTPUT))).output("r") != expected[150]


def held(engine: Engine) -> dict[str, int]:
    """Return the pages in use by name of the group."""
    plan = engine.executor.shape.plan
    return plan.by_name(engine.scheduler.pages.total.minus(engine.scheduler.pages.free))


def test_pages_that_leave_the_window_are_freed(model: Model) -> None:
    plan = model.layout.plan
    sliding = plan.groups[0]
    engine = engine_of(model)
    record = Record()
    record.add(engine.step([Add(request_of("r", 150, 100))]))
    while not record.output("r"):  # chunks of 32 tokens
        [group] = engine.scheduler._prefilling
        left = sliding.first_recent(group.computed, 16)
        assert held(engine) == {SLIDING: 10 - left, FULL: 10}
        record.add(engine.step([]))
    assert held(engine)[SLIDING] <= sliding.max_held(16) == 4
    while engine.has_work:
        [sequence] = engine.scheduler._running
        attended = len(sequence.tokens) - 1
        assert tuple(held(engine).values()) == plan.received(attended)
        assert sequence.page_tables[0].count(FREED) == sliding.first_recent(attended, 16)
        record.add(engine.step([]))
    assert len(record.output("r")) == 100
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


def test_preempted_sequences_generate_the_same_tokens(model: Model) -> None:
    adds = [Add(request_of(f"r{n}", n, 100, choices=1 + n % 2)) for n in (33, 60, 90, 100)]
    expected = drive(engine_of(model), *adds)
    for pages in (PageCount(13, 64), PageCount(64, 14)):
        tight = engine_of(model, pages=pages[0], stored=pages[1])
        assert drive(tight, *adds).tokens == expected.tokens
        assert tight.scheduler.pages.free == tight.scheduler.pages.total


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("length", [30, 150, 160])
def test_pages_that_left_the_window_are_not_sent(model: Model, length: int, choices: int) -> None:
    """The decode engine computes the same tokens, and pages that are not sent are never read."""
    request = request_of("r", length, OUTPUT, choices=choices)
    colocated = drive(engine_of(model), Add(request))
    prefill = engine_of(model)
    decode = engine_of(model)
    record = Record()
    planes = [executor_of(engine).cache.planes for engine in (decode, prefill)]
    for plane in planes[0]:
        plane.fill_(torch.nan)
    drive(decode, Reserve(request), record=record)
    [reserved] = record.steps[0].reserved
    sent = model.layout.plan.received(length)
    pages = [[page for page in table if page != FREED] for table in reserved.page_tables]
    assert sent == tuple(map(len, pages))
    assert sent[0] == min(-(-length // 16), 3 if length == 160 else 4)
    first = drive(prefill, Add(request, hold=True))
    assert tuple(held(prefill).values()) == sent, "all other pages of the prompt are free"
    [source] = prefill.scheduler._held.values()
    groups = model.layout.page_groups
    for (_, described), own, other in zip(model.layout.planes, *planes, strict=True):
        at = groups.index(described.group)
        table = source.sequences[0].page_tables[at]
        own[pages[at]] = other[[page for page in table if page != FREED]]
    tokens = tuple(first.tokens["r", choice][0] for choice in range(choices))
    record.tokens |= first.tokens
    drive(decode, Arrived("r", tokens), record=record)
    drive(prefill, Cancel("r"))
    assert record.tokens == colocated.tokens
    for engine in (prefill, decode):
        assert engine.scheduler.pages.free == engine.scheduler.pages.total


@pytest.mark.parametrize("kv_format", ["int4", "tests.e2e.test_kv_format_plugin:Int8Values"])
def test_formats_without_windows_are_refused(kv_format: str) -> None:
    with pytest.raises(KVFormatError, match="does not support sliding windows"):
        build_model(tiny_checkpoint(config=TINY), kv_format=kv_format)


def test_eviction_and_gpus_are_refused(model: Model) -> None:
    with pytest.raises(KVFormatError, match="kv_eviction does not support"):
        engine_of(model, kv_eviction=0.5)
    with pytest.raises(ValueError, match="not implemented on GPUs"):
        dense_attention(TINY, torch.device("cuda"), torch.bfloat16, WINDOW)
    reason = unsupported_by_gemm(tiny_checkpoint(config=TINY), "cuda", torch.bfloat16)
    assert reason == "layers with a sliding window have no GPU kernels"


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model, in an environment in which workers find the family by its entry point."""
    packages = tmp_path_factory.mktemp("packages")
    plugin = packages / "alternating-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: alternating\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text(
        f"[headrace.models]\nalternating = {__name__}:ALTERNATING\n"
    )
    root = Path(__file__).parents[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{root}:{root / 'proto'}:{packages}")
        for role in ("PREFILL", "DECODE"):
            patch.setenv(f"HEADRACE_{role}_KV_TOKENS", "2048")
            patch.setenv(f"HEADRACE_{role}_LOG_FORMAT", "json")
        yield folder


def answers(running: Running) -> dict[int, list[int]]:
    cases = [Case(str(n), prompt(n), 0.0, 0, OUTPUT) for n in LENGTHS]
    found = asyncio.run(ask_all(running, cases))
    running.wait_until_idle()
    return {n: list(found[str(n)].tokens) for n in LENGTHS}


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--colocated",), marks=pytest.mark.long, id="colocated"),
        pytest.param((), id="disaggregated"),
    ],
)
def test_deployment_generates_the_tokens_of_transformers(
    flags: tuple[str, ...], served: Path, model: Model, expected: dict[int, list[int]]
) -> None:
    with deployed(*flags, "--model", str(served), "--device", "cpu", "--codec", "raw") as running:
        assert answers(running) == expected
        if not flags:
            sent = running.metric("prefill-0", "headrace_kv_sent_bytes_total", kind="raw")
            assert sent == sum(sent_bytes(model, length) for length in LENGTHS)


def sent_bytes(model: Model, tokens: int) -> int:
    """Return the bytes of a prompt's KV in the pages that are sent."""
    plan, size = model.layout.plan, model.layout.page_size
    return sum(
        (min(tokens, size * pages.stop) - size * pages.start) * page_bytes // size
        for at, page_bytes in enumerate(model.layout.page_bytes.groups)
        for pages in plan.sent(tokens, at)
    )
