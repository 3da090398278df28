"""Kill workers of one job at random, hurt their files, and compare with a run left in peace.

Every worker is a process of its own; what befalls it is drawn from a seed before it starts. Never
imports torch by itself.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobrunner import job as jobs
from jobrunner.data import ledger, workers
from jobrunner.data.claims import Claims
from jobrunner.data.progress import Progress
from jobrunner.errors import ExitCode, JobError
from tests.fake_cbjob import read_fake_model
from tests.world import World, fake_engine

SHARDS = {"a.parquet": 150, "b/c.parquet": 90, "d.parquet": 60}
# what can be done to a file: a kill or a fault may come before it or after it
OPERATIONS = ("replace", "unlink", "fsync", "link", "rename", "utime", "rmdir", "open")
FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
# ends that a hurt worker may have; 2 where it finds the input changed at its start
ENDS = {0, 2, 74, 75, -signal.SIGKILL}
PATIENCE_S = 120.0
# greedy texts may differ only where the two best logits are nearer than this, in float32
NEAR_TIE = 1e-4


def no_ties(shard: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The fake model says the same in every batch."""
    return float("inf")


@dataclass(frozen=True)
class Model:
    """What the workers run, by default the fake model.

    `options` are further ones of `jobrunner.run`, `settings` changes to the job file; it takes so
    many times as long as the fake model. `gap` tells, of a row of a shard that ended in two ways,
    how near the two tokens were at which they part.
    """

    folder: Path
    options: Mapping[str, Any] = field(
        default_factory=lambda: {"open_engine": fake_engine(), "read_model": read_fake_model}
    )
    settings: tuple[str, ...] = ()
    slower: float = 1.0
    gap: Callable[[str, Mapping[str, Any], Mapping[str, Any]], float] = no_ties


@dataclass
class Tally:
    """What a campaign did and found. `tokens` over `tokens_of_one_pass` is the price of it."""

    kills: int = 0
    faults: int = 0
    rounds: int = 0
    lives: int = 0
    tokens: int = 0
    tokens_of_one_pass: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        spent = self.tokens / max(1, self.tokens_of_one_pass)
        ends = ", ".join(f"{code}: {count}" for code, count in sorted(self.ends.items()))
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        return (
            f"kills {self.kills}, faults {self.faults}, lives {self.lives}, rounds {self.rounds};"
            f" tokens over one pass {spent:.2f}\nbefell: {kinds}\nexit codes: {ends}\n"
            f"near-ties: {len(self.near_ties)}, rounds that differ: {len(self.wrong)}"
        )


def prompt_of(shard: str, row: int) -> str:
    return f"{shard} {row} " + "x" * (7 * row % 50)


class Campaign:
    """Rounds of one job, each from an empty run directory to its end."""

    def __init__(self, folder: Path, model: Model, *, seed: int, most_workers: int) -> None:
        self._model = model
        self._draw = random.Random(seed)
        self._folder = folder
        self._most_workers = most_workers
        self._names = itertools.count()
        self.tally = Tally()
        self._world = self._make_world("input", model.folder)
        self._reference = self._run_in_peace()

    def run(self, kills: int) -> Tally:
        """Go on until so many workers were killed, or something is wrong; end the last round."""
        while self.tally.kills < kills and not self.tally.wrong:
            self._round(kills)
        return self.tally

    def _make_world(self, name: str, model: Path) -> World:
        folder = self._folder / name
        folder.mkdir(parents=True)
        world = World(folder, model)
        text = world.job_file.read_text().replace('"prompt"\n', '"prompt"\nchat = false\n', 1)
        world.job_file.write_text(text.replace('every = "1h"', 'every = "30ms"'))
        for shard, rows in SHARDS.items():
            world.add_shard(shard, [prompt_of(shard, row) for row in range(rows)])
        return world

    def _run_in_peace(self) -> dict[str, list[dict[str, Any]]]:
        pid = self._start("peace", lambda: None)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == ExitCode.OK, f"the run left in peace ended with {code}"
        self.tally.tokens_of_one_pass = 0
        self._one_pass = self._world.tokens_generated
        found = self._world.results()
        self._clear()
        return found

    def _round(self, kills: int) -> None:
        tally, world, draw = self.tally, self._world, self._draw
        running: dict[int, float] = {}
        patience_s = PATIENCE_S * self._model.slower
        deadline_s = time.monotonic() + patience_s
        tally.rounds += 1
        done, rows_done = False, 0
        while not done or running:
            assert time.monotonic() < deadline_s, "a round does not come to its end"
            wanted = 0 if done else draw.randint(1, self._most_workers)
            while len(running) < wanted:
                hurt = tally.kills + len(running) < kills
                kind, prepare, kill_after_s = self._fate() if hurt else ("none", _nothing, None)
                tally.kinds[kind] += 1
                pid = self._start(f"device-{next(self._names)}", prepare)
                tally.lives += 1
                running[pid] = time.monotonic() + (kill_after_s or patience_s)
                if kind == "input":
                    self._hurt_input()
            time.sleep(0.005)
            for pid, kill_at_s in list(running.items()):
                if time.monotonic() >= kill_at_s:
                    os.kill(pid, signal.SIGKILL)
                    running[pid] = deadline_s
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    del running[pid]
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._count(code)
                    rows_done = self._look_at_rows(rows_done)
                    done = done or code == ExitCode.OK
        self._check(world)

    def _count(self, code: int) -> None:
        self.tally.ends[code] += 1
        self.tally.kills += code == -signal.SIGKILL
        self.tally.faults += code == ExitCode.INFRASTRUCTURE
        if code not in ENDS:
            self.tally.wrong.append(f"round {self.tally.rounds}: a worker ended with {code}")

    def _look_at_rows(self, before: int) -> int:
        """Count the rows that are committed: what once was stays so."""
        rows_done = Progress(self._world.directory, SHARDS).rows_done
        if rows_done < before:
            self.tally.wrong.append(
                f"round {self.tally.rounds}: {before} rows were committed, now {rows_done}"
            )
        return rows_done

    def _fate(self) -> tuple[str, Callable[[], None], float | None]:
        """What befalls the next worker: its kind, what arranges it, and when it is killed."""
        draw, slower = self._draw, self._model.slower
        kind = draw.choice("time file file file merge step fault stop input".split())
        place, after = 1 + int(draw.expovariate(1 / 60)), draw.random() < 0.5
        operation, fault = draw.choice(OPERATIONS), draw.choice(FAULTS)
        match kind:
            case "time":
                return kind, _nothing, slower * draw.uniform(0.0, 0.6)
            case "file":
                return kind, lambda: _at_operation(operation, place, after, _kill), None
            case "merge":
                place = draw.randint(1, len(SHARDS))
                return kind, lambda: _at_operation("replace", place, after, _kill, "results"), None
            case "fault":
                return kind, lambda: _at_operation(operation, place, after, _fail(fault)), None
            case "step":
                return kind, lambda: _at_step(place, _kill), None
            case "stop":
                # longer than the heartbeat may be old here
                return kind, lambda: _at_step(place, lambda: time.sleep(1.5 * slower)), None
            case _:
                return kind, _nothing, slower * draw.uniform(0.2, 0.6)

    def _hurt_input(self) -> None:
        """Cut a file of the input short for a moment, as a careless copy would."""
        path = self._world.folder / "input" / self._draw.choice(list(SHARDS))
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        time.sleep(0.05)
        path.with_suffix(".whole").write_bytes(whole)
        path.with_suffix(".whole").replace(path)

    def _check(self, world: World) -> None:
        tally = self.tally
        found = find_difference(self._reference, world.results(), self._model.gap, tally.near_ties)
        if found:
            tally.wrong.append(f"round {tally.rounds}: {found}")
        # what killed workers left is swept up by the next start
        os.waitpid(self._start("last", _nothing), 0)
        problems = world.problems(*self._model.settings) + [
            f"left behind: {name}" for name in world.leftovers()
        ]
        tally.wrong += [f"round {tally.rounds}: {problem}" for problem in problems]
        tally.tokens += world.tokens_generated
        tally.tokens_of_one_pass += self._one_pass
        if not tally.wrong:
            self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self._world.folder / "run")
        self._world.tokens_file.unlink()

    def _start(self, device: str, prepare: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 99
        try:
            code = self._live(device, prepare)
        except JobError as error:
            code = error.exit_code
        except OSError:
            code = ExitCode.INFRASTRUCTURE
        except BaseException:  # noqa: BLE001 - a child must never return into the campaign
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _live(self, device: str, prepare: Callable[[], None]) -> int:
        """Be a worker."""
        # what takes minutes in earnest takes part of a second here
        slower = self._model.slower
        Claims.__init__.__defaults__ = (slower, time.monotonic)
        workers.STALE_S = slower  # type: ignore[attr-defined]
        ledger.POLL_S, ledger.GIVEN_S = 0.05, 0.5 * slower
        ledger.HEARTBEAT_S = 0.2 * slower  # type: ignore[attr-defined]
        jobs.device_name = lambda _: device  # type: ignore[attr-defined, assignment]
        prepare()
        tokens = self._world.tokens_file

        def observe(step: Any) -> None:
            with tokens.open("a") as file:
                file.write(f"{step.output_tokens}\n")
            time.sleep(0.001)
            for act in _on_step:
                act()

        settings = self._world.settings(*self._model.settings)
        return jobs.run(settings, observe=observe, **self._model.options).exit_code


_on_step: list[Callable[[], None]] = []


def _nothing() -> None:
    pass


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(fault: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(fault, os.strerror(fault))

    return act


def _at_step(place: int, act: Callable[[], None]) -> None:
    steps = itertools.count(1)

    def here() -> None:
        if next(steps) == place:
            act()

    _on_step.append(here)


def _at_operation(
    operation: str, place: int, after: bool, act: Callable[[], None], folder: str = ""
) -> None:
    """Act before or after the n-th call of an operation on files, or on those in a folder."""
    real, places = getattr(os, operation), itertools.count(1)

    def hurt(*arguments: Any, **options: Any) -> Any:
        concerned = not folder or folder in Path(arguments[-1]).parts
        here = concerned and next(places) == place
        if here and not after:
            act()
        result = real(*arguments, **options)
        if here:
            act()
        return result

    setattr(os, operation, hurt)


def find_difference(
    expected: dict[str, list[dict[str, Any]]],
    found: dict[str, list[dict[str, Any]]],
    gap: Callable[[str, Mapping[str, Any], Mapping[str, Any]], float],
    near_ties: list[str],
) -> str:
    """Say which rows are lost, doubled or different; a near-tie is only noted."""
    said = []
    for shard in sorted({*expected, *found}):
        one = {row["row"]: row for row in expected.get(shard, [])}
        rows = Counter(row["row"] for row in found.get(shard, []))
        lost = sorted(one.keys() - rows.keys())
        doubled = sorted(row for row, count in rows.items() if count > 1)
        other = []
        for row in found.get(shard, []):
            peace = one.get(row["row"])
            if row == peace:
                continue
            if peace is not None and (near := gap(shard, peace, row)) < NEAR_TIE:
                near_ties.append(f"{shard} row {row['row']}: gap {near:.1e}")
            else:
                other.append(row)
        if lost or doubled or other:
            said.append(
                f"{shard}: lost {lost}, doubled {doubled}, different"
                f" {json.dumps(other[:2], default=str)}"
            )
    return "; ".join(said)
