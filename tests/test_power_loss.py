"""Loss of power at any moment: what was told to be committed is there, and the job finishes."""

import copy
import gzip
import itertools
import math
import os
import random
import shutil
from contextlib import contextmanager

import pytest

from jobrunner import job as jobs
from jobrunner.data import claims
from jobrunner.data.intervals import Intervals
from jobrunner.data.progress import Progress
from jobrunner.data.prompts import tokenizer
from jobrunner.data.results import merge
from jobrunner.data.results.parts import Results
from jobrunner.errors import ExitCode
from jobrunner.stop import Stop
from tests.fake_cbjob import FakeTokenizer, read_fake_model, save_fake_model
from tests.power_loss import Disk, Named, Recorder, Synced, Told, Wrote, build, tree_of
from tests.world import World, fake_engine

SHARDS = {"a.parquet": 21, "b/c.parquet": 9}
# in a memory of so many blocks the longest prompt cannot fit; in the usual one it can
FEW_BLOCKS = 14
# what only costs time where no power is lost
CALM = ("checkpoint.every=1h", "checkpoint.part_rows=100")
CASES = {
    "parquet": (),
    "json lines": ("output.format=jsonl", "output.compression=gzip"),
}


class SmallWorld(World):
    """A job that commits and saves all the time."""

    def __init__(self, folder, model):
        folder.mkdir(exist_ok=True)
        super().__init__(folder, model)
        text = self.job_file.read_text().replace('"prompt"\n', '"prompt"\nchat = false\n', 1)
        text = text.replace('every = "1h"', 'every = "1ms"').replace(
            "part_rows = 10", "part_rows = 4"
        )
        self.job_file.write_text(text)
        for shard, rows in SHARDS.items():
            prompts = [f"{shard} {n} " + "x" * (7 * n % 50) for n in range(rows)]
            self.add_shard(shard, [*prompts[:-1], "y" * 120])

    def live(self, *overrides, steps=math.inf, shards=math.inf, blocks=64, retry_errors=False):
        """Run the job, or some steps of it, or until some shards are finished."""
        stop, seen = Stop(), itertools.count(1)

        def observe(step):
            enough = not step.idle and next(seen) >= steps
            if enough or self.shards_finished() >= shards:
                stop.request("test")

        return jobs.run(
            self.settings(*overrides),
            open_engine=fake_engine(batch=6, blocks=blocks),
            read_model=read_fake_model,
            observe=observe,
            retry_errors=retry_errors,
            stop=stop,
        ).exit_code

    def shards_finished(self):
        return sum(path.is_file() for path in self.directory.results.rglob("*"))

    def outcomes(self):
        """The content of every result file."""
        folder = self.directory.results
        if not any(folder.rglob("*.jsonl.gz")):
            return self.results()
        return {
            path.name: gzip.decompress(path.read_bytes()) for path in sorted(folder.rglob("*.gz"))
        }


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "_load", FakeTokenizer)
    # a few parts are many
    monkeypatch.setattr(merge, "MOST_PARTS", 3)
    return SmallWorld(tmp_path / "world", save_fake_model(tmp_path / "model"))


@contextmanager
def told(recorder):
    """Let the recorder know what workers hear is committed."""
    real = Results.commit

    def commit(self, *arguments):
        committed = real(self, *arguments)
        recorder.tell({shard: list(rows) for shard, rows in committed.items()})
        return committed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Results, "commit", commit)
        yield


@contextmanager
def another_boot(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "_boot_id", lambda: name)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def record(world, *lives, disk=None):
    """Record what some lives of a job do to its files."""
    recorder = Recorder(world.directory.root, disk)
    with recorder.recording(), told(recorder):
        for life in lives:
            life()
    return recorder.events


def committed_rows(events):
    """What had been told to be committed, by shard."""
    rows = {shard: Intervals() for shard in SHARDS}
    for event in events:
        if isinstance(event, Told):
            for shard, ranges in event.what.items():
                rows[shard].update(Intervals(tuple(one) for one in ranges))
    return rows


def missing_rows(world, suffix, committed):
    """The rows that were committed and are not there."""
    directory = jobs.RunDirectory(world.directory.root, "looks-0-0", suffix)
    progress = Progress(directory, SHARDS)
    return {
        shard: lost
        for shard, rows in committed.items()
        if (
            lost := [row for a, b in rows for row in range(a, b) if row not in progress[shard].done]
        )
    }


class Campaign:
    """Losses of power at moments of a recorded run, and what becomes of the job after them."""

    def __init__(self, world, events, finish, expected, suffix=".parquet", start=None):
        self._world, self._events, self._finish = world, events, finish
        self._expected, self._suffix, self._start = expected, suffix, start or Disk
        self._boots = itertools.count()

    def run(self, seed, looks, resumes):
        """Draw so many moments; look at what is committed, and at some finish the job."""
        draw = random.Random(seed)
        moments = sorted(draw.choices(range(len(self._events) + 1), k=looks))
        resumed = set(draw.sample(range(looks), resumes))
        disk, place = self._start(), 0
        for look, moment in enumerate(moments):
            while place < moment:
                disk.apply(self._events[place])
                place += 1
            build(disk.after_loss(draw), self._world.directory.root)
            last = self._events[moment - 1 : moment]
            where = f"seed {seed}, look {look}, after event {moment} {last}"
            with another_boot(f"boot {next(self._boots)}"):
                lost = missing_rows(
                    self._world, self._suffix, committed_rows(self._events[:moment])
                )
                assert not lost, f"{where}: {lost} were committed and are lost"
                if look in resumed:
                    assert self._finish() == ExitCode.OK, where
                    assert self._world.outcomes() == self._expected, where
                    assert self._world.leftovers() == [], where
                    if self._suffix == ".parquet":
                        assert self._world.problems() == [], where


def make_campaign(world, overrides=()):
    """A job that is stopped twice and finished."""
    world.live(*overrides)
    expected = world.outcomes()
    shutil.rmtree(world.directory.root)
    events = record(
        world,
        lambda: world.live(*overrides, steps=9),
        lambda: world.live(*overrides, steps=12),
        lambda: world.live(*overrides),
    )
    suffix = ".jsonl.gz" if overrides else ".parquet"
    return Campaign(world, events, lambda: world.live(*CALM, *overrides), expected, suffix)


def make_retry_campaign(world):
    """A job whose error rows run again, those of a finished shard and those of another."""
    world.live(blocks=FEW_BLOCKS, shards=1)
    [finished] = world.outcomes().values()
    assert [row["status"] for row in finished].count("error") == 1
    begun = Disk.of(world.directory.root)
    events = record(
        world, lambda: world.live(retry_errors=True), disk=Disk.of(world.directory.root)
    )
    expected = world.outcomes()
    assert {row["status"] for rows in expected.values() for row in rows} == {"ok"}

    def finish():
        """Ask again for what may not have been noted, as whoever lost power would."""
        return world.live(*CALM, retry_errors=True)

    return Campaign(world, events, finish, expected, start=lambda: copy.deepcopy(begun))


def make_killed_campaign(world, moment_of, steps=math.inf):
    """A job whose first worker is killed at some moment, and finished by a second one."""
    world.live()
    expected = world.outcomes()
    shutil.rmtree(world.directory.root)
    events = record(world, lambda: world.live(steps=15))
    disk = Disk()
    for event in events[: moment_of(events)]:
        disk.apply(event)
    committed = [event for event in events[: moment_of(events)] if isinstance(event, Told)]
    build(disk.tree(), world.directory.root)
    begun = copy.deepcopy(disk)
    with another_boot("as the second worker sees it"):
        later = record(world, lambda: world.live(steps=steps), disk=disk)
    return Campaign(
        world,
        [*committed, *later],
        lambda: world.live(*CALM),
        expected,
        start=lambda: copy.deepcopy(begun),
    )


def after_making(name):
    """The moment right after a folder is made, before anything is synced."""

    def moment(events):
        return 1 + next(
            place
            for place, event in enumerate(events)
            if isinstance(event, Named) and event.folder and event.changes[0][0][1] == name
        )

    return moment


def test_a_run_is_recorded_completely(world):
    events = record(world, lambda: world.live(steps=9), lambda: world.live())
    disk = Disk()
    for event in events:
        disk.apply(event)
    assert disk.tree() == tree_of(world.directory.root)
    # a run without an operation of some kind would prove nothing
    assert {type(event) for event in events} == {Wrote, Named, Synced, Told}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES.keys())
def test_power_lost_at_any_moment_loses_nothing_committed(world, overrides):
    make_campaign(world, overrides).run(seed=1, looks=40, resumes=8)


def test_power_lost_while_error_rows_run_again_loses_none(world):
    make_retry_campaign(world).run(seed=1, looks=30, resumes=6)


@pytest.mark.parametrize("folder", [".cbjob", "parts"])
def test_power_lost_after_a_kill_loses_nothing_that_came_after_the_kill(world, folder):
    """What the killed worker made was never synced by it, and the next one builds on it."""
    make_killed_campaign(world, after_making(folder), steps=12).run(seed=1, looks=20, resumes=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_power_lost_at_many_moments_loses_nothing_committed(world, seed):
    for overrides in CASES.values():
        make_campaign(world, overrides).run(seed=seed, looks=300, resumes=20)
        shutil.rmtree(world.directory.root)
    make_retry_campaign(world).run(seed=seed, looks=150, resumes=20)
    draw = random.Random(seed)
    for _ in range(5):
        shutil.rmtree(world.directory.root)
        place = draw.random()
        killed = make_killed_campaign(world, lambda events, place=place: int(place * len(events)))
        killed.run(seed=seed, looks=40, resumes=4)
