"""Turn the outcomes of simulations into a table for a person, or an object for a program."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobrunner.commands.figures import latency_lines, number, share
from jobrunner.simulate.building import Basis
from jobrunner.simulate.timeline import legend, text

if TYPE_CHECKING:
    from jobrunner.commands.simulate import Outcome

# a simulation uses no memory of a device
_NOT_SIMULATED = ("peak_memory_bytes", "device_memory_bytes")
_TIMELINE_ROWS = 16
_WIDE = 16
# more outcomes stand below each other, each with these numbers
_MOST_COLUMNS = 5
_SHORT = {
    "time, s": "time, s",
    "output tokens/s": "output tokens/s",
    "utilization": "utilization",
    "KV use, mean": "KV use",
    "preemptions": "preempted",
    "row latency, mean s": "latency, mean s",
    "row latency, p99 s": "p99 s",
}

_BEFORE_PRIORITIES = "row latency, p99 s"

Said = Callable[["Outcome"], str]


_LINES: dict[str, Said] = {
    "rows done": lambda o: f"{o.snapshot.rows_done - o.snapshot.errors:,}",
    "error rows": lambda o: f"{o.snapshot.errors:,}",
    "rows not done": lambda o: f"{o.snapshot.rows_total - o.snapshot.rows_done:,}",
    "time, s": lambda o: number(o.snapshot.elapsed_s, 4),
    "steps": lambda o: f"{o.snapshot.steps:,}",
    "rows/s": lambda o: number(o.snapshot.rows_per_s),
    "output tokens/s": lambda o: number(o.snapshot.output_tokens_per_s, 4),
    "total tokens/s": lambda o: number(o.snapshot.total_tokens_per_s, 4),
    "utilization": lambda o: share(o.snapshot.utilization),
    "utilization while full": lambda o: share(o.middle.utilization),
    "KV use, mean": lambda o: share(o.middle.kv_use_mean),
    "KV use while full": lambda o: share(o.middle.kv_use),
    "padding efficiency": lambda o: share(o.snapshot.padding_efficiency),
    "steps of both kinds": lambda o: share(o.snapshot.both_kinds_share),
    "batch size, mean": lambda o: number(o.snapshot.batch_size_mean),
    "preemptions": lambda o: f"{o.snapshot.preemptions:,}",
    "tokens computed again": lambda o: share(o.recomputed_share),
    "and tokens swapped out": lambda o: share(o.preempted_share),
    "last admission to end, s": lambda o: number(o.middle.tail_s),
    "queue wait, mean s": lambda o: number(o.snapshot.queue_mean_s),
    "first token after joining, p99 s": lambda o: number(o.snapshot.prefill_p99_s),
    "row latency, mean s": lambda o: number(o.latency_mean_s),
    "row latency, p50 s": lambda o: number(o.snapshot.latency_p50_s),
    "row latency, p99 s": lambda o: number(o.snapshot.latency_p99_s),
    "longest token gap, s": lambda o: number(o.snapshot.longest_gap_s),
    "cost": lambda o: number(o.snapshot.cost),
}


def as_json(outcomes: Sequence[Outcome], basis: Basis) -> dict[str, Any]:
    """All numbers as one JSON object."""
    return {
        "cost": asdict(basis.cost),
        "assumes": basis.words,
        "simulations": [_fields(outcome) for outcome in outcomes],
        "best": {name: best.name for name, best in _best(outcomes).items()},
    }


def _fields(outcome: Outcome) -> dict[str, Any]:
    numbers = asdict(outcome.snapshot)
    for name in _NOT_SIMULATED:
        del numbers[name]
    return {
        "name": outcome.name,
        "policy": outcome.policy,
        "changes": dict(outcome.changes),
        **numbers,
        "latency_mean_s": outcome.latency_mean_s,
        "tokens_recomputed_share": outcome.recomputed_share,
        "tokens_preempted_share": outcome.preempted_share,
        "middle": asdict(outcome.middle),
    }


def _best(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """Which of several is best, by throughput and by latency; the first of equals."""
    if len(outcomes) < 2:
        return {}
    return {
        "output_tokens_per_s": max(outcomes, key=lambda o: o.snapshot.output_tokens_per_s),
        "latency_p99_s": min(outcomes, key=lambda o: o.snapshot.latency_p99_s or 0.0),
    }


def show(outcomes: Sequence[Outcome], basis: Basis, stream: TextIO) -> None:
    """Print the table, what is best, the timelines where they were drawn, and what is assumed."""
    columns = shutil.get_terminal_size((100, 24)).columns
    console = Console(file=stream, width=columns, markup=False, emoji=False, highlight=False)
    console.print(_table(outcomes))
    for name, best in _best(outcomes).items():
        value = number(getattr(best.snapshot, name))
        console.print(Text(f"best {name}: {best.name} ({value})"))
    for outcome in outcomes:
        if outcome.timeline is not None:
            console.print(Text(f"\n{outcome.name}: slots down, steps across"))
            for line in text(outcome.timeline, _TIMELINE_ROWS, columns):
                console.print(Text(line, no_wrap=True))
    if any(outcome.timeline for outcome in outcomes):
        console.print(Text(legend()))
    console.print(Text("while full: from the first full batch to the last admission"))
    console.print(Text(f"cost of a step: {basis.words}"))


def _heading(name: str) -> str:
    """A name over a narrow column: a line a change, a long one cut at its equals sign."""
    words = [word.replace("=", "=\n") if len(word) > _WIDE else word for word in name.split()]
    return "\n".join(words)


def _table(outcomes: Sequence[Outcome]) -> Table:
    return _wide(outcomes) if len(outcomes) <= _MOST_COLUMNS else _long(outcomes)


def _long(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", overflow="fold", min_width=30)
    for label in _SHORT.values():
        table.add_column(label, justify="right")
    for outcome in outcomes:
        table.add_row(outcome.name, *(_LINES[line](outcome) for line in _SHORT))
    return table


def _wide(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_column(_heading(outcome.name), justify="right", overflow="fold")
    by_priority = latency_lines([outcome.snapshot for outcome in outcomes])
    for label, said in _LINES.items():
        values = [said(outcome) for outcome in outcomes]
        if any(value not in ("-", "0", "0.0%") for value in values):
            table.add_row(label, *values)
        if label == _BEFORE_PRIORITIES:
            for more, numbers in by_priority.items():
                table.add_row(more, *numbers)
    return table
