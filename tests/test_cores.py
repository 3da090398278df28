"""Cores allowed: affinity, quotas of both kinds of cgroups, Slurm, other workers, the user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from jobrunner.commands.run import share_the_cores
from jobrunner.cores import WORKERS_VARIABLE, allowed_cores, granted_cores
from jobrunner.engine.loading import use_threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)


def group(tmp_path: Path, membership: str, **files: str) -> dict[str, Path]:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_max", ".max").replace("_cfs", ".cfs")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"root": tmp_path, "membership": tmp_path / "membership"}


def test_without_limits_all_that_the_system_allows(tmp_path):
    assert allowed_cores({}, tmp_path, tmp_path / "absent") == 8


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1)]
)
def test_a_quota_counts_in_whole_cores(tmp_path, quota, cores):
    assert allowed_cores({}, **group(tmp_path, "0::/a/b\n", a__b__cpu_max=quota)) == cores


def test_the_quota_of_an_outer_group_counts_too(tmp_path):
    files = {"a__cpu_max": "200000 100000", "a__b__cpu_max": "max 100000"}
    assert allowed_cores({}, **group(tmp_path, "0::/a/b\n", **files)) == 2


def test_in_a_container_the_group_is_the_root(tmp_path):
    assert allowed_cores({}, **group(tmp_path, "0::/not/seen\n", cpu_max="500000 100000")) == 5


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("400000", 4)])
def test_cgroups_of_version_1(tmp_path, quota, cores):
    files = {"cpu__a__cpu_cfs_quota_us": quota, "cpu__a__cpu_cfs_period_us": "100000"}
    assert allowed_cores({}, **group(tmp_path, "4:cpu,cpuacct:/a\n", **files)) == cores


@pytest.mark.parametrize(
    ("environ", "cores"),
    [
        ({"SLURM_CPUS_PER_TASK": "3"}, 3),
        ({"SLURM_CPUS_PER_TASK": "64"}, 8),
        ({"SLURM_CPUS_PER_TASK": ""}, 8),
        ({"SLURM_CPUS_PER_TASK": "0"}, 8),
        ({"SLURM_CPUS_PER_TASK": "x"}, 8),
        ({"SLURM_CPUS_PER_TASK": "5", WORKERS_VARIABLE: "2"}, 2),
        ({"SLURM_CPUS_PER_TASK": "2", WORKERS_VARIABLE: "4"}, 1),
        # each is bound to cores of its own
        ({WORKERS_VARIABLE: "4"}, 8),
        ({"OMP_NUM_THREADS": "12", "SLURM_CPUS_PER_TASK": "3"}, 12),
        ({"OMP_NUM_THREADS": "4,2"}, 8),
    ],
)
def test_slurm_and_the_user_may_say_less_or_other(tmp_path, environ, cores):
    assert allowed_cores(environ, tmp_path, tmp_path / "absent") == cores


def test_what_is_granted_is_not_what_the_user_asks_for(tmp_path):
    environ = {"OMP_NUM_THREADS": "12", "SLURM_CPUS_PER_TASK": "3"}
    assert granted_cores(environ, tmp_path, tmp_path / "absent") == 3


def test_workers_share_a_quota(tmp_path):
    place = group(tmp_path, "0::/a/b\n", a__b__cpu_max="600000 100000")
    assert allowed_cores({WORKERS_VARIABLE: "2"}, **place) == 3


@pytest.mark.parametrize(("cpus", "before", "after"), [("1", None, "1"), ("1", "3", "3")])
def test_openmp_is_told_unless_the_user_said_otherwise(monkeypatch, cpus, before, after):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
    # what is set below is taken back after the test
    monkeypatch.setenv("OMP_NUM_THREADS", before or "")
    if before is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    share_the_cores()
    assert os.environ["OMP_NUM_THREADS"] == after


@pytest.mark.parametrize(
    ("threads", "present", "used"), [("auto", 8, 3), ("auto", 2, 2), (5, 2, 5), (1, 8, 1)]
)
def test_the_engine_computes_on_the_cores_allowed_unless_told(monkeypatch, threads, present, used):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(present)
        use_threads(threads)
        assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(before)
