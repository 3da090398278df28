"""Read every row of a job before it runs: are ids unique, and what would the rows become."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from jobrunner.config import InputTable
from jobrunner.data.census import Census, RowsReport
from jobrunner.data.input.ids import IdReport, UniqueIds
from jobrunner.data.input.inputs import Input
from jobrunner.data.input.sources import Reader
from jobrunner.data.openai.requests import OPENAI_COLUMNS
from jobrunner.data.prompts.prompts import Prompts
from jobrunner.opening import Job
from jobrunner.records import Completion, Request, Row

# how many rows without an id of their own are named
ID_EXAMPLES = 10

# batches of rows that wait for each encoder while one is counted
BATCHES_AHEAD = 2

Show = Callable[[int], None]


def id_column(table: InputTable) -> str | None:
    """The column whose values have to be unique, if there is one."""
    return OPENAI_COLUMNS[0] if table.format == "openai" and table.id is None else table.id


def check_ids(job: Job, *, show_progress: bool = False) -> IdReport | None:
    """Find rows without an id of their own; None where the rows have no ids."""
    column = id_column(job.settings.input)
    if column is None:
        return None
    shards = list(job.input.shards.values())
    with (
        Reader(shards, column) as reader,
        UniqueIds(ID_EXAMPLES) as ids,
        _progress("ids", job.input, show_progress) as show,
    ):
        for span in job.input.spans:
            for rows in reader.read(span):
                ids.add(row for row in rows if row.error is None)
                show(len(rows))
        return ids.report()


def take_census(job: Job, kv_tokens: int | None, show_progress: bool = False) -> RowsReport:
    """Read and tokenise every row, and count what they would become."""
    settings = job.settings
    census = Census(
        max_new_tokens=settings.generation.max_new_tokens,
        max_model_len=job.max_model_len,
        block_size=settings.batching.block_size,
        kv_tokens=kv_tokens,
    )
    shards = list(job.input.shards.values())
    with (
        Reader(shards, settings.input.column, job.input.needed) as reader,
        _progress("rows", job.input, show_progress) as show,
    ):
        batches = (rows for span in job.input.spans for rows in reader.read(span))
        for rows, encoded in _encoded(job.prompts, batches):
            census.add(encoded)
            show(rows)
    return census.report()


def _encoded(
    prompts: Prompts, batches: Iterable[Sequence[Row]]
) -> Iterator[tuple[int, list[Request | Completion]]]:
    """Encode on a thread for each core, a few batches ahead; give the number of rows with each.

    The tokenizer leaves Python to the others while it works. A batch for each core is faster than
    one batch over all cores, where each waits for the slowest and for Python.
    """
    encoders = len(os.sched_getaffinity(0))
    ahead: deque[tuple[int, Future[list[Request | Completion]]]] = deque()
    with ThreadPoolExecutor(encoders) as pool:
        for rows in batches:
            ahead.append((len(rows), pool.submit(prompts.encode, rows, {})))
            if len(ahead) > BATCHES_AHEAD * encoders:
                count, encoded = ahead.popleft()
                yield count, encoded.result()
        for count, encoded in ahead:
            yield count, encoded.result()


@contextmanager
def _progress(what: str, job_input: Input, visible: bool) -> Iterator[Show]:
    """Show on a terminal how far a pass over all rows is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not visible
    ) as bar:
        total = sum(shard.rows for shard in job_input.shards.values())
        task = bar.add_task(f"reading {what}", total=total)
        yield lambda count: bar.advance(task, count)
