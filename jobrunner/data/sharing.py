"""Share what is left at the end: where spans are cut, and which workers have nothing to do.

A cut is an empty file named by the row where a new span begins; only who holds a span cuts it, and
cuts stay until the shard is merged. So all workers see the same spans, sooner or later. Like claims
they save work and nothing more: a row that two workers do at once still counts once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

from jobrunner.data.layout import RunDirectory, files_in, make_folder, remove
from jobrunner.records import Span


def read_cuts(run: RunDirectory, shard: str) -> list[int]:
    """The rows where spans of a shard were cut, in order."""
    return [int(path.name) for path in files_in(run.cuts(shard)) if path.name.isdigit()]


def cut(run: RunDirectory, shard: str, row: int) -> None:
    """Let a new span begin at a row."""
    folder = run.cuts(shard)
    while True:
        make_folder(folder)
        try:
            (folder / f"{row:012d}").touch()
        except FileNotFoundError:
            # the shard was merged and its folder pruned, or is about to be: nothing is left of it
            continue
        return


def pieces(span: Span, cuts: Sequence[int]) -> Iterator[Span]:
    """A span as others have cut it, in order."""
    inside = sorted({row for row in cuts if span.start < row < span.stop})
    for start, stop in pairwise([span.start, *inside, span.stop]):
        yield Span(span.shard, start, stop)


class Idlers:
    """The workers of a run directory that wait for work, and whether this one does.

    A worker that waits touches its file at every look, so that no clocks need to agree: a file that
    does not change is a dead worker's.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._mine = run.idle / run.worker
        self._shown = False
        self._seen: dict[str, int] = {}

    def show(self) -> None:
        """Say that this worker has nothing to do."""
        make_folder(self._run.idle)
        self._mine.touch()
        self._shown = True

    def hide(self) -> None:
        """Say that it has something to do."""
        if self._shown:
            remove([self._mine])
            self._shown = False

    def count(self) -> int:
        """Count the others that have said so since the last look; after some were, begin anew."""
        seen = {}
        for path in files_in(self._run.idle):
            try:
                seen[path.name] = os.stat(path).st_mtime_ns
            except FileNotFoundError:
                continue
        seen.pop(self._mine.name, None)
        changed = sum(self._seen.get(name, told) != told for name, told in seen.items())
        # who is given something needs a moment to see it
        self._seen = {} if changed else seen
        return changed
