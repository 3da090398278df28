"""A worker uses the cores that it was granted, whoever granted them."""

import os

import pytest

from jobrunner.commands.run import share_the_cores
from jobrunner.cores import granted_cores


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})


def granted(tmp_path, files=None, cgroup="0::/job/step\n", environ=None) -> int:
    (tmp_path / "self").write_text(cgroup)
    for name, text in (files or {}).items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return granted_cores(environ or {}, tmp_path / "self", tmp_path / "mounted")


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("files", "cgroup", "cores"),
    [
        ({}, "0::/job/step\n", 4),
        ({"job/step/cpu.max": "200000 100000"}, "0::/job/step\n", 2),
        ({"job/cpu.max": "250000 100000"}, "0::/job/step\n", 2),
        ({"job/cpu.max": "max 100000", "cpu.max": "100000 100000"}, "0::/job/step\n", 1),
        # as inside a container, which sees its group at the top
        ({"cpu.max": "300000 100000"}, "0::/../../elsewhere\n", 3),
        ({"job/cpu.max": "50000 100000"}, "0::/job\n", 1),
        ({"job/cpu.max": "900000 100000"}, "0::/job\n", 4),
        ({"job/cpu.max": ""}, "0::/job\n", 4),
        (
            {"cpu,cpuacct/j/cpu.cfs_quota_us": "200000", "cpu,cpuacct/j/cpu.cfs_period_us": "1e5"},
            "4:memory:/j\n3:cpu,cpuacct:/j\n",
            4,
        ),
        (
            {
                "cpu,cpuacct/j/cpu.cfs_quota_us": "200000",
                "cpu,cpuacct/j/cpu.cfs_period_us": "100000",
            },
            "4:memory:/j\n3:cpu,cpuacct:/j\n",
            2,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/\n", 4),
    ],
)
def test_a_quota_of_a_cgroup_bounds_the_cores(tmp_path, files, cgroup, cores):
    assert granted(tmp_path, files, cgroup) == cores


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("said", "cores"), [("2", 2), ("8", 4), ("0", 1), ("", 4), ("x", 4)])
def test_slurm_bounds_the_cores(tmp_path, said, cores):
    assert granted(tmp_path, environ={"SLURM_CPUS_PER_TASK": said}) == cores


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("cpus", "before", "after"), [("2", None, "2"), ("2", "3", "3")])
def test_torch_is_told_unless_the_user_said_otherwise(monkeypatch, cpus, before, after):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if before is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    share_the_cores()
    assert os.environ["OMP_NUM_THREADS"] == after
