"""Command line of the benchmark."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from services.common.model_source import DEFAULT_MODEL
from tests.harness.random_model import RandomModel
from tests.programs.serving_bench.cases import (
    Cached,
    Case,
    Constrained,
    HangUps,
    Interference,
    Load,
    Mixes,
    Search,
    Single,
)
from tests.programs.serving_bench.cases.load import Traffic
from tests.programs.serving_bench.cases.mixes import MIXES
from tests.programs.serving_bench.systems import HeadraceSystem, Layout, Peer, System

_T = TypeVar("_T")
CASES = ("single", "cached", "load", "search", "hang-ups", "interference", "constrained", "mixes")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tests.programs.serving_bench",
        description="Measure deployments and peers with the same requests, and compare them.",
    )
    _add_systems(made)
    _add_cases(made)
    _add_limits(made)
    return made


def _add_systems(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("systems").add_argument
    add("--shape", help="shape of a model of random weights, such as llama-3-8b")
    add("--model", default=DEFAULT_MODEL, help="without --shape: name or path of a checkpoint")
    add("--keep", type=listed(float), default=(1.0,), help="such as 1,0.5; 1 is dense")
    add("--tokenizer", default=DEFAULT_MODEL, help="tokenizer of --shape")
    add(
        "--systems",
        type=listed(Layout.parse),
        default=(Layout(0, 1), Layout(1, 1)),
        help="such as colocated,colocated:2,1+1 (prefill + decode),1x2+1x2 (of two ranks each); "
        "'' for peers only",
    )
    add("--codec", type=listed(str), default=(None,), help="of n+m systems: auto,raw,splitzip")
    add(
        "--kv-formats",
        type=listed(str),
        default=(None,),
        help="such as dense,int4,fdc:FILE; names in tables have the name of the file alone",
    )
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="setting; repeatable")
    add("--label", help="added to the names of deployments, to tell settings apart")
    add("--peer", action="append", default=[], metavar="NAME=URL[,URL]", help="repeatable")
    add("--peer-command", action="append", default=[], metavar="NAME=COMMAND", help="repeatable")
    add("--peer-tokenizer", type=Path, help="tokenizer.json; default: that of --shape")


def _add_cases(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("cases").add_argument
    add("--cases", type=listed(str), default=("single", "load"), help=",".join(CASES))
    add("--lengths", type=listed(int), default=Single.lengths, help="prompts of single requests")
    add("--repeats", type=int, default=Single.repeats, help="single requests of each length")
    add("--shared", type=int, default=Cached.shared, help="equal first tokens of `cached` prompts")
    add("--rates", type=listed(float), default=Load.rates, help="requests/s")
    add("--answers", type=listed(int), default=Load.answers, help="answer lengths under load")
    add("--input", default=Traffic.inputs, help="prompt lengths under load")
    add("--turns", help="chats under load, such as fixed:8; rates are chats/s")
    add("--think", type=float, default=Traffic.think_s, help="mean seconds between turns")
    add("--prefix-tokens", type=int, default=0, help="shared prefix, or system prompt of chats")
    add("--prefix-groups", type=int, default=1, help="number of shared prefixes")
    add("--cold", action="store_true", help="begin each prompt under load with unique words")
    add("--seconds", type=float, default=Traffic.seconds, help="measured seconds of each run")
    add("--warm-up", type=float, default=Traffic.warm_up_s, help="further seconds before them")
    add("--seeds", type=listed(int), default=Load.seeds, help="one run for each seed and rate")
    add("--ttft", type=float, default=Traffic.ttft_s, help="objective, seconds")
    add("--tpot", type=float, default=Traffic.tpot_s, help="objective, seconds per token")
    add("--attain", type=float, default=Search.attain, help="fraction that meets both")
    add("--start-rate", type=float, default=Search.start, help="first rate of a search")
    add("--tolerance", type=float, default=Search.tolerance, help="bracket of a search")
    add("--streams", type=listed(int), default=Interference.streams, help="running streams")
    add("--arriving", type=int, default=Interference.arriving, help="prompts beside streams")
    add("--stream-tokens", type=int, default=Interference.answer, help="longest stream")
    add(
        "--window",
        type=float,
        default=Interference.seconds,
        help="seconds of each window of streams",
    )
    add("--mixes", type=listed(str), default=Mixes.mixes, help="presets of the load generator")
    add("--mix-tokens", type=int, default=Mixes.tokens, help="tokens of a mean request of a mix")
    add("--concurrency", type=listed(int), default=Mixes.concurrency, help="requests in flight")
    add("--mix-requests", type=int, default=Mixes.requests, help="for each one in flight")


def _add_limits(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("limits and output").add_argument
    add("--out", type=Path, default=Path("runs/serving"), help="output folder")
    add("--limit", type=float, default=120.0, help="seconds of one run")
    add("--start-limit", type=float, default=900.0, help="seconds of the start of a system")
    add("--total-limit", type=float, help="seconds after which nothing else is started")
    add("--most-lag", type=float, default=0.01, help="p99 dispatch lag of a valid run, seconds")
    add("--keep-records", action="store_true", help="write the records of load requests")
    add("--baseline", metavar="SYSTEM", help="system of the ratios; default: the first")
    add("--commit", help="commit of a copy without a Git repository")
    add("--merge", type=Path, nargs="+", metavar="RESULTS", help="compare earlier results only")


def listed(kind: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """Return a parser of values separated by commas."""

    def parse(text: str) -> tuple[_T, ...]:
        return tuple(kind(part) for part in text.split(",") if part)

    parse.__name__ = f"list of {getattr(kind, '__name__', 'values')}"  # for error messages
    return parse


def models_of(own: argparse.Namespace) -> list[RandomModel]:
    """Return the models of random weights that the systems or the peers' tokenizer need."""
    if own.shape is None or (not own.systems and own.peer_tokenizer):
        return []
    return [RandomModel(own.shape, keep, own.tokenizer) for keep in own.keep]


def systems_of(own: argparse.Namespace) -> list[System]:
    """Return the systems in the order in which they are measured: deployments, then peers.

    Raises:
        ValueError: if a setting or a peer has an invalid syntax.
    """
    deployments = [
        _deployment(own, keep, layout, codec, kv_format)
        for keep in own.keep
        for kv_format in own.kv_formats
        for layout in own.systems
        for codec in (own.codec if layout.prefill else (None,))
    ]
    return [*deployments, *_peers(own)]


def _deployment(
    own: argparse.Namespace,
    keep: float,
    layout: Layout,
    codec: str | None,
    kv_format: str | None,
) -> HeadraceSystem:
    model: RandomModel | str = own.model
    name, factorize = own.model, keep if keep < 1 else None
    if own.shape is not None:
        model = RandomModel(own.shape, keep, own.tokenizer)
        name, factorize = model.name, None
    elif factorize is not None:
        name += f"-keep{keep:g}"
    return HeadraceSystem(
        " ".join(filter(None, (name, str(layout), codec, _short(kv_format), own.label))),
        layout,
        model,
        keep=factorize,
        codec=codec,
        kv_format=kv_format,
        device=own.device,
        settings=dict(map(pair, own.set)),
        start_s=own.start_limit,
    )


def _short(kv_format: str | None) -> str | None:
    """Return a KV format for the name of a system: a calibration without its folder."""
    if kv_format is None or "/" not in kv_format:
        return kv_format
    name, _, file = kv_format.partition(":")
    return f"{name}:{Path(file).name}"


def _peers(own: argparse.Namespace) -> list[System]:
    commands: dict[str, list[str]] = {}
    for name, command in map(pair, own.peer_command):
        commands.setdefault(name, []).append(command)
    peers = dict(map(pair, own.peer))
    if unknown := commands.keys() - peers.keys():
        raise ValueError(f"--peer-command {shlex.join(unknown)}: no --peer has this name")
    models = models_of(own)
    tokenizer = own.peer_tokenizer or (models[0].folder if models else None)
    return [
        Peer(
            name,
            tuple(url.removesuffix("/").removesuffix("/v1") for url in urls.split(",")),
            tuple(commands.get(name, ())),
            tokenizer,
            own.start_limit,
        )
        for name, urls in peers.items()
    ]


def cases_of(own: argparse.Namespace) -> list[Case]:
    """Return the chosen cases in their order on the command line.

    Raises:
        ValueError: if a case does not exist.
    """
    traffic = Traffic(
        *(own.input, own.seconds, own.warm_up, own.ttft, own.tpot),
        turns=own.turns,
        think_s=own.think,
        prefix_tokens=own.prefix_tokens,
        prefix_groups=own.prefix_groups,
        cold=own.cold,
    )
    search = Search(own.answers, own.start_rate, own.tolerance, own.attain, own.seeds, traffic)
    cases: dict[str, Case] = {
        "single": Single(own.lengths, own.repeats),
        "cached": Cached(own.lengths, own.shared, own.repeats),
        "load": Load(own.rates, own.answers, own.seeds, traffic),
        "search": search,
        "hang-ups": HangUps(search),
        "interference": Interference(
            own.streams, answer=own.stream_tokens, seconds=own.window, arriving=own.arriving
        ),
        "constrained": Constrained(own.streams, seconds=own.window),
        "mixes": Mixes(own.mixes, own.mix_tokens, own.concurrency, own.mix_requests),
    }
    if "cached" in own.cases and not 0 < own.shared < min(own.lengths):
        raise ValueError(f"--shared {own.shared}: expected less than each of --lengths")
    if unknown := set(own.mixes) - set(MIXES):
        raise ValueError(f"--mixes {','.join(unknown)}: expected some of {','.join(MIXES)}")
    if unknown := set(own.cases) - cases.keys():
        raise ValueError(f"--cases {','.join(unknown)}: expected some of {','.join(CASES)}")
    return [cases[name] for name in own.cases]


def pair(text: str) -> tuple[str, str]:
    """Split ``NAME=VALUE``.

    Raises:
        ValueError: if there is no ``=``.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text}: expected NAME=VALUE")
    return name, value
