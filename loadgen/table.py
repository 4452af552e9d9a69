"""A summary in the terminal."""

from rich.console import Group
from rich.table import Table

from loadgen.measures import MEASURES
from loadgen.statistics import PERCENTILES
from loadgen.summary import Summary


def summary_table(summary: Summary) -> Group:
    """What counts of a run: measures in ms, then rates and outcomes."""
    measures = Table("ms", "mean", *(f"p{which:g}" for which in PERCENTILES), "max", box=None)
    for column in measures.columns[1:]:
        column.justify = "right"
    for measure in MEASURES:
        found = summary.measures[measure.name]
        if found is not None:
            values = (found.mean, *found.percentiles, found.most)
            measures.add_row(measure.title, *(f"{1e3 * value:,.1f}" for value in values))
    rates, outcomes, came = Table.grid(padding=(0, 2)), summary.outcomes, summary.throughput
    window = summary.window
    rates.add_row("counted", f"{window.begin:g} s to {window.end:.1f} s")
    rates.add_row("requests", f"{came.offered:.2f} a second due, {came.requests:.2f} answered")
    rates.add_row("tokens", f"{came.output_tokens:,.1f} a second out, {came.input_tokens:,.1f} in")
    if summary.goodput is not None:
        good = summary.goodput
        rates.add_row("goodput", f"{good.requests:.2f} a second, {good.attainment:.1%} of all")
    in_flight = summary.in_flight
    rates.add_row("under way", f"{in_flight.mean:.1f} on average, {in_flight.most} at most")
    others = [(outcomes.succeeded, "answered"), (outcomes.cancelled, "left by their clients")]
    others += [(outcomes.unfinished, "unfinished")]
    others += [(count, str(failure)) for failure, count in outcomes.failed.items()]
    told = ", ".join(f"{count:,} {what}" for count, what in others if count)
    rates.add_row("outcomes", told or "no request was due")
    return Group(measures, "", rates)
