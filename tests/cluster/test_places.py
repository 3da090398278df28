"""Which devices the workers of a job get."""

import pytest

from jobrunner.cluster.places import Place, find_places, visible_gpus
from jobrunner.config import WorkersTable
from jobrunner.errors import ConfigError

CORES = frozenset({0, 1, 2, 3, 8})


def places(device="auto", gpus=(), cores=CORES, **table):
    workers = WorkersTable.model_validate(table)
    return find_places(workers, device, list(gpus), cores)


def on(*cores):
    return frozenset(cores)


def test_without_a_gpu_one_worker_has_all_cores():
    assert places() == [Place("cores 0-3,8", CORES)]
    assert places("cpu", gpus=["0", "1"]) == [Place("cores 0-3,8", CORES)]


def test_cores_are_split_between_so_many_workers_neighbours_together():
    assert [place.cores for place in places(count=2)] == [on(0, 1), on(2, 3, 8)]
    assert [place.cores for place in places(count=5)] == [on(n) for n in (0, 1, 2, 3, 8)]
    assert [place.name for place in places(count=2)] == ["cores 0-1", "cores 2-3,8"]


def test_cores_can_be_named_as_taskset_names_them():
    found = places(devices=["0-1", "3,8"])
    assert [place.cores for place in found] == [on(0, 1), on(3, 8)]


def test_each_gpu_gets_a_worker_that_sees_no_other():
    found = places(gpus=["0", "1"])
    assert [place.environment for place in found] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    assert [place.cores for place in found] == [None, None]
    assert [place.name for place in places(gpus=["0", "1"], count=1)] == ["gpu 0"]
    assert [place.name for place in places(gpus=["3", "GPU-ab"], devices=["GPU-ab"])] == [
        "gpu GPU-ab"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 6}, "`workers.count` is 6, but there are 5 cores"),
        ({"devices": ["0-4"]}, "names core 4, which this process may not use"),
        ({"devices": ["a"]}, "has `a`, which is no set of cores"),
        ({"devices": ["0-1", "1,2"]}, "gives a core to two workers"),
        ({"gpus": ["0"], "count": 2}, "`workers.count` is 2, but there are 1 GPUs"),
        ({"gpus": ["0"], "devices": ["1"]}, "names GPU 1; there are 0"),
    ],
)
def test_more_than_is_there_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        places(**options)


def test_visible_gpus_are_those_that_cuda_would_show(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,GPU-ab"}, tmp_path) == ["1", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, tmp_path) == ["0"]
