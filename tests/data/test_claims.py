"""One worker holds a claim, until it is gone."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from jobrunner.data.claims import Claims, Identity, device_name
from tests.fakes import StillClock


@pytest.fixture
def me():
    return Identity.of_this_process("cpu-0")


def claims_of(tmp_path, identity, stale_s=120.0, clock=time.monotonic):
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    return Claims(tmp_path, temporary, identity, stale_s, clock)


def dead(identity):
    """The identity of a process on this host that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return replace(identity, pid=child.pid, token="dead")


def test_a_claim_is_held_by_one_worker_at_a_time(tmp_path, me):
    mine, theirs = claims_of(tmp_path, me), claims_of(tmp_path, replace(me, token="other"))
    assert mine.acquire("spans/a/0")
    assert not theirs.acquire("spans/a/0")
    assert theirs.holder("spans/a/0") == me
    mine.release("spans/a/0")
    assert theirs.acquire("spans/a/0")


def test_case_F_the_claim_of_a_killed_process_is_taken_over_at_once(tmp_path, me):
    assert claims_of(tmp_path, dead(me)).acquire("device", exclusive=True)
    assert claims_of(tmp_path, me).acquire("device", exclusive=True)


def test_a_zombie_is_dead(tmp_path, me):
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert me.knows_alive(replace(me, pid=child.pid)) is False
    child.wait()


def test_a_reused_process_id_is_not_the_holder(me):
    assert me.knows_alive(replace(me, started=me.started + 1)) is False


def test_a_rebooted_host_has_no_old_holders(me):
    assert me.knows_alive(replace(me, boot="before")) is False


def test_another_host_or_container_cannot_be_looked_at(me):
    assert me.knows_alive(replace(me, host="elsewhere")) is None
    assert me.knows_alive(replace(me, pid_namespace="pid:[1]")) is None


def test_a_requeued_slurm_job_outlives_its_ghost_on_another_node(me):
    ghost = replace(me, host="elsewhere", slurm_job="7", slurm_restarts=0)
    assert replace(me, slurm_job="7", slurm_restarts=1).knows_alive(ghost) is False
    assert replace(me, slurm_job="8", slurm_restarts=1).knows_alive(ghost) is None


DAY_S = 86400.0


def shift(path, seconds):
    """Let a heartbeat be older by the file server's clock, or let that clock have gone on."""
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def test_a_claim_from_elsewhere_goes_stale_without_heartbeats(tmp_path, me):
    clock = StillClock()
    elsewhere = claims_of(tmp_path, replace(me, host="elsewhere"))
    mine = claims_of(tmp_path, me, clock=clock)
    assert elsewhere.acquire("spans/a/0")
    path = tmp_path / "spans/a/0.json"
    shift(path, 200)
    assert not mine.acquire("spans/a/0"), "it has not been looked at for long enough"
    elsewhere.heartbeat()
    clock.now += 40
    assert not mine.acquire("spans/a/0"), "it was alive meanwhile"
    shift(path, 200)
    assert not mine.acquire("spans/a/0")
    clock.now += 40
    assert mine.acquire("spans/a/0")


def test_a_stopped_holder_loses_a_span_but_never_its_device(tmp_path, me):
    clock = StillClock()
    holder = claims_of(tmp_path, me)
    other = claims_of(tmp_path, replace(me, token="other"), clock=clock)
    for name in ("span", "device"):
        assert holder.acquire(name)
        shift(tmp_path / f"{name}.json", 200)
    assert not other.acquire("span")
    clock.now += 40
    assert other.acquire("span")
    assert not other.acquire("device", exclusive=True)


def test_a_clock_that_jumps_ahead_by_days_takes_no_span_from_a_live_worker(tmp_path, me):
    clock = StillClock()
    holder = claims_of(tmp_path, replace(me, host="elsewhere"))
    other = claims_of(tmp_path, me, clock=clock)
    assert holder.acquire("span")
    # by the clock as it is now the last heartbeat was days ago
    shift(tmp_path / "span.json", 3 * DAY_S)
    for _ in range(60):
        assert not other.acquire("span")
        clock.now += 10
        holder.heartbeat()


def test_a_clock_that_jumps_back_by_days_keeps_no_span_from_the_living(tmp_path, me):
    clock = StillClock()
    gone = claims_of(tmp_path, replace(me, host="elsewhere"))
    other = claims_of(tmp_path, me, clock=clock)
    assert gone.acquire("span")
    # by the clock as it is now the last heartbeat comes in days
    shift(tmp_path / "span.json", -3 * DAY_S)
    assert not other.acquire("span")
    clock.now += 110
    assert not other.acquire("span")
    clock.now += 20
    assert other.acquire("span")


def test_a_claim_that_was_taken_over_is_neither_kept_alive_nor_released(tmp_path, me):
    first, second = claims_of(tmp_path, me), claims_of(tmp_path, replace(me, token="b"), stale_s=-1)
    assert first.acquire("span")
    assert second.acquire("span")
    first.heartbeat()
    first.release("span")
    assert second.holder("span") == replace(me, token="b")


def test_sweep_removes_claims_of_the_dead_only(tmp_path, me):
    claims_of(tmp_path, dead(me)).acquire("spans/old")
    claims_of(tmp_path, replace(me, host="elsewhere")).acquire("spans/far")
    claims_of(tmp_path, me).sweep()
    assert [path.stem for path in tmp_path.rglob("*.json")] == ["far"]


def files_of(tmp_path, names, age_s=0.0):
    """Files named after workers, untouched for so long."""
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    return paths


def test_files_of_dead_workers_of_this_host_are_abandoned_at_once(tmp_path, me):
    mine = claims_of(tmp_path, me)
    gone = dead(me).worker
    names = [gone, f"{gone}.ab12", f"{gone}.jsonl", f".{gone}.json.tmp"]
    paths = files_of(tmp_path, names)
    alive = files_of(tmp_path, [me.worker, f"{me.worker}.ab12"], age_s=7 * 86400)
    assert mine.abandoned([*paths, *alive]) == paths


def test_files_that_nobody_touches_are_abandoned_in_the_end_whoever_wrote_them(tmp_path, me):
    """A machine that lost its power, a container or a node that never comes back."""
    mine = claims_of(tmp_path, me)
    strangers = [
        replace(me, host="elsewhere"),
        replace(me, boot="before"),
        replace(dead(me), pid_namespace="pid:[1]"),
    ]
    names = [*(f"{one.worker}.ab12" for one in strangers), "x", "a-b", "a-b-c", "core", ".nfs0001"]
    assert mine.abandoned(files_of(tmp_path, names, age_s=3000)) == []
    old = files_of(tmp_path, names, age_s=4000)
    assert mine.abandoned(old) == old


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "x"}'])
def test_a_torn_claim_is_nobodys(tmp_path, me, content):
    mine = claims_of(tmp_path, me)
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans/a.json").write_text(content)
    (tmp_path / "spans/b.json").write_text(content)
    assert mine.acquire("spans/a")
    mine.sweep()
    assert [path.stem for path in tmp_path.rglob("*.json")] == ["a"]


def test_a_device_name_fits_a_file_name_on_the_largest_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(512)))
    many = device_name("cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(511)))
    assert many != device_name("cpu")
    assert len(many) < 100


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_in_slurm_each_task_has_a_device_of_its_own(monkeypatch, device):
    # a task sees its GPU as number 0 whichever it is, and not all clusters bind cores
    outside = device_name(device)
    names = {outside}
    for job, step, task in (("7", "0", "0"), ("7", "0", "1"), ("8", "0", "0"), ("8", "1", "0")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_STEP_ID", step)
        monkeypatch.setenv("SLURM_PROCID", task)
        names.add(device_name(device))
    assert len(names) == 5
    monkeypatch.setenv("SLURM_JOB_ID", "../x")
    assert device_name(device) == outside
