"""Rows for a simulation: from a trace, or drawn. Knows nothing of schedulers or costs."""

from __future__ import annotations

import csv
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from jobrunner.errors import ConfigError

log = logging.getLogger("cbjob")

Lengths = Callable[[Random], int]
Columns = Mapping[str, str | None]

# what traces call their columns, in small letters without blanks and the like
_KNOWN = {
    "prompt": (
        "prompttokens contexttokens inputtokens requesttokens promptlength inputlength promptlen"
        " inputlen contextlength"
    ),
    "output": (
        "outputtokens generatedtokens completiontokens responsetokens outputlength generatedlength"
        " outputlen completionlength responselength"
    ),
    "arrival": "arrivals arrival arrivaltime arrivedat timestamp time",
    "priority": "priority",
}
_NEEDED = ("prompt", "output")
_P99 = NormalDist().inv_cdf(0.99)


class TraceRow(NamedTuple):
    """Lengths in tokens, both at least 1; seconds from the start; 0 is the highest priority."""

    prompt: int
    output: int
    arrival_s: float = 0.0
    priority: int = 0


def parse_lengths(text: str) -> Lengths:
    """Turn "20", "5..50" (uniform) or "lognormal:MEDIAN,P99[,MOST]" into a way to draw lengths.

    Raises ValueError.
    """
    if match := re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip()):
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high:
            raise ValueError("must begin at 1 or more and not end before that")
        return lambda random: random.randint(low, high)
    if match := re.fullmatch(r"lognormal:(\d+),(\d+)(?:,(\d+))?", text.strip()):
        median, p99, most = int(match[1]), int(match[2]), int(match[3] or 10**9)
        if not 1 <= median <= min(p99, most):
            raise ValueError("must have a median of 1 or more, and p99 and most not below it")
        mu, sigma = math.log(median), math.log(p99 / median) / _P99
        return lambda random: min(most, max(1, round(random.lognormvariate(mu, sigma))))
    raise ValueError('must be like "20", "5..50" or "lognormal:MEDIAN,P99[,MOST]"')


def draw_rows(count: int, prompt: Lengths, output: Lengths, seed: int) -> list[TraceRow]:
    """Draw so many rows; the first ones do not depend on how many."""
    random = Random(f"lengths {seed}")
    return [TraceRow(prompt(random), output(random)) for _ in range(count)]


def read_trace(path: Path, columns: Columns) -> list[TraceRow]:
    """Read lengths, and arrivals and priorities where there are any, in the order of the file.

    `path` is a CSV file, a Parquet file, or a folder of those: finished results too. `columns`
    names the columns of prompt, output, arrival and priority; where it names none, those are
    taken that are called as traces call them. Arrivals are seconds or dates and count from the
    first. Records without tokens are left out, with a warning. Raises ConfigError.
    """
    try:
        records = _csv_records if path.suffix == ".csv" else _parquet_records
        found = list(records(path, columns))
    except OSError as error:
        raise ConfigError(
            f"cannot read the trace `{path}`: {error.strerror or error}",
            hint="name a CSV file, a Parquet file, or a folder of results",
        ) from error
    rows = [row for number, record in enumerate(found) if (row := _row(path, number, record))]
    if len(rows) < len(found):
        log.warning("%s rows of %s have no tokens: left out", len(found) - len(rows), path)
    if not rows:
        raise ConfigError(f"the trace `{path}` has no rows", hint="name another one")
    first_s = min(row.arrival_s for row in rows)
    return [row._replace(arrival_s=row.arrival_s - first_s) for row in rows]


def _csv_records(path: Path, columns: Columns) -> Iterator[Mapping[str, object]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        names = next(reader, [])
        chosen = _chosen(path, names, columns)
        places = [names.index(name) for name in chosen.values()]
        for number, record in enumerate(reader):
            if len(record) != len(names):
                raise _bad(path, number, f"has {len(record)} fields, the header {len(names)}")
            yield dict(zip(chosen, (record[place] for place in places), strict=True))


def _parquet_records(path: Path, columns: Columns) -> Iterator[Mapping[str, object]]:
    import pyarrow as pa
    import pyarrow.dataset as ds

    try:
        found = ds.dataset(path, format="parquet")
        chosen = _chosen(path, found.schema.names, columns)
        for batch in found.to_batches(columns=list(chosen.values())):
            values = [batch.column(name).to_pylist() for name in chosen.values()]
            yield from (dict(zip(chosen, record, strict=True)) for record in zip(*values))  # noqa: B905
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"cannot read the trace `{path}`: {error}",
            hint="a trace is a .csv file, a Parquet file, or a folder of results",
        ) from error


def _chosen(path: Path, names: Sequence[str], columns: Columns) -> dict[str, str]:
    """Which column each value comes from; arrival and priority may be missing."""
    chosen = {}
    for what, known in _KNOWN.items():
        name = columns.get(what) or _first_known(names, known.split())
        if name is None and what in _NEEDED:
            raise ConfigError(
                f"the trace `{path}` has no column for `trace.{what}`: {', '.join(names)}",
                hint=f"name it: --set trace.{what}=COLUMN",
            )
        if name is not None and name not in names:
            raise ConfigError(
                f"the trace `{path}` has no column `{name}`: {', '.join(names)}",
                hint=f"set trace.{what} to one of them",
            )
        if name is not None:
            chosen[what] = name
    return chosen


def _first_known(names: Sequence[str], known: Iterable[str]) -> str | None:
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in reversed(names)}
    return next((plain[name] for name in known if name in plain), None)


def _row(path: Path, number: int, record: Mapping[str, object]) -> TraceRow | None:
    values = {
        "prompt": _count(path, number, record, "prompt"),
        "output": _count(path, number, record, "output"),
        "priority": _count(path, number, record, "priority"),
    }
    if not values["prompt"] or not values["output"]:
        return None
    return TraceRow(**values, arrival_s=_seconds(path, number, record.get("arrival")))


def _count(path: Path, number: int, record: Mapping[str, object], what: str) -> int:
    value = record.get(what)
    if value is None or value == "":
        return 0
    try:
        count = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise _bad(path, number, f"{what} is `{value}`, not a whole number") from error
    if count < 0:
        raise _bad(path, number, f"{what} is {count:,}, least 0")
    return int(count)


def _seconds(path: Path, number: int, value: object) -> float:
    if value is None or value == "":
        return 0.0
    try:
        if isinstance(value, str) and not re.fullmatch(r"[\d.eE+-]+", value):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise _bad(path, number, f"arrival is `{value}`, neither seconds nor a date") from error
    if not math.isfinite(seconds):
        raise _bad(path, number, f"arrival is `{value}`, not a number of seconds")
    return seconds


def _bad(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(
        f"row {number:,} of the trace `{path}` {problem}",
        hint="mend it, or name other columns with trace.prompt, output, arrival, priority",
    )
