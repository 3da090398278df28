"""What can befall a run from outside: its exit code, what it says, and that nothing is lost."""

import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobrunner import cli
from jobrunner import job as jobs
from jobrunner.data import claims, ledger
from jobrunner.data.claims import Claims
from jobrunner.data.input import files
from jobrunner.data.progress import Progress
from jobrunner.data.prompts import tokenizer
from jobrunner.errors import ExitCode, InfrastructureError
from jobrunner.stop import Stop
from tests.fake_cbjob import FakeTokenizer, read_fake_model, save_fake_model
from tests.world import World, fake_engine

ROOT = Path(__file__).parent.parent
SHARDS = {"a.parquet": 24, "b/c.parquet": 17}
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or os.system("unshare --mount true 2>/dev/null") != 0,
    reason="mounting needs privileges",
)


class SmallWorld(World):
    """A job that saves often, with a model that needs no torch."""

    def __init__(self, folder, model):
        folder.mkdir(exist_ok=True)
        super().__init__(folder, model)
        text = self.job_file.read_text().replace('"prompt"\n', '"prompt"\nchat = false\n', 1)
        self.job_file.write_text(text.replace('every = "1h"', 'every = "20ms"'))
        for shard, rows in SHARDS.items():
            self.add_shard(shard, [f"{shard} {n} " + "x" * (7 * n % 50) for n in range(rows)])

    def live(self, *overrides, observe=lambda step: None, stop=None, **engine):
        return jobs.run(
            self.settings(*overrides),
            open_engine=fake_engine(**engine),
            read_model=read_fake_model,
            observe=observe,
            stop=stop,
        ).exit_code

    def committed(self):
        return Progress(self.directory, SHARDS).rows_done


@pytest.fixture(autouse=True)
def quick_tokenizer(monkeypatch):
    monkeypatch.setattr(tokenizer, "_load", FakeTokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_fake_model(tmp_path_factory.mktemp("fake") / "model")


@pytest.fixture
def world(tmp_path, model):
    return SmallWorld(tmp_path / "job", model)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_load", FakeTokenizer)
        world = SmallWorld(tmp_path_factory.mktemp("reference") / "job", model)
        assert world.live() == ExitCode.OK
        return world.results()


def assert_finishes(world, reference):
    """The same command again finishes the job, as if nothing had been."""
    assert world.live() == ExitCode.OK
    assert world.results() == reference
    assert world.problems() == []
    assert world.leftovers() == []


def end_of(capsys, error):
    """The exit code and the words with which the command line ends on an error."""

    def fail(**options):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli.cli, "main", fail)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code, capsys.readouterr().err


def failing_from(place, fault, real):
    """An operation that fails from its n-th call on, as on a disk that is full and stays so."""
    calls = itertools.count(1)

    def operation(*arguments, **options):
        if next(calls) >= place:
            raise OSError(fault, os.strerror(fault))
        return real(*arguments, **options)

    return operation


FIRST_FAILURES = (1, 2, 5, 9, 20, 40)
PLACES = {"fsync": os, "replace": os, "link": os, "mkdir": os, "write_table": pq.ParquetWriter}


@pytest.mark.parametrize("operation", PLACES)
def test_a_full_disk_at_any_write_ends_the_job_and_the_next_run_finishes_it(
    world, reference, operation, capsys
):
    owner, faults = PLACES[operation], 0
    # each goes on with what the one before has left
    for place, fault in zip(FIRST_FAILURES, itertools.cycle([errno.ENOSPC, errno.EDQUOT])):
        committed = world.committed()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, operation, failing_from(place, fault, getattr(owner, operation)))
            try:
                world.live()
            except (OSError, InfrastructureError) as error:
                code, said = end_of(capsys, error)
                assert code == ExitCode.INFRASTRUCTURE
                assert os.strerror(fault) in said
                assert "run the same command again" in said
                faults += 1
        assert world.committed() >= committed
    assert faults
    assert_finishes(world, reference)


def in_mount_namespace(world, script):
    """Run a shell script that may mount; `$run` is the run directory and `$cbjob` the command."""
    world.directory.root.mkdir(exist_ok=True)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        env={
            **os.environ,
            "run": str(world.directory.root),
            "kept": str(world.folder / "kept"),
            "cbjob": f"{sys.executable} -m tests.fake_cbjob run {world.job_file}",
            "CBJOB_FAKE": '{"step_s": 0.01}',
        },
    )
    return done.returncode, done.stderr


@needs_mounts
@pytest.mark.parametrize("size_kib", [16, 48, 80])
def test_a_disk_that_is_really_full_ends_the_job_with_74(world, reference, size_kib):
    code, said = in_mount_namespace(
        world,
        f'mount -t tmpfs -o size={size_kib}k none "$run"; $cbjob; code=$?;'
        ' cp -r "$run" "$kept"; exit $code',
    )
    assert (code, said.count("No space left on device")) == (ExitCode.INFRASTRUCTURE, 1), said
    assert "hint: free space on that disk, then run the same command again" in said
    shutil.rmtree(world.directory.root)
    (world.folder / "kept").rename(world.directory.root)
    world.live()
    assert world.results() == reference


@needs_mounts
def test_a_read_only_run_directory_is_said_at_the_start(world, reference):
    code, said = in_mount_namespace(
        world, 'mount --bind "$run" "$run"; mount -o remount,ro,bind "$run"; $cbjob'
    )
    assert code == ExitCode.INFRASTRUCTURE
    assert re.search(r"Read-only file system|cannot make the run directory", said), said
    assert_finishes(world, reference)


@needs_mounts
def test_a_run_directory_that_becomes_read_only_ends_the_job_with_74(world, reference):
    code, said = in_mount_namespace(
        world,
        '$cbjob & while [ -z "$(find "$run"/.cbjob/parts -name "*.parquet" 2>/dev/null)" ];'
        ' do sleep 0.02; done; mount --bind "$run" "$run"; mount -o remount,ro,bind "$run";'
        " wait $!",
    )
    assert code == ExitCode.INFRASTRUCTURE, said
    assert "Read-only file system" in said
    assert "hint: make that disk writable again, then run the same command again" in said
    assert world.committed() > 0
    assert_finishes(world, reference)


@needs_mounts
def test_a_finished_job_on_a_read_only_disk_is_finished(world):
    world.live()
    code, said = in_mount_namespace(
        world, 'mount --bind "$run" "$run"; mount -o remount,ro,bind "$run"; $cbjob'
    )
    assert (code, said) == (ExitCode.OK, "")


def after_some_rows(act):
    """Act once, when the first rows are finished and more are to come."""
    acts = iter([act])

    def observe(step):
        if step.completions:
            next(acts, lambda: None)()

    return observe


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_run_directory_that_vanishes_ends_the_job_and_says_so(world, reference, how, capsys):
    root, elsewhere = world.directory.root, world.folder / "elsewhere"

    def vanish():
        root.rename(elsewhere)
        if how == "removed":
            shutil.rmtree(elsewhere)

    with pytest.raises(InfrastructureError, match="was removed or moved") as raised:
        world.live(observe=after_some_rows(vanish))
    code, said = end_of(capsys, raised.value)
    assert code == ExitCode.INFRASTRUCTURE
    assert "hint: put it back" in said
    if how == "moved":
        shutil.rmtree(root, ignore_errors=True)
        elsewhere.rename(root)
    with pytest.MonkeyPatch.context() as patch:
        # the next one is another process, which does not see this one's claims for its own
        patch.setattr(claims, "_boot_id", lambda: "another boot")
        assert_finishes(world, reference)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def replace(path):
    table = pq.read_table(path)
    pq.write_table(table.set_column(1, "prompt", table["id"]), path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def remove(path):
    path.unlink()


def put_a_folder_there(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("hurt", [truncate, replace, remove, put_a_folder_there])
def test_an_input_hurt_while_the_job_runs_ends_it_and_mended_the_job_finishes(
    world, reference, hurt, shard, capsys
):
    path = world.folder / "input" / shard
    whole = path.with_name("whole.kept")
    shutil.copy(path, whole)
    with pytest.raises((InfrastructureError, OSError)) as raised:
        world.live(observe=after_some_rows(lambda: hurt(path)))
    code, said = end_of(capsys, raised.value)
    assert code == ExitCode.INFRASTRUCTURE
    assert shard.rpartition("/")[2] in said
    assert "hint: " in said
    if path.is_dir():
        path.rmdir()
    whole.rename(path)
    assert_finishes(world, reference)


def test_an_input_that_cannot_be_read_any_more_ends_the_job(world, reference, capsys):
    """As a bad sector or a file server does it."""
    real = files.LocalFile.open

    def fail(file):
        if file.path.name == "a.parquet":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file.path))
        return real(file)

    with pytest.MonkeyPatch.context() as patch:
        observe = after_some_rows(lambda: patch.setattr(files.LocalFile, "open", fail))
        with pytest.raises((InfrastructureError, OSError)) as raised:
            world.live(observe=observe)
    code, said = end_of(capsys, raised.value)
    assert code == ExitCode.INFRASTRUCTURE
    assert "a.parquet" in said
    assert "hint: " in said
    assert_finishes(world, reference)


@pytest.mark.parametrize("jump_s", [-3 * 86400.0, 3 * 86400.0], ids=["back", "ahead"])
def test_a_wall_clock_that_jumps_by_days_changes_nothing(world, reference, monkeypatch, jump_s):
    """Of the machine's clock nothing may depend but times for people to read."""
    jumps = [0.0]
    for name, unit in (("time", 1), ("time_ns", 10**9)):
        real = getattr(time, name)
        monkeypatch.setattr(
            time, name, lambda real=real, unit=unit: real() + type(real())(sum(jumps) * unit)
        )
    stop = Stop()
    stop.leave_in(600.0, "the time limit")

    def observe(step):
        if step.completions:
            jumps.append(jump_s / 7)

    assert world.live(observe=observe, stop=stop) == ExitCode.OK
    assert len(jumps) > 7
    assert not stop.requested
    assert world.results() == reference
    assert world.problems() == []


def test_a_worker_stopped_for_longer_than_its_heartbeat_goes_on_and_disturbs_nothing(
    world, reference
):
    def short_leases(device):
        # what takes minutes in earnest takes part of a second here
        Claims.__init__.__defaults__ = (0.6, time.monotonic)
        ledger.POLL_S, ledger.HEARTBEAT_S = 0.05, 0.1
        jobs.device_name = lambda _: device

    def start(device):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                short_leases(device)
                code = world.live(before_step=lambda: time.sleep(0.01))
            finally:
                os._exit(code)
        return pid

    stopped = start("stopped")
    while not list((world.directory.state / "parts").rglob("*.parquet")):
        time.sleep(0.005)
    os.kill(stopped, signal.SIGSTOP)
    heir = start("heir")
    try:
        # it takes over what the other one holds, though that is alive
        assert os.waitstatus_to_exitcode(os.waitpid(heir, 0)[1]) == ExitCode.OK
        assert world.results() == reference
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(stopped, 0)[1]) == ExitCode.OK
    assert_finishes(world, reference)


def test_torchs_allocator_out_of_memory_anywhere_ends_the_job_with_74(capsys):
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    code, said = end_of(capsys, raised.value)
    assert code == ExitCode.INFRASTRUCTURE
    assert "error: this machine has no more memory: " in said
    assert "lower `batching.kv_memory`" in said
    with pytest.raises(RuntimeError, match="a fault of ours"):
        end_of(capsys, RuntimeError("a fault of ours"))


def test_a_machine_out_of_memory_ends_the_job_with_74_and_its_rows_are_suspect(
    world, reference, capsys
):
    steps = itertools.count(1)

    def run_out():
        if next(steps) == 20:
            raise MemoryError("Unable to allocate 9.3 GiB")

    with pytest.raises(MemoryError) as raised:
        world.live(before_step=run_out)
    code, said = end_of(capsys, raised.value)
    assert code == ExitCode.INFRASTRUCTURE
    assert said == (
        "error: this machine has no more memory: Unable to allocate 9.3 GiB\n"
        "hint: close other programs or lower `batching.kv_memory`, `batching.max_batch_size` or"
        " `workers.count`, then run the same command again: nothing committed is lost\n"
    )
    # a row that needs too much is found by whoever goes on
    assert list(world.directory.flights.glob("*.jsonl"))
    assert_finishes(world, reference)
