"""Loss of power at any moment: what was told to be committed is there, and the job finishes."""

import copy
import itertools
import math
import random
from contextlib import nullcontext, suppress

import pytest

from jobrunner import job as jobs
from jobrunner.data import layout
from jobrunner.data.input import hub
from jobrunner.data.prompts import tokenizer
from jobrunner.data.results import merge
from jobrunner.errors import InfrastructureError
from tests.fake_cbjob import FakeTokenizer, save_fake_model
from tests.power_loss import ROOT, Disk, Named, Synced, Told, Wrote, build, tree_of
from tests.power_loss_campaign import Campaign, another_boot, deeds, record
from tests.power_loss_worlds import (
    CALM,
    FEW_BLOCKS,
    BatchWorld,
    JsonLinesWorld,
    SmallWorld,
    StreamedWorld,
)

WORLDS = {
    "parquet": (SmallWorld, ["a.parquet", "b/c.parquet"]),
    "json lines": (JsonLinesWorld, ["a.parquet", "b/c.parquet"]),
    "openai": (BatchWorld, ["a.jsonl", "b/c.jsonl"]),
    "streamed": (StreamedWorld, ["train-00000.parquet", "train-00001.parquet"]),
    "deep folders": (SmallWorld, ["a.parquet", "b/c/d.parquet"]),
}
KINDS = ["parquet", "json lines", "openai", "streamed"]
FETCH_ROWS = 2
# of a streamed dataset the first of two files has so many rows
FEW_ROWS = (6, 2)
MORE_ROWS = (21, 9)


@pytest.fixture
def make_world(tmp_path, monkeypatch):
    """Make a job of one kind of WORLDS, in a folder of its own."""
    monkeypatch.setattr(tokenizer, "_load", FakeTokenizer)
    # a few parts are many
    monkeypatch.setattr(merge, "MOST_PARTS", 2)
    monkeypatch.setattr(hub, "_FILE_ROWS", FEW_ROWS[0])
    monkeypatch.setattr(hub, "_FETCH_ROWS", FETCH_ROWS)
    monkeypatch.setattr(hub, "_asking", lambda *_: nullcontext())
    model = save_fake_model(tmp_path / "model")

    def make(kind="parquet", rows=FEW_ROWS, part_rows=2):
        world, shards = WORLDS[kind]
        folder = tmp_path / f"{kind} {len(list(tmp_path.iterdir()))}"
        made = world(folder, model, dict(zip(shards, rows, strict=True)), part_rows)
        if kind == "streamed":
            monkeypatch.setattr(hub, "_stream", made.stream)
        return made

    return make


def make_campaign(world, steps=(3,)):
    """A job that is stopped twice and finished."""
    world.live()
    expected = world.outcomes()
    world.clear()
    events = record(world, *(lambda n=n: world.live(steps=n) for n in (*steps, math.inf)))
    return Campaign(world, events, lambda: world.live(*CALM), expected)


class OneIsEnoughError(InfrastructureError):
    """Why a second shard is not merged."""


def merge_one_shard(world):
    """Run in so little memory that long rows are errors, until the first shard is finished."""
    merges, real = itertools.count(), jobs.merge

    def merge_once(*arguments):
        if next(merges):
            raise OneIsEnoughError("one shard is merged", hint="none")
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch, suppress(OneIsEnoughError):
        patch.setattr(jobs, "merge", merge_once)
        world.live('batching.order="input"', blocks=FEW_BLOCKS, shards=1)


def make_retry_campaign(world):
    """A job whose error rows run again, those of a finished shard and those of another."""
    world.live()
    expected = world.outcomes()
    world.clear()
    merge_one_shard(world)
    assert world.shards_finished() == 1
    assert any(expected[name] != rows for name, rows in world.outcomes().items())
    begun = Disk.of(world.directory.root)
    answered = Told({shard: list(rows) for shard, rows in world.answered().items()})
    events = record(
        world, lambda: world.live(retry_errors=True), disk=Disk.of(world.directory.root)
    )
    assert world.outcomes() == expected

    def finish():
        """Ask again for what may not have been noted, as whoever lost power would."""
        return world.live(*CALM, retry_errors=True)

    return Campaign(
        world, [answered, *events], finish, expected, start=lambda: copy.deepcopy(begun)
    )


def make_killed_campaign(world, moment_of, killed_after=math.inf):
    """A job whose first worker is killed at some moment, and finished by a second one."""
    world.live()
    expected = world.outcomes()
    world.clear()
    events = record(world, lambda: world.live(steps=killed_after))
    disk = Disk()
    for event in events[: moment_of(events)]:
        disk.apply(event)
    committed = [event for event in events[: moment_of(events)] if isinstance(event, Told)]
    build(disk.tree(), world.directory.root)
    begun = copy.deepcopy(disk)
    with another_boot("as the second worker sees it"):
        later = record(world, world.live, disk=disk)
    return Campaign(
        world,
        [*committed, *later],
        lambda: world.live(*CALM),
        expected,
        start=lambda: copy.deepcopy(begun),
    )


def after_making(folder):
    """The moment right after a folder is made, before anything is synced."""

    def moment(events):
        paths = {ROOT: ""}
        for place, event in enumerate(events, 1):
            if isinstance(event, Named) and event.folder:
                [((parent, name), number)] = event.changes
                paths[number] = f"{paths[parent]}{name}/"
                if paths[number] == f"{folder}/":
                    return place
        raise AssertionError(f"{folder} was never made: {sorted(paths.values())}")

    return moment


def after_copying(events):
    """The moment right after the copy of a streamed dataset gets its name: a folder is renamed."""
    folders = {event.changes[0][1] for event in events if isinstance(event, Named) and event.folder}
    return 1 + next(
        place
        for place, event in enumerate(events)
        if isinstance(event, Named) and len(event.changes) == 2 and event.changes[0][1] in folders
    )


def test_a_run_is_recorded_completely(make_world):
    world = make_world()
    events = record(world, lambda: world.live(steps=5), lambda: world.live())
    disk = Disk()
    for event in events:
        disk.apply(event)
    assert disk.tree() == tree_of(world.directory.root)
    # a run without an operation of some kind would prove nothing
    assert {type(event) for event in events} == {Wrote, Named, Synced, Told}


def test_each_loss_of_a_file_that_gets_its_name_before_it_is_synced():
    disk = Disk()
    old, new = (ROOT, "old"), (ROOT, "new")
    for event in (Named(((old, 1),)), Wrote(1, b"ab"), Named(((new, 1), (old, None)))):
        disk.apply(event)
    found = {frozenset(tree.items()) for tree in disk.after_each_loss(random.Random(0), drawn=0)}
    torn = [b"", b"a", b"ab", b"a\0", b"\0\0"]
    expected = [{}, {"old": b""}, {"old": b"ab"}, {"old": b"ab", "new": b"ab"}]
    expected += [{"new": content} for content in torn]
    assert found == {frozenset(tree.items()) for tree in expected}


def test_a_commit_that_is_not_synced_is_found_out(make_world, monkeypatch):
    monkeypatch.setattr(layout, "sync", lambda path: None)
    campaign = make_campaign(make_world())
    with pytest.raises(AssertionError, match=r"committed and are lost|is damaged"):
        campaign.run(seed=1, looks=20, resumes=0)


@pytest.mark.parametrize("kind", KINDS)
def test_power_lost_at_any_moment_loses_nothing_committed(make_world, kind):
    make_campaign(make_world(kind)).run(seed=1, looks=20, resumes=4)


def test_power_lost_while_error_rows_run_again_loses_none(make_world):
    make_retry_campaign(make_world()).run(seed=1, looks=20, resumes=4)


@pytest.mark.parametrize("folder", [".cbjob", ".cbjob/parts/a.parquet", "results/b/c"])
def test_power_lost_after_a_kill_loses_nothing_that_came_after_the_kill(make_world, folder):
    """What the killed worker made was never synced by it, and the next one builds on it."""
    make_killed_campaign(make_world("deep folders"), after_making(folder)).run(
        seed=1, looks=20, resumes=2
    )


def test_power_lost_after_a_kill_keeps_the_copy_of_a_streamed_dataset(make_world):
    """Whoever fetches it again may get other rows, to which the answers do not belong."""
    campaign = make_killed_campaign(make_world("streamed"), after_copying)
    campaign.run(seed=1, looks=20, resumes=10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_power_lost_at_every_moment_loses_nothing_committed(make_world, kind):
    campaign = make_campaign(make_world(kind))
    assert deeds(campaign.events) == {"part", "partial", "merged some parts", "result"}
    check_all(kind, campaign)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "openai"])
def test_power_lost_at_every_moment_while_error_rows_run_again_loses_none(make_world, kind):
    check_all(f"{kind}, error rows again", make_retry_campaign(make_world(kind)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment_of"),
    [
        ("deep folders", after_making(".cbjob")),
        ("deep folders", after_making(".cbjob/parts/a.parquet")),
        ("deep folders", after_making("results/b/c")),
        ("streamed", after_making(".cbjob/input")),
        ("streamed", after_copying),
    ],
    ids=["state", "parts", "results", "input", "copied"],
)
def test_power_lost_at_every_moment_after_a_kill_loses_nothing(make_world, kind, moment_of):
    check_all(f"{kind}, after a kill", make_killed_campaign(make_world(kind), moment_of))


def check_all(name, campaign):
    """Go through every loss of power of a campaign, and say how many there were."""
    found = campaign.exhaust(drawn=3)
    print(f"\npower loss, {name}: {found}")
    assert found.resumed == found.distinct > 0
    assert not found.failures, "\n".join(found.failures[:10])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_power_lost_at_many_moments_loses_nothing_committed(make_world, seed):
    for kind in ("parquet", "json lines"):
        world = make_world(kind, MORE_ROWS, part_rows=4)
        make_campaign(world, steps=(9, 12)).run(seed=seed, looks=300, resumes=20)
    make_retry_campaign(make_world("parquet", MORE_ROWS, part_rows=4)).run(
        seed=seed, looks=150, resumes=20
    )
    draw = random.Random(seed)
    for _ in range(5):
        place = draw.random()
        killed = make_killed_campaign(
            make_world("parquet", MORE_ROWS, part_rows=4),
            lambda events, place=place: int(place * len(events)),
            killed_after=15,
        )
        killed.run(seed=seed, looks=40, resumes=4)
