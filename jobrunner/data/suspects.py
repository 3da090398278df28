"""Remember which rows a worker has in its engine, so that one that kills its worker is found.

    .cbjob/flights/<worker>.jsonl   rows as they enter its engine and leave it; gone when it ends
    .cbjob/deaths/<worker>.json     what was in it when it died

A death that shows in the process itself (a signal such as SIGSEGV, an exception nobody expected,
the kernel's out-of-memory killer) weighs CRASH; a silent one, which is a person's or a scheduler's
kill as likely, weighs SILENT. Knows nothing of requests or of who runs rows.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from jobrunner.data.claims import Identity
from jobrunner.data.layout import RunDirectory, files_in, make_folder, remove
from jobrunner.errors import HungError, JobError
from jobrunner.records import RowId

CRASH, SILENT = 3, 1
# from these weights on a row runs with few others, and alone
FEW, ALONE = 3, 6
# a row that weighs so much and was alone at the last is guilty
GUILTY = 9
# lines after which a journal is written anew
_MOST_LINES = 50_000


class Flight:
    """The journal of the rows in one worker's engine. Use it in a `with`.

    It outlives a process that is killed; what is in it need not outlive the machine.
    """

    def __init__(self, run: RunDirectory, identity: Identity) -> None:
        self._path = run.flights / f"{identity.worker}.jsonl"
        self._identity = identity
        self._rows: dict[RowId, int] = {}
        self._samples: Counter[RowId] = Counter()
        self._file: IO[bytes] | None = None
        self._lines = 0

    @property
    def empty(self) -> bool:
        """No row is in the engine."""
        return not self._samples

    def begin(self, rows: Iterable[tuple[RowId, int]]) -> None:
        """Take note of samples that enter the engine, with the tokens that they have already."""
        entered = list(rows)
        for row, tokens in entered:
            self._samples[row] += 1
            self._rows.setdefault(row, tokens)
        self._write([["+", *row, tokens] for row, tokens in entered])

    def end(self, rows: Iterable[RowId]) -> None:
        """Take note of samples that have left it."""
        left = []
        for row in rows:
            self._samples[row] -= 1
            if self._samples[row] <= 0:
                del self._samples[row]
                if self._rows.pop(row, None) is not None:
                    left.append(row)
        self._write([["-", *row] for row in left])

    def __enter__(self) -> Self:
        make_folder(self._path.parent)
        self._write_anew()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        expected = kind is None or not issubclass(kind, Exception)
        try:
            if kind is not None and issubclass(kind, HungError):
                # one of these rows may be why: it looks like a worker that was killed
                pass
            elif kind is not None and not expected and not issubclass(kind, JobError | OSError):
                self._write([["!"]])
            else:
                remove([self._path])
        finally:
            if self._file is not None:
                self._file.close()

    def _write(self, entries: list[list[object]]) -> None:
        if not entries or self._file is None:
            return
        self._lines += len(entries)
        self._file.write("".join(json.dumps(entry) + "\n" for entry in entries).encode())
        if self._lines > _MOST_LINES + 2 * len(self._rows):
            self._write_anew()

    def _write_anew(self) -> None:
        temporary = self._path.with_suffix(".new")
        try:
            earlier, self._file = self._file, temporary.open("wb", buffering=0)
            if earlier is not None:
                earlier.close()
            self._lines = 0
            self._write([["worker", asdict(self._identity)]])
            self._write([["+", *row, tokens] for row, tokens in self._rows.items()])
            os.replace(temporary, self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is held against a row: the weight of the deaths it was there at, and their number.

    Deaths before it got its latest tokens do not count: it got further. `alone` says that it was
    alone at one.
    """

    weight: int
    deaths: int
    alone: bool

    @property
    def guilty(self) -> bool:
        return self.alone and self.weight >= GUILTY


class Suspects:
    """The rows that were in the engines of workers that died."""

    def __init__(self, run: RunDirectory, identity: Identity) -> None:
        self._run = run
        self._identity = identity
        self._rows: dict[RowId, Suspicion] = {}
        self._read: list[Path] = []

    def look(self) -> None:
        """Look for workers that have died since, and read all that is known."""
        for path in files_in(self._run.flights):
            if path.suffix == ".jsonl":
                self._bury(path)
        found = files_in(self._run.deaths)
        if found != self._read:
            self._read = found
            self._rows = _weigh(found)

    def suspicion(self, row: RowId) -> Suspicion | None:
        """What is held against a row, if anything is."""
        return self._rows.get(row)

    def few(self) -> int:
        """How many rows that are suspect run together: so that a group is as long as their list."""
        return max(1, math.isqrt(sum(s.weight >= FEW for s in self._rows.values())))

    def forget(self) -> None:
        """Let all deaths be forgotten: every row is done, or shall be tried again."""
        remove(files_in(self._run.deaths))
        self._read, self._rows = [], {}

    def _bury(self, path: Path) -> None:
        """Make a record of a death from a journal, if its worker is dead."""
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            return
        entries = [entry for line in lines if (entry := _entry(line))]
        if not entries or entries[0][0] != "worker":
            return
        worker = Identity(**entries[0][1])
        raised = entries[-1] == ["!"]
        if not raised and self._identity.knows_alive(worker) is not False:
            return
        crash_note = path.with_suffix(".crash")
        crashed = raised or crash_note.exists()
        # a machine or a job that went down took its workers with it
        if raised or self._died_here(worker):
            rows = _in_flight(entries)
            if rows:
                said = {
                    "weight": CRASH if crashed else SILENT,
                    "rows": [[*row, tokens] for row, tokens in rows.items()],
                }
                with self._run.writing(self._run.deaths / f"{worker.worker}.json") as temporary:
                    temporary.write_text(json.dumps(said))
        remove([path, crash_note])

    def _died_here(self, worker: Identity) -> bool:
        mine = self._identity
        return (worker.host, worker.boot, worker.slurm_job, worker.slurm_restarts) == (
            mine.host,
            mine.boot,
            mine.slurm_job,
            mine.slurm_restarts,
        )


def note_crash(run: RunDirectory, pid: int) -> None:
    """Take note, for whoever looks, that the worker with this process died of what it did."""
    for path in files_in(run.flights):
        if path.suffix == ".jsonl" and path.stem.split("-")[-2:-1] == [str(pid)]:
            path.with_suffix(".crash").touch()


def discard_dead_flights(run: RunDirectory, abandoned: Callable[[list[Path]], list[Path]]) -> None:
    """Remove the journals of dead workers, as `abandoned` picks them: every row is done."""
    remove(abandoned(files_in(run.flights)))


def _entry(line: str) -> list[Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        # cut off where its process died
        return []
    return entry if isinstance(entry, list) else []


def _in_flight(entries: Iterable[list[Any]]) -> dict[RowId, int]:
    rows: dict[RowId, int] = {}
    for kind, *rest in entries:
        if kind == "+":
            shard, index, tokens = rest
            rows.setdefault(RowId(shard, index), tokens)
        elif kind == "-":
            rows.pop(RowId(*rest), None)
    return rows


def _weigh(paths: Iterable[Path]) -> dict[RowId, Suspicion]:
    deaths: dict[RowId, list[tuple[int, int, bool]]] = {}
    for path in paths:
        try:
            said = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            # forgotten meanwhile, or as a loss of power leaves it
            continue
        alone = len(said["rows"]) == 1
        for shard, index, tokens in said["rows"]:
            deaths.setdefault(RowId(shard, index), []).append((tokens, said["weight"], alone))
    return {row: _sum_up(found) for row, found in deaths.items()}


def _sum_up(deaths: list[tuple[int, int, bool]]) -> Suspicion:
    furthest = max(tokens for tokens, _, _ in deaths)
    latest = [(weight, alone) for tokens, weight, alone in deaths if tokens == furthest]
    return Suspicion(
        weight=sum(weight for weight, _ in latest),
        deaths=len(latest),
        alone=any(alone for _, alone in latest),
    )
