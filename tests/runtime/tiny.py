"""Random decoders small enough to run in milliseconds, and an engine driver without threads."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from runtime.checkpoint import Checkpoint, Dense, FactorPair, LayerWeights, Linear
from runtime.config import ModelConfig, RopeConfig
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import FinishReason, Request, SampledToken, SamplingParams
from runtime.engine import Command, Engine, LocalExecutor, StepOutput
from runtime.kv.cache import CacheLayout
from runtime.kv.names import LOWRANK
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.models.registry import model_family
from runtime.pages.plan import PageCount

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=211,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    context_length=400,
    rms_norm_eps=1e-5,
    tied_embeddings=False,
    rope=RopeConfig(theta=10_000.0),
)


def tiny_checkpoint(
    *,
    bias: bool | Literal["all"] = False,
    head_norms: bool = False,
    ranks: Sequence[int | None] = (None,) * 7,
    seed: int = 0,
    config: ModelConfig = CONFIG,
) -> Checkpoint:
    """Return random weights.

    Args:
        bias: whether q, k and v, or all linears, have biases.
        ranks: for q, k, v, o, gate, up and down; None is dense.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def linear(out: int, into: int, rank: int | None, biased: bool) -> Linear:
        b = random(out, scale=0.3) if biased else None
        if rank is None:
            return Dense(random(out, into, scale=into**-0.5), b)
        u, v = random(out, rank, scale=rank**-0.5), random(rank, into, scale=into**-0.5)
        return FactorPair(u, v, b)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_out, kv_out = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer() -> LayerWeights:
        q, k, v, o, gate, up, down = ranks
        return LayerWeights(
            input_norm=1 + random(hidden, scale=0.1),
            q=linear(q_out, hidden, q, bool(bias)),
            k=linear(kv_out, hidden, k, bool(bias)),
            v=linear(kv_out, hidden, v, bool(bias)),
            o=linear(hidden, q_out, o, bias == "all"),
            post_norm=1 + random(hidden, scale=0.1),
            gate=linear(inner, hidden, gate, bias == "all"),
            up=linear(inner, hidden, up, bias == "all"),
            down=linear(hidden, inner, down, bias == "all"),
            q_norm=1 + random(config.head_dim, scale=0.1) if head_norms else None,
            k_norm=1 + random(config.head_dim, scale=0.1) if head_norms else None,
        )

    lm_head = random(config.vocab_size, hidden, scale=2 * hidden**-0.5)
    return Checkpoint(
        config=config,
        embedding=lm_head if config.tied_embeddings else random(config.vocab_size, hidden),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=1 + random(hidden, scale=0.1),
        lm_head=lm_head,
        model_hash=f"tiny-{seed}",
    )


def checkpoint_for(kv_format: str, config: ModelConfig = CONFIG) -> Checkpoint:
    """Return random weights that a KV format supports: factor pairs for `lowrank`, else dense.

    The ranks of the last layer differ from those of the others.
    """
    if kv_format != LOWRANK:
        return tiny_checkpoint(config=config)
    made, other = (
        tiny_checkpoint(config=config, ranks=(None, k, v, None, None, 9, None))
        for k, v in ((13, 11), (8, 21))
    )
    return replace(made, layers=(*made.layers[:-1], other.layers[-1]))


def linear_shape(config: ModelConfig, field: str) -> tuple[int, int]:
    """Return ``(out, in)`` of a linear of the config's family."""
    linear = model_family(config).layout(config).linears[field]
    return linear.out, linear.inner


def tiny_model(**kinds: object) -> Model:
    return build_model(tiny_checkpoint(**kinds))  # type: ignore[arg-type]


def engine_of(
    model: Model,
    *,
    pages: int | PageCount = 64,
    stored: int = 0,
    kv_eviction: float = 0.0,
    replay: bool = False,
    prefix_root: bytes | None = None,
    **limits: int,
) -> Engine:
    bounds = {"max_running": 16, "max_waiting": 64, "step_tokens": 64, "chunk_tokens": 32}
    if isinstance(pages, int):
        pages = PageCount(pages, stored) if stored else model.layout.plan.each(pages)
    options = EngineOptions(
        pages,
        Limits(**(bounds | limits)),
        kv_eviction=kv_eviction,
        replay=replay,
        prefix_root=prefix_root,
    )
    return Engine(LocalExecutor(model, options))


def pages_of(layout: CacheLayout, *pages: int) -> PageCount:
    """Return numbers of pages of the first page groups of a layout, as many as it has."""
    return PageCount(*pages[: len(layout.page_groups)])


def executor_of(engine: Engine) -> LocalExecutor:
    """Return the executor of an engine of one rank."""
    assert isinstance(engine.executor, LocalExecutor)
    return engine.executor


def prompt_of(length: int, seed: int = 0, vocab: int = CONFIG.vocab_size) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(vocab, (length,), generator=generator).tolist())


def request_of(
    name: str,
    length: int,
    max_tokens: int = 8,
    *,
    sampling: SamplingParams | None = None,
    choices: int = 1,
    stop: Sequence[int] = (),
    seed: int = 0,
) -> Request:
    tokens = prompt_of(length, seed)
    return Request(
        name, tokens, length, sampling or SamplingParams(), max_tokens, frozenset(stop), choices
    )


def replayed(request: Request, output: Sequence[int]) -> Request:
    """Return a request that continues generation after the tokens of ``output``."""
    return replace(request, tokens=request.tokens[: request.prompt_tokens] + tuple(output))


@dataclass
class Record:
    """All output of an engine."""

    tokens: dict[tuple[str, int], list[SampledToken]] = field(default_factory=dict)
    finished: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    refused: dict[str, Exception] = field(default_factory=dict)
    reserved: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steps: list[StepOutput] = field(default_factory=list)

    def add(self, output: StepOutput) -> None:
        """Add the output of one step and check the invariants of every step."""
        self.steps.append(output)
        for name, token in output.tokens:
            earlier = self.tokens.setdefault((name, token.choice), [])
            consecutive = not earlier or token.index == earlier[-1].index + 1
            assert consecutive, "output indices must be consecutive"
            earlier.append(token)
        for name, choice, reason in output.finished:
            assert (name, choice) not in self.finished, "a choice must finish once"
            self.finished[name, choice] = reason
        for name, fault in output.refused:
            assert name not in self.refused, "a request must be refused once"
            self.refused[name] = fault
        for reserved in output.reserved:
            self.reserved[reserved.id] = reserved.page_tables[0]
        for name in output.ended:
            assert name not in self.ended, "a request must end once"
            self.ended.append(name)

    def output(self, name: str, choice: int = 0) -> list[int]:
        return [token.token for token in self.tokens.get((name, choice), [])]


def drive(engine: Engine, *commands: Command, record: Record | None = None) -> Record:
    """Step until the engine has no work."""
    record = record or Record()
    record.add(engine.step(commands))
    steps = 0
    while engine.has_work:
        record.add(engine.step([]))
        steps += 1
        assert steps < 5000, "the engine does not finish"
    return record
