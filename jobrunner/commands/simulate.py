"""`cbjob simulate`: what the scheduler would do with rows of known lengths, in virtual time.

Joins the simulator, which yields steps, with the numbers that every run shows.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from jobrunner.commands.simulate_fit import fit_cost
from jobrunner.commands.simulate_view import as_json, show
from jobrunner.console.snapshot import Snapshot, Totals
from jobrunner.console.stats import Stats
from jobrunner.errors import ConfigError, ExitCode
from jobrunner.jobfile import load_tables
from jobrunner.simulate.building import Basis, basis_of, machine_of, rows_of
from jobrunner.simulate.settings import Simulation, SimulationTable
from jobrunner.simulate.timeline import Timeline, svg
from jobrunner.simulate.trace import TraceRow
from jobrunner.simulate.virtual import Machine, Moment, simulate
from jobrunner.simulate.window import Middle, Window

Options = Mapping[str, tuple[Any, str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of one simulation; `changes` are the settings in which it differs from others."""

    policy: str
    changes: Mapping[str, str]
    snapshot: Snapshot
    middle: Middle
    timeline: Timeline | None
    block_size: int

    @property
    def name(self) -> str:
        """How the simulation is called beside others."""
        changes = [
            f"{key.removeprefix('batching.')}={value}"
            for key, value in self.changes.items()
            if key != "batching.policy"
        ]
        return " ".join([self.policy, *changes])

    @property
    def latency_mean_s(self) -> float | None:
        """The mean of queue + prefill + decode."""
        snapshot = self.snapshot
        parts = (snapshot.queue_mean_s, snapshot.prefill_mean_s, snapshot.decode_mean_s)
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    @property
    def recomputed_share(self) -> float | None:
        """Tokens computed again over all that were computed."""
        return self._of_computed(self.snapshot.tokens_recomputed)

    @property
    def preempted_share(self) -> float | None:
        """Tokens computed again or swapped out over all that were computed."""
        out_and_back = self.snapshot.swapped_blocks * self.block_size
        return self._of_computed(self.snapshot.tokens_recomputed + out_and_back / 2)

    def _of_computed(self, tokens: float) -> float | None:
        computed = self.snapshot.tokens_computed
        return tokens / computed if computed else None


@dataclass(frozen=True, slots=True)
class Variant:
    """One simulation to do: its settings and what is changed in them."""

    settings: Simulation
    changes: Mapping[str, str]


def simulate_command(
    file: Path | None,
    *,
    limit: int | None,
    overrides: Sequence[str],
    options: Options,
    sweeps: Sequence[str],
    timeline: Path | None,
    json: bool,
) -> int:
    """Simulate each variant, or each value of a sweep, and print the numbers; exit code 0."""
    if timeline is not None and timeline.suffix != ".svg":
        raise ConfigError(
            f"the timeline `{timeline}` must be an image of vectors",
            hint=f"call it `{timeline.with_suffix('.svg')}`",
        )
    variants = find_variants(file, limit, overrides, options, sweeps)
    basis = _basis(variants[0].settings)
    outcomes = [run_variant(variant, basis, draw=timeline is not None) for variant in variants]
    if json:
        click.echo(json_module.dumps(as_json(outcomes, basis), allow_nan=False))
    else:
        show(outcomes, basis, sys.stdout)
    if timeline is not None:
        drawn = {outcome.name: outcome.timeline for outcome in outcomes if outcome.timeline}
        timeline.write_text(svg(drawn), encoding="utf-8")
    return ExitCode.OK


def find_variants(
    file: Path | None,
    limit: int | None,
    overrides: Sequence[str],
    options: Options,
    sweeps: Sequence[str],
) -> list[Variant]:
    """Every combination of the swept values, of every variant that is asked for.

    A sweep takes the variants of the command line alone. Raises ConfigError.
    """
    base = load_tables(Simulation, file, overrides, limit, options).simulation
    asked = not sweeps or "simulation.variants" in options
    variants = [text.split() for text in base.variants] if asked else [[]]
    found = []
    swept = [[[text] for text in _sweep(sweep)] for sweep in sweeps]
    for parts in product(variants, *swept):
        changes = dict(_change(text) for part in parts for text in part)
        changed = [f"{key}={value}" for key, value in changes.items()]
        settings = load_tables(Simulation, file, [*overrides, *changed], limit, options)
        found.append(Variant(settings, changes))
    return found


def _sweep(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    listed = [value.strip() for value in values.split(",")]
    if not equals or not all(listed):
        raise ConfigError(
            f"`--sweep {text}` must have the form key=value,value",
            hint="for example --sweep max_batch_size=8,16,32",
        )
    return [f"{key.strip()}={value}" for value in listed]


def _change(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key if "." in key else f"batching.{key}", value


def _basis(settings: Simulation) -> Basis:
    metrics = settings.cost.metrics
    if metrics is None:
        return basis_of(settings.cost, None)
    fitted = fit_cost(settings.folder / Path(metrics).expanduser())
    return basis_of(settings.cost, fitted.cost, fitted.words)


def run_variant(variant: Variant, basis: Basis, *, draw: bool) -> Outcome:
    """Simulate one variant from its first row to its last."""
    settings = variant.settings
    rows = rows_of(settings)
    machine = machine_of(settings, basis, rows)
    timeline = Timeline(machine.slots or 0) if draw else None
    snapshot, middle = _counted(rows, machine, settings.simulation, timeline)
    return Outcome(
        settings.batching.policy,
        variant.changes,
        snapshot,
        middle,
        timeline,
        settings.batching.block_size,
    )


def _counted(
    rows: Sequence[TraceRow], machine: Machine, table: SimulationTable, timeline: Timeline | None
) -> tuple[Snapshot, Middle]:
    """Let the simulation go by and count it as a run is counted."""
    stats = Stats(
        Totals(rows=len(rows)),
        slots=machine.slots,
        started_s=0.0,
        price_per_gpu_hour=table.price_per_gpu_hour,
        # virtual time needs no memory of a device, and this process's is not the question
        peak_memory=lambda: 0,
    )
    window = Window()
    ended_s = 0.0
    for moment in _until(table.stop_after, simulate(rows, machine, draw=timeline is not None)):
        ended_s = max(ended_s, moment.ended_s)
        stats.observe(moment.step, moment.ended_s)
        window.observe(moment)
        if timeline is not None and moment.worker == 0 and moment.places is not None:
            timeline.add(moment.places)
    stats.ended()
    return stats.snapshot(table.stop_after or ended_s), window.middle()


def _until(stop_s: float | None, moments: Iterable[Moment]) -> Iterator[Moment]:
    """The moments that end by then: a worker's next one begins where its last one ended."""
    if stop_s is None:
        yield from moments
        return
    for moment in moments:
        if moment.started_s >= stop_s:
            return
        if moment.ended_s <= stop_s:
            yield moment
