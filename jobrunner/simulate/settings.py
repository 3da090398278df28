"""The tables of a simulation file as frozen types, and what each key may be. Reads no file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from jobrunner.config import (
    MOST,
    BatchingTable,
    Duration,
    OneOrMore,
    PathText,
    Positive,
    Table,
)
from jobrunner.simulate.cost import PROFILES
from jobrunner.simulate.trace import parse_lengths

_POISSON = re.compile(r"poisson:(\d+(?:\.\d+)?)")


def _text(value: object) -> object:
    """A single length may be a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _lengths(value: str) -> str:
    parse_lengths(value)
    return value


def _arrivals(value: str) -> str:
    match = _POISSON.fullmatch(value)
    if value not in ("none", "trace") and (match is None or float(match[1]) == 0):
        raise ValueError('must be "none", "trace" or "poisson:RATE" with rows a second above 0')
    return value


def _profile(value: str) -> str:
    if value not in PROFILES:
        raise ValueError(f"must be one of {', '.join(PROFILES)}")
    return value


def _variant(value: str) -> str:
    if not all("=" in change for change in value.split()):
        raise ValueError('must be like "policy=dynamic max_queue_delay=3s"')
    return value


LengthsText = Annotated[str, BeforeValidator(_text), AfterValidator(_lengths)]
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class RowsTable(Table):
    """Rows that are drawn where there is no trace, and when rows arrive, drawn or not.

    `prompt` and `output` are lengths: "20", "5..50" or "lognormal:MEDIAN,P99[,MOST]". With
    `known_lengths` the scheduler knows each output's, as where rows have `ignore_eos`.
    """

    count: Positive | None = None
    prompt: LengthsText = "1"
    output: LengthsText | None = None
    arrivals: Annotated[str, AfterValidator(_arrivals)] = "none"
    arriving_for: Duration | None = None
    max_new_tokens: Positive | None = None
    known_lengths: bool = False
    shared_prefix: Annotated[int, Field(ge=0, le=MOST)] = 0

    @property
    def rate(self) -> float | None:
        """Rows a second that come at random; None if they do not."""
        match = _POISSON.fullmatch(self.arrivals)
        return float(match[1]) if match else None

    @model_validator(mode="after")
    def _an_end_of_rows(self) -> RowsTable:
        if self.arriving_for is not None and self.rate is None:
            raise ValueError('`arriving_for` needs `arrivals` of "poisson:RATE"')
        return self


class TraceTable(Table):
    """A file of lengths and the names of its columns; where none is given, the usual ones."""

    path: PathText | None = None
    prompt: str | None = None
    output: str | None = None
    arrival: str | None = None
    priority: str | None = None


class CostTable(Table):
    """What a step costs: as a profile says or as a run's `metrics` show, changed by what is set."""

    profile: Annotated[str, AfterValidator(_profile)] | None = None
    metrics: PathText | None = None
    step_s: Seconds | None = None
    prefill_token_s: Seconds | None = None
    decode_s: Seconds | None = None
    context_token_s: Seconds | None = None
    swapped_block_s: Seconds | None = None
    prefill_step_s: Seconds | None = None
    attended_token_s: Seconds | None = None
    kv_tokens: Positive | None = None
    kv_bytes_per_token: Positive | None = None

    @model_validator(mode="after")
    def _one_basis(self) -> CostTable:
        if self.profile is not None and self.metrics is not None:
            raise ValueError("must take its costs from `profile` or from `metrics`, not both")
        return self


class SimulationTable(Table):
    """`variants` are what is compared: each some `key=value` of `[batching]`, or `table.key=value`,
    with blanks between them. Without `prediction` rows are admitted as they fit at the moment.
    What is not done at `stop_after` is not counted."""

    seed: int = 0
    workers: Annotated[int, Field(ge=1, le=4096)] = 1
    variants: Annotated[
        tuple[Annotated[str, AfterValidator(_variant)], ...], Field(min_length=1), OneOrMore
    ] = ("policy=static", "policy=dynamic", "policy=continuous")
    prediction: bool = True
    stop_after: Duration | None = None
    price_per_gpu_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class Simulation(Table):
    """A whole simulation. `folder` is the file's: relative paths start there; `limit` cuts rows."""

    simulation: SimulationTable = SimulationTable()
    rows: RowsTable = RowsTable()
    trace: TraceTable = TraceTable()
    cost: CostTable = CostTable()
    batching: BatchingTable = BatchingTable()
    folder: Path = Field(default_factory=Path.cwd)
    limit: Positive | None = None

    @model_validator(mode="after")
    def _rows_come_from_somewhere(self) -> Simulation:
        drawn = self.trace.path is None
        if drawn and self.rows.output is None:
            raise ValueError("must have rows: name a trace (`trace.path`) or set `rows.output`")
        if drawn and self.rows.arrivals == "trace":
            raise ValueError('`rows.arrivals` "trace" needs a trace (`trace.path`)')
        if drawn and self.rows.count is None and self.rows.arriving_for is None:
            raise ValueError("must say how many rows: `rows.count`, or `rows.arriving_for`")
        return self

    @model_validator(mode="after")
    def _steps_take_time(self) -> Simulation:
        if not any(value is not None for _, value in self.cost):
            raise ValueError(
                "must say what a step costs: `cost.profile`, `cost.metrics` or `cost.step_s`"
            )
        return self
