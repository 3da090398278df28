"""Turn a snapshot into what is shown. Pure: knows no terminal, clock or file."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobrunner.console.printable import printable
from jobrunner.console.snapshot import BandLatency, Snapshot

_SHARD_CELLS = 72  # fits beside its label on 80 columns
_LOOK = (
    "import sys, pyarrow.dataset as d; "
    'print(*d.dataset(sys.argv[1]).head(3).to_pylist(), sep="\\n")'
)


def view(snapshot: Snapshot) -> RenderableType:
    """Five lines for a terminal of 80 columns or more, and one for the kinds of errors."""
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    for _ in range(3):
        bar.add_column(no_wrap=True)
    bar.add_row(
        ProgressBar(total=100.0, completed=snapshot.percent),
        _percent(snapshot.percent),
        f"{snapshot.rows_done:,} of {snapshot.rows_total:,} rows",
        f"ETA {_duration(snapshot.eta_s)}",
    )
    speed = _line(
        f"output {_rate(snapshot.output_tokens_per_s)} tokens/s "
        f"(now {_rate(snapshot.recent_output_tokens_per_s)})",
        f"total {_rate(snapshot.total_tokens_per_s)} tokens/s",
        f"{_rate(snapshot.rows_per_s)} rows/s",
    )
    batch = _line(
        f"running {snapshot.running:,}",
        f"waiting {snapshot.waiting:,}",
        f"batch {snapshot.batch_size:,} (mean {_mean(snapshot.batch_size_mean)})",
        f"KV {_share(snapshot.kv_use)} (peak {_share(snapshot.kv_use_peak)})",
    )
    state = _line(
        f"preempted {snapshot.preemptions:,}",
        f"shards {snapshot.shards_done:,} of {snapshot.shards_total:,} done",
        f"elapsed {_duration(snapshot.elapsed_s)}",
    )
    errors = Text(f"errors {snapshot.errors:,}", style="bold red" if snapshot.errors else "")
    state = Text("  ", no_wrap=True, overflow="ellipsis").join([errors, state])
    kinds = [_line(f"  {_kinds(snapshot)}")] if snapshot.errors_by_kind else []
    short = [_line(said) for said in _shortages(snapshot)]
    return Group(bar, speed, batch, state, *short, *kinds, _line(f"shard {_shard(snapshot)}"))


def _shortages(snapshot: Snapshot) -> list[str]:
    """Say what memory was too short for, if it was."""
    if not snapshot.out_of_memory:
        return []
    return [
        f"out of memory {snapshot.out_of_memory:,} times: now at most"
        f" {snapshot.token_budget:,} tokens and {snapshot.max_batch_size:,} rows a step"
    ]


def plain_line(snapshot: Snapshot) -> str:
    """One line for a log."""
    return ", ".join(
        (
            f"{_percent(snapshot.percent)} {snapshot.rows_done:,}/{snapshot.rows_total:,} rows",
            f"ETA {_duration(snapshot.eta_s)}",
            f"output {_rate(snapshot.output_tokens_per_s)} tokens/s",
            f"total {_rate(snapshot.total_tokens_per_s)} tokens/s",
            f"running {snapshot.running:,}",
            f"waiting {snapshot.waiting:,}",
            f"batch {snapshot.batch_size:,}",
            f"KV {_share(snapshot.kv_use)}",
            f"errors {_errors(snapshot)}",
            f"elapsed {_duration(snapshot.elapsed_s)}",
            *_shortages(snapshot),
            f"shard {_shard(snapshot)}",
        )
    )


def postfix(snapshot: Snapshot) -> str:
    """What a bar over the rows does not say itself."""
    items = [f"{_rate(snapshot.output_tokens_per_s)} tokens/s"]
    if snapshot.errors:
        items.append(f"{snapshot.errors:,} errors")
    return ", ".join(items)


def summary(
    snapshot: Snapshot, results: Path, *, parquet: bool = True, python: str = sys.executable
) -> str:
    """The end of a run: what came of the rows, how fast, where it is and how to look at it.

    `results` is the folder of the result files, `python` an interpreter that has pyarrow.
    """
    finished = snapshot.rows_done == snapshot.rows_total
    lines = [
        f"{'finished' if finished else 'stopped'}: {snapshot.rows_done:,} of "
        f"{snapshot.rows_total:,} rows, {snapshot.rows_this_run:,} of them in this run of "
        f"{_duration(snapshot.elapsed_s)}",
        f"  ok       {snapshot.rows_done - snapshot.errors:,}",
        f"  errors   {_errors(snapshot)}",
    ]
    lines += _error_lines(snapshot)
    if snapshot.stop_share is not None:
        lines.append(f"  ended    {_endings(snapshot)} (this run)")
    if snapshot.duplicates:
        lines.append(
            f"  equal    {snapshot.duplicates:,} answers are those of equal rows (this run)"
        )
    lines += [
        f"  speed    {_rate(snapshot.output_tokens_per_s)} output tokens/s, "
        f"{_rate(snapshot.total_tokens_per_s)} total tokens/s, "
        f"{_rate(snapshot.rows_per_s)} rows/s (this run)",
    ]
    lines += [f"  latency  {_band(band)} (this run)" for band in snapshot.latency_by_priority]
    if snapshot.cost is not None:
        lines.append(
            f"  cost     {_cost(snapshot.cost)}, "
            f"{_cost(snapshot.cost_per_million_tokens)} per million tokens, "
            f"{_cost(snapshot.cost_per_row)} per row (this run)"
        )
    if snapshot.shards_done:
        look = f"{shlex.quote(python)} -c {shlex.quote(_LOOK)} {shlex.quote(str(results))}"
        if not parquet:
            look = "`cbjob status` prints a DuckDB query that reads them"
        lines += [f"  results  {printable(str(results))}", f"  look     {printable(look)}"]
    else:
        lines.append(
            f"  results  none yet: a file comes to {printable(str(results))}"
            " when a shard is complete"
        )
    if not finished:
        lines.append("  go on    run the same command again")
    return "\n".join(lines)


def _line(*items: str) -> Text:
    return Text("  ".join(items), no_wrap=True, overflow="ellipsis")


def _errors(snapshot: Snapshot) -> str:
    kinds = _kinds(snapshot)
    return f"{snapshot.errors:,}" + (f" ({kinds})" if kinds else "")


def _kinds(snapshot: Snapshot) -> str:
    reasons = [f"{kind} {count:,}" for kind, count in snapshot.errors_by_kind.items()]
    earlier = snapshot.errors - sum(snapshot.errors_by_kind.values())
    if earlier:
        reasons.append(f"in earlier runs {earlier:,}")
    return ", ".join(reasons)


def _error_lines(snapshot: Snapshot) -> list[str]:
    """What the first error rows of each kind say."""
    return [
        f"    {kind}: {printable(message)}"
        for kind, messages in snapshot.error_examples.items()
        for message in messages
    ]


def _band(band: BandLatency) -> str:
    percentiles = (("p50", band.p50_s), ("p95", band.p95_s), ("p99", band.p99_s))
    said = ", ".join(f"{name} {_seconds(value)} s" for name, value in percentiles)
    return f"priority {band.priority:,}: {said}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g}"


def _endings(snapshot: Snapshot) -> str:
    endings = [
        f"{snapshot.stop_rows:,} by stop ({_share(snapshot.stop_share)})",
        f"{snapshot.length_rows:,} cut by length",
    ]
    if snapshot.repetition_rows:
        endings.append(f"{snapshot.repetition_rows:,} by repetition")
    return ", ".join(endings)


def _shard(snapshot: Snapshot) -> str:
    if snapshot.shard is None:
        return "-"
    name = printable(snapshot.shard)
    if cell_len(name) <= _SHARD_CELLS:
        return name
    # the end of a path tells more than its beginning
    name = name[-_SHARD_CELLS:]
    while cell_len(name) >= _SHARD_CELLS:
        name = name[1:]
    return f"…{name}"


def _percent(percent: float) -> str:
    # rounded down: 100% is said only when nothing is left
    return f"{math.floor(percent * 10) / 10:.1f}%"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _mean(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:,.1f}"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _cost(cost: float | None) -> str:
    if cost is None:
        return "-"
    # three digits that tell something, however little a row costs, never in powers of ten
    decimals = max(2, 2 - math.floor(math.log10(cost))) if cost > 0 else 2
    return f"{cost:,.{decimals}f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    if minutes:
        return f"{minutes}m{rest_s:02}s"
    return f"{rest_s}s"
