"""Turn what `cbjob check` found into lines for a person, or one object for a program. Pure."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from jobrunner.commands.check_report import CheckReport, Column, InputReport, ModelReport
from jobrunner.console.printable import printable
from jobrunner.data.census import RowsReport, doubling_histogram, histogram

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
_BINS = 12
_BAR_CELLS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
# bins of one width show nothing where the longest is so many times the middle
_SKEWED = 10


def as_json(report: CheckReport) -> dict[str, Any]:
    """The report as one JSON object; `ok` says that the exit code is 0."""
    said: dict[str, Any] = asdict(report)
    said["ok"], said["exit_code"] = report.exit_code == 0, int(report.exit_code)
    said["model"]["folder"] = str(report.model.folder)
    said["model"]["longest_sequences"] = report.model.longest_sequences
    if report.ids is not None:
        said["ids"]["first"] = [str(problem) for problem in report.ids.first]
    if report.rows is not None:
        rows = report.rows
        lengths = rows.prompt_lengths
        said["rows"]["prompt_lengths"] = {str(length): n for length, n in lengths.items()}
        said["rows"]["error_rows"] = rows.error_rows
        said["rows"]["percentiles"] = {k: rows.percentile(v) for k, v in PERCENTILES.items()}
        said["rows"]["shared_share"] = _ratio(rows.shared_tokens, rows.prompt_tokens)
        said["rows"]["need_mean"] = _ratio(rows.need_tokens, rows.ok_rows)
    return said


def text_lines(report: CheckReport, columns: int | None = None) -> list[str]:
    """The report for a person, in lines of at most about `columns` cells."""
    columns = shutil.get_terminal_size((100, 24)).columns if columns is None else columns
    lines = [f"settings  ok: {report.job}"]
    lines += [f"  {key} = {_value(value)}" for key, value in report.changed.items()]
    lines += _generation_lines(report, columns)
    lines += _input_lines(report.input)
    lines += _model_lines(report.model)
    lines += [f"  {note}" for note in report.notes]
    if report.ids is not None:
        lines += _id_lines(report)
    if report.rows is not None:
        lines += _rows_lines(report.rows, report.model, columns)
    lines += [f"warning: {warning}" for warning in report.warnings]
    lines.append(_verdict(report))
    return [printable(line) for line in lines]


def _generation_lines(report: CheckReport, columns: int) -> Iterator[str]:
    """What holds for a row that brings no parameters of its own."""
    words = ", ".join(f"{name} {_value(value)}" for name, value in report.generation.items())
    wrapped = textwrap.wrap(words, max(20, columns - 2), break_on_hyphens=False)
    yield "generate  ok, unless a row says otherwise:"
    yield from (f"  {line}" for line in wrapped)


def _input_lines(found: InputReport) -> Iterator[str]:
    yield (
        f"input     ok: {found.rows:,} rows, {', '.join(found.formats)},"
        f" shards: {found.shards:,}, {_bytes(found.size_bytes)}"
    )
    for column in found.columns:
        yield f"  column {column.name}: {_types(column, found.shards)}"


def _types(column: Column, shards: int) -> str:
    counts = column.shards_by_type
    if len(counts) == 1 and sum(counts.values()) == shards:
        return next(iter(counts))
    words = [f"{type_} in {count:,}" for type_, count in counts.items()]
    if missing := shards - sum(counts.values()):
        words.append(f"absent from {missing:,}")
    return f"differs between shards: {', '.join(words)}"


def _model_lines(model: ModelReport) -> Iterator[str]:
    proof = "loaded and proven: it computes the same here as by itself"
    yield f"model     ok: {model.architecture}, {proof if model.proven else 'not loaded'}"
    yield f"  folder {model.folder}"
    yield (
        f"  {model.parameters:,} parameters in {model.layers:,} layers,"
        f" {_bytes(model.weight_bytes)} as {model.dtype} on {model.device}"
    )
    yield f"  context {model.max_model_len:,} tokens, batches of at most {model.max_batch_size:,}"
    about = "" if model.proven else "about "
    yield (
        f"  KV {model.kv_bytes_per_token:,} bytes per token, {about}{model.kv_tokens:,} tokens"
        f" in {_bytes(model.kv_tokens * model.kv_bytes_per_token)}:"
        f" {about}{model.longest_sequences:,.1f} sequences of the greatest length"
    )


def _id_lines(report: CheckReport) -> Iterator[str]:
    assert report.ids is not None
    if not report.ids.count:
        yield "ids       ok: every row has its own"
        return
    yield f"ids       wrong: {report.ids.count:,} rows have no id of their own"
    for problem in report.ids.first:
        yield f"  {problem}"
    if more := report.ids.count - len(report.ids.first):
        yield f"  and {more:,} more"


def _rows_lines(rows: RowsReport, model: ModelReport, columns: int) -> Iterator[str]:
    yield f"rows      {rows.ok_rows:,} of {rows.rows:,} would run, {rows.error_rows:,} would fail"
    for kind, count in rows.errors.items():
        yield f"  {kind} {count:,}, such as"
        for example in rows.examples[kind]:
            yield f"    {example}"
    if not rows.ok_rows:
        return
    yield from _length_lines(rows, columns)
    yield "  longest"
    for row in rows.longest:
        yield f"    row {row.row:,} of {row.shard}: {row.prompt_tokens:,} tokens"
    if rows.truncated_rows:
        yield (
            f"  truncated {rows.truncated_rows:,} prompts"
            f" by {rows.truncated_tokens:,} tokens together"
        )
    if rows.cut_rows:
        yield f"  {rows.cut_rows:,} rows have less room in the context than max_new_tokens"
    yield from _repeat_lines(rows, model)
    yield from _need_lines(rows, model)


def _length_lines(rows: RowsReport, columns: int) -> Iterator[str]:
    marks = ", ".join(f"{name} {rows.percentile(share):,}" for name, share in PERCENTILES.items())
    mean = rows.prompt_tokens / rows.ok_rows
    yield f"  prompts   {rows.prompt_tokens:,} tokens, mean {mean:,.1f}, {marks}"
    yield from (f"    {line}" for line in draw(rows, min(columns - 4, 80)))


def draw(rows: RowsReport, columns: int) -> list[str]:
    """Draw how long the prompts are, a line for each bin of lengths."""
    middle, longest = rows.percentile(0.5), rows.percentile(1.0)
    if middle is None or longest is None:
        return []
    skewed = longest > _SKEWED * middle
    counts = rows.prompt_lengths
    bins = doubling_histogram(counts) if skewed else histogram(counts, _BINS)
    names = [f"{first:,} to {last:,}" if last > first else f"{first:,}" for first, last, _ in bins]
    numbers = [f"{count:,}" for _, _, count in bins]
    widths = max(map(len, names)), max(map(len, numbers))
    cells = max(1, min(_BAR_CELLS, columns - sum(widths) - 4))
    most = max(count for _, _, count in bins)
    return [
        f"{name:>{widths[0]}}  {number:>{widths[1]}}  {_bar(count / most, cells)}".rstrip()
        for name, number, (_, _, count) in zip(names, numbers, bins, strict=True)
    ]


def _bar(share: float, cells: int) -> str:
    # what counts anything is seen
    eighths = max(round(share * cells * 8), 1 if share else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _repeat_lines(rows: RowsReport, model: ModelReport) -> Iterator[str]:
    about = "about " if rows.repeats_sampled > 1 else ""
    share = rows.repeated_rows / rows.ok_rows
    yield f"  repeats   {about}{rows.repeated_rows:,} rows ({share:.1%}) repeat an earlier prompt"
    shared = rows.shared_tokens / rows.prompt_tokens
    yield (
        f"  shared    {rows.shared_tokens:,} prompt tokens ({shared:.1%}) are in full blocks of"
        f" {model.block_size} that earlier prompts begin with"
    )


def _need_lines(rows: RowsReport, model: ModelReport) -> Iterator[str]:
    mean = rows.need_tokens / rows.ok_rows
    fit = model.kv_tokens / mean
    yield (
        f"  KV need   mean {mean:,.1f} tokens a row, max {rows.need_max:,}, with all that rows may"
        f" generate: room for about {fit:,.0f} rows at once"
    )
    if rows.outgrowing_rows:
        yield (
            f"  {rows.outgrowing_rows:,} rows would be cannot_fit errors"
            " if they generated all they may"
        )


def _verdict(report: CheckReport) -> str:
    if report.exit_code == 0:
        return "ok: cbjob run can begin"
    if report.ids is not None and report.ids.count:
        return f"problem: `input.id` is not unique, or null: {report.ids.count:,} rows"
    assert report.rows is not None
    return f"problem: {report.rows.error_rows:,} rows would be errors"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _value(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else text[:199] + "…"
