"""The paper's tables and figures, each a function of our results.

A function yields rows whatever was measured; figures without a result are None. `Results.wanted`
then has the cases of its rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from runtime.offline.bench.deinfer import paper
from runtime.offline.bench.deinfer.cases import (
    Load,
    Place,
    Results,
    Served,
    System,
    served,
)
from runtime.offline.bench.deinfer.rows import Row, compare, row_of
from runtime.offline.bench.deinfer.systems import (
    LOADS,
    MANY_OPT,
    Competitor,
    Setting,
    competitors,
)
from runtime.offline.bench.shapes import Kept

FRACTIONS = (1.0, 0.8, 0.6, 0.4)
LAYER_BATCHES = (512, 64)
"""Numbers of sequences in the decode passes of Table 5."""


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper.

    Attributes:
        about: what it measures.
        cards: the paper's GPUs.
        rows: yields our rows.
    """

    about: str
    cards: str
    rows: Callable[[Setting, Results], Iterator[Row]]


def table_1(setting: Setting, results: Results) -> Iterator[Row]:
    """Yield the elements of collectives per token and layer."""
    shape = setting.shapes[0]
    for place in setting.places(nvlink=True):
        if place.ranks == 1:
            continue
        systems = _with_dense_kv(competitors(setting, place, shape))
        systems = [each for each in systems if each.method]
        counts = [results.elements(place, each.system) for each in systems]
        known = shape == paper.MODELS[0]
        twice = [None if count is None else float(count.twice) for count in counts]
        once = [None if count is None else float(count.once) for count in counts]
        theirs = paper.ELEMENTS_ON_THE_LINK if known else {}
        yield from compare(place, systems, "elements, sums counted twice", "", twice, theirs)
        theirs = {"deinfer": paper.ELEMENTS["deinfer"]} if known else {}
        yield from compare(place, systems, "elements, sums counted once", "", once, theirs)


def table_3(setting: Setting, results: Results) -> Iterator[Row]:
    """Yield latencies without NVLink, with the largest number of ranks."""
    for shape in setting.shapes:
        for place in setting.places(nvlink=False):
            if place.ranks == setting.most:
                theirs = paper.A6000_LATENCY.get(shape, {})
                yield from _latencies(setting, results, place, shape, theirs, paper.ALL_RANKS)


def table_4(setting: Setting, results: Results) -> Iterator[Row]:
    """Yield latencies with and without NVLink, for all numbers of ranks."""
    for shape in setting.shapes:
        for place in setting.all_places:
            cells = {
                method: paper.a800_latency(shape, method, place.ranks, nvlink=place.nvlink)
                for method in ("base", "deinfer", "latents")
            }
            theirs = {name: cell for name, cell in cells.items() if cell is not None}
            yield from _latencies(setting, results, place, shape, theirs)


def _latencies(
    setting: Setting,
    results: Results,
    place: Place,
    shape: str,
    theirs: Mapping[str, paper.Latency],
    paper_ranks: int | None = None,
) -> Iterator[Row]:
    """Yield the latencies of the serving load in one place."""
    load = setting.load("serving", shape)
    systems = competitors(setting, place, shape)
    found = [served(load, results, place, each.system) for each in systems]
    first_token = {method: cell.first_token for method, cell in theirs.items()}
    gap = {method: cell.gap for method, cell in theirs.items()}
    for figure, name, cells in (
        ("first token", "first_token_ms", first_token),
        ("gap", "gap_ms", gap),
    ):
        values = [_field(each, name) for each in found]
        yield from compare(place, systems, figure, "ms", values, cells, paper_ranks)


def table_5(setting: Setting, results: Results) -> Iterator[Row]:
    """Yield computation and communication of a layer in decode passes."""
    shape = setting.shapes[0]
    for place in setting.all_places:
        systems = _with_dense_kv(competitors(setting, place, shape))
        known = paper.A800_LAYER.get((place.nvlink, place.ranks), {})
        for batch in LAYER_BATCHES:
            shown = known if batch == LAYER_BATCHES[0] and shape == paper.MODELS[0] else {}
            load = replace(
                setting.load("high load", shape), prompts=max(1, batch // setting.divide)
            )
            parts = [_layer(load, results, place, each.system) for each in systems]
            for index, part in enumerate(paper.Layer._fields[: min(place.ranks, 2)]):
                values = [None if each is None else each[index] for each in parts]
                cells = {method: cell[index] for method, cell in shown.items()}
                figure = f"{part} of a layer, {load.prompts} sequences"
                yield from compare(place, systems, figure, "ms", values, cells)


def _layer(load: Load, results: Results, place: Place, system: System) -> paper.Layer | None:
    """Return the times of a layer in a decode pass. Communication is what a silent pass lacks."""
    silent = results.timing(place, system, load.decode(silent=True))
    whole = silent
    if place.ranks > 1:
        whole = results.timing(place, system, load.decode())
    if silent is None or whole is None:
        return None
    return paper.Layer(silent.layer_ms, whole.layer_ms - silent.layer_ms)


def table_6(setting: Setting, results: Results) -> Iterator[Row]:
    """Yield throughput and gap without and with CUDA graphs, with the largest number of ranks."""
    for shape in setting.shapes:
        for place in setting.all_places:
            if place.ranks < setting.most or "opt" in shape:
                continue
            for one in competitors(setting, place, shape):
                if place.ranks == 1 or one.method not in (None, "base"):
                    yield from _with_graphs(setting, results, place, shape, one)


def _with_graphs(
    setting: Setting, results: Results, place: Place, shape: str, one: Competitor
) -> Iterator[Row]:
    """Yield the rows of one system in Table 6. Those of the paper have low-rank KV."""
    known = paper.A800_GRAPHS.get((shape, place.nvlink), {})
    for name, key, figure, field, unit in (
        ("high load", "high load", "throughput, high load", "tokens_per_s", "tokens/s"),
        ("mild load", "mild load", "throughput, mild load", "tokens_per_s", "tokens/s"),
        ("serving", "gap", "gap", "gap_ms", "ms"),
    ):
        load = setting.load(name, shape)
        values = [
            _field(served(load, results, place, one.system, graph=graph), field)
            for graph in (False, True)
        ]
        theirs = known.get(key) if one.method == "latents" else None
        for index, graphs in enumerate(("no graphs", "graphs")):
            named = replace(one, name=f"{one.name}, {graphs}")
            row = row_of(place, named, figure, unit, values[index], values[0])
            if theirs is not None:
                row = replace(
                    row,
                    paper=theirs[index],
                    paper_ratio=theirs[index] / theirs[0],
                    paper_ranks=paper.ALL_RANKS,
                )
            yield row


def figure_5(setting: Setting, results: Results) -> Iterator[Row]:
    """Yield the throughput of the high load."""
    return _throughputs("high load", setting, results)


def figure_6(setting: Setting, results: Results) -> Iterator[Row]:
    """Yield the throughput of the mild load."""
    return _throughputs("mild load", setting, results)


def _throughputs(name: str, setting: Setting, results: Results) -> Iterator[Row]:
    """Yield the throughput of a load for all models in all places."""
    for shape in setting.shapes:
        for place in setting.all_places:
            systems = competitors(setting, place, shape)
            theirs = {}
            graphs = paper.A800_GRAPHS.get((shape, place.nvlink), {}).get(name)
            if graphs and place.ranks == setting.most:
                theirs = {"latents": graphs.within}
            yield from _throughput(setting, results, place, name, systems, theirs)


def figure_7(setting: Setting, results: Results) -> Iterator[Row]:
    """Yield the throughput of the high load for all rank fractions."""
    shape = setting.shapes[0]
    for place in setting.all_places:
        for fraction in FRACTIONS:
            systems = competitors(setting, place, shape, fraction)
            methods = {each.name: each.method for each in systems}
            known = None
            if shape == paper.MODELS[0] and place.ranks == setting.most:
                known = paper.SPEED_UPS.get((fraction, place.nvlink))
            for row in _throughput(setting, results, place, "high load", systems):
                if known and methods[row.system] == "deinfer":
                    yield replace(row, paper_ratio=known, paper_ranks=paper.ALL_RANKS)
                else:
                    yield row


def figure_1(setting: Setting, results: Results) -> Iterator[Row]:
    """Yield the throughput of the high load by fraction, then by number of ranks."""
    shape = setting.shapes[0]
    most = Place(setting.most, nvlink=True)
    points = [(Kept.PARAMETERS, 1.0), *((kept, each) for kept in Kept for each in FRACTIONS[1:])]
    for kept, fraction in points:
        systems = competitors(setting, most, shape, fraction, kept)
        yield from _throughput(setting, results, most, "high load", systems)
    for place in setting.places(nvlink=True):
        if place != most:
            systems = competitors(setting, place, shape)
            yield from _throughput(setting, results, place, "high load", systems)


def _throughput(
    setting: Setting,
    results: Results,
    place: Place,
    name: str,
    systems: Sequence[Competitor],
    theirs: Mapping[str, float] | None = None,
) -> Iterator[Row]:
    """Yield the throughput of a load for each system in one place."""
    load = setting.load(name, systems[0].system.weights.shape)
    values = [_field(served(load, results, place, each.system), "tokens_per_s") for each in systems]
    figure = f"throughput, {name}"
    yield from compare(place, systems, figure, "tokens/s", values, theirs or {}, paper.ALL_RANKS)


def _with_dense_kv(systems: Sequence[Competitor]) -> list[Competitor]:
    return [each for each in systems if each.system.weights.kv_format == "dense"]


def _field(found: Served | None, name: str) -> float | None:
    return None if found is None else getattr(found, name)


def _by_load(name: str) -> str:
    load, opt = LOADS[name], MANY_OPT.get(name)
    return f"{load}" + (f" (OPT: {opt} prompts)" if opt else "")


TABLES = {
    "table 1": Table(
        "elements of collectives per token and layer. The paper counts sums twice for its "
        "baseline, and once for DeInfer",
        "computed",
        table_1,
    ),
    "table 3": Table(f"latency, {_by_load('serving')}", paper.A6000, table_3),
    "table 4": Table(f"latency, {_by_load('serving')}", "A800, 80 GB", table_4),
    "table 5": Table(
        f"time of a layer in decode passes with {LAYER_BATCHES[0]} and {LAYER_BATCHES[1]} "
        "sequences; the paper does not state its number of tokens, which by its computation is "
        "between 500 and 800",
        "A800, 80 GB",
        table_5,
    ),
    "table 6": Table(
        f"CUDA graphs. High load: {_by_load('high load')}. Mild load: {_by_load('mild load')}. "
        f"Gap: {_by_load('serving')}. Ratios are to the same system without graphs",
        paper.A800,
        table_6,
    ),
    "figure 1": Table(
        f"throughput by fraction and by number of ranks, {_by_load('high load')}; the paper states "
        "neither the load nor numbers",
        paper.A800,
        figure_1,
    ),
    "figure 5": Table(
        f"throughput, {_by_load('high load')}; numbers of the paper are those of its Table 6",
        paper.A800,
        figure_5,
    ),
    "figure 6": Table(
        f"throughput, {_by_load('mild load')}; numbers of the paper are those of its Table 6",
        paper.A800,
        figure_6,
    ),
    "figure 7": Table(
        f"throughput by rank fraction, {_by_load('high load')}; the paper states ratios only",
        paper.A800,
        figure_7,
    ),
}
"""The tables and figures by name."""
