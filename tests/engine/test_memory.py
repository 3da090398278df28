"""How many blocks the KV pool gets, and how much memory there is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from jobrunner.config import BatchingTable
from jobrunner.cores import WORKERS_VARIABLE
from jobrunner.engine import loading
from jobrunner.engine.memory import (
    available_memory,
    check_fits,
    kv_block_count,
    swap_block_count,
    total_memory,
)
from jobrunner.errors import ModelError

GIB = 1024**3


def blocks(kv_memory, *, wanted_tokens: int = 10**9, spare_bytes: int = 10**9) -> int:
    return kv_block_count(
        kv_memory,
        bytes_per_token=100,
        block_size=16,
        wanted_tokens=wanted_tokens,
        spare_bytes=spare_bytes,
        free_bytes=10**9,
    )


@pytest.mark.parametrize(("size", "count"), [(1600, 1), (3199, 1), (3200, 2)])
def test_a_given_size_is_filled_with_whole_blocks(size: int, count: int):
    assert blocks(size) == count


def test_auto_takes_no_more_than_the_longest_rows_need():
    assert blocks("auto", wanted_tokens=33) == 3


def test_auto_takes_no_more_than_is_spare():
    assert blocks("auto", spare_bytes=3300) == 2


def test_memory_of_no_block_is_refused():
    with pytest.raises(ModelError, match=r"1,599 bytes holds no block of 16 tokens \(1,600 bytes"):
        blocks(1599)


def test_weights_and_one_block_of_kv_must_fit():
    check_fits(900, 100, 1000)
    with pytest.raises(ModelError, match=r"needs 1,001 bytes .* free are 1,000") as refusal:
        check_fits(901, 100, 1000)
    assert refusal.value.hint


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * 1024**2} kB\n",
        "proc/self/cgroup": groups,
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_limits_all_available_memory_counts(tmp_path: Path):
    assert available_memory(system(tmp_path, "", {})) == 8 * GIB


def test_a_limit_of_the_second_cgroup_version_holds(tmp_path: Path):
    root = system(
        tmp_path,
        "0::/job/step\n",
        {
            "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "1\n",
        },
    )
    assert available_memory(root) == 3 * GIB


def test_a_limit_of_the_first_cgroup_version_holds(tmp_path: Path):
    root = system(
        tmp_path,
        "4:memory:/job\n1:cpu:/\n0::/\n",
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": "cache 0\n",
        },
    )
    assert available_memory(root) == 3 * GIB


def test_a_container_that_sees_only_its_own_mount_is_limited(tmp_path: Path):
    root = system(
        tmp_path,
        "0::/docker/abc\n",
        {
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
    )
    assert available_memory(root) == GIB


def test_this_machine_has_memory():
    assert 0 < available_memory() <= total_memory()


def test_all_memory_is_that_of_the_host_or_of_the_narrowest_control_group(tmp_path: Path):
    assert total_memory(system(tmp_path / "none", "", {})) == 1024
    limits = {
        "proc/meminfo": f"MemTotal: {16 * 1024**2} kB\n",
        "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
    }
    assert total_memory(system(tmp_path / "job", "0::/job/step\n", limits)) == 4 * GIB


def test_more_than_is_free_is_refused_with_both_figures():
    with pytest.raises(ModelError, match=r"kv_memory is 1,000,000,001 bytes, free are 1,000,000,0"):
        blocks(10**9 + 1)


@pytest.mark.parametrize(
    ("swap_memory", "count"), [("auto", 50), (99, 0), (100, 1), (199, 1), (2_000, 20)]
)
def test_swap_memory_is_filled_with_whole_blocks(swap_memory, count: int):
    found = swap_block_count(
        swap_memory, block_bytes=100, kv_blocks=90, spare_bytes=5_050, free_bytes=10_000
    )
    assert found == count


def test_workers_that_share_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(loading, "available_memory", lambda: 2**24)

    def blocks():
        info = SimpleNamespace(device="cpu", max_model_len=2**30, kv_bytes_per_token=1)
        info.step_bytes_per_token = info.logit_bytes = 0
        info.weight_bytes = 0
        limits = loading.resolve_limits("cpu", 8, "auto", "auto", "auto")
        kv = loading.estimate_kv_blocks(info, limits, kv_memory="auto", block_size=16)
        return kv, loading._host_block_count(BatchingTable(), "cpu", 16, 2**30)

    alone = blocks()
    monkeypatch.setenv(WORKERS_VARIABLE, "4")
    assert blocks() == (alone[0] // 4, alone[1] // 4)


def test_automatic_swap_memory_is_no_larger_than_the_pool():
    found = swap_block_count(
        "auto", block_bytes=100, kv_blocks=90, spare_bytes=50_000, free_bytes=100_000
    )
    assert found == 90


def test_more_swap_memory_than_is_free_is_refused_with_both_figures():
    with pytest.raises(ModelError) as raised:
        swap_block_count(2_001, block_bytes=100, kv_blocks=9, spare_bytes=9, free_bytes=2_000)
    assert str(raised.value) == "batching.swap_memory is 2,001 bytes, free are 2,000"
