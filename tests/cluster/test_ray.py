"""On a real Ray cluster of several nodes: a node dies, and a local run goes on with the rest."""

import threading

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.cluster.ray import find_share
from jobrunner.commands.ray_workers import run_on_ray
from jobrunner.commands.status import look
from jobrunner.commands.verify import find_problems
from jobrunner.data.layout import RunDirectory
from jobrunner.errors import ConfigError, ExitCode
from jobrunner.job import run
from jobrunner.jobfile import load_settings
from jobrunner.stop import Stop
from tests.slurm_cluster import wait_for

JOB = """
[input]
path = "input"
prompt = "prompt"
[output]
path = "run"
[model]
name = {model!r}
dtype = "float32"
threads = 1
[generation]
max_new_tokens = 60
ignore_eos = true
[batching]
max_batch_size = 4
[checkpoint]
every = "200ms"
grace = "5s"
[progress]
every = "1s"
style = "plain"
[workers]
engine = "ray"
"""


@pytest.fixture(scope="module")
def cluster():
    """A head that works nothing, and two nodes of one core on this machine."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'jobrunner[ray]'")
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # who looks for a node that is gone asks often
        config = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
        config["health_check_initial_delay_ms"] = 0
        head = {"num_cpus": 0, "_system_config": config, "node_ip_address": "127.0.0.2"}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        # this process belongs to the head: the nodes may die
        local = {"log_to_driver": False, "_node_ip_address": "127.0.0.2"}
        ray.init(address=cluster.address, **local)
        for _ in range(2):
            cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
        cluster.wait_for_nodes()
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def job(tmp_path, tiny_model):
    (tmp_path / "input").mkdir()
    for name in "abc":
        table = pa.table({"prompt": [f"row {name} {index}" for index in range(80)]})
        pq.write_table(table, tmp_path / "input" / f"{name}.parquet")
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(model=str(tiny_model)))
    return path


def test_a_worker_for_each_gpu_or_for_so_many_cores(cluster):
    assert find_share(gpu=None, count=None, cores=None).count == 2
    assert find_share(gpu=False, count=1, cores=1).count == 1
    with pytest.raises(ConfigError, match="is 3, but the Ray cluster has 2 times 1 cores"):
        find_share(gpu=False, count=3, cores=1)
    with pytest.raises(ConfigError, match="has 0 GPUs"):
        find_share(gpu=True, count=None, cores=None)


def test_a_node_dies_the_others_go_on_and_a_local_run_finishes(cluster, job):
    settings, stop, codes = load_settings(job), Stop(), []
    driver = threading.Thread(
        target=lambda: codes.append(run_on_ray(settings, job, None, (), stop=stop))
    )
    driver.start()
    wait_for(lambda: codes or (len(alive(settings)) == 2 and working(settings)), "two workers")
    assert not codes
    # the one that has claimed rows dies: the other has to take them over
    pid = working(settings)[0]
    cluster.remove_node(node_of(cluster, pid), allow_graceful=False)
    wait_for(lambda: pid not in [worker.pid for worker in alive(settings)], "its loss")
    done = look(settings).rows_done
    wait_for(lambda: codes or look(settings).rows_done > done, "work of the other")
    stop.request("test")
    driver.join(60)
    assert codes == [ExitCode.RUN_AGAIN]
    assert look(settings).state == "stopped"
    assert run(settings).exit_code == ExitCode.OK
    assert list(find_problems(settings, RunDirectory(settings.run_directory, "test"))) == []
    in_peace = load_settings(job, ["output.path=peace"])
    run(in_peace)
    for path in sorted((in_peace.run_directory / "results").iterdir()):
        there = pq.read_table(settings.run_directory / "results" / path.name)
        assert pq.read_table(path).equals(there)


def working(settings):
    return [w.pid for w in alive(settings) if w.numbers.get("rows_this_run", 0) > 0]


def node_of(cluster, pid):
    """The node whose raylet has started a worker."""
    parent = psutil.Process(pid).ppid()
    [node] = [n for n in cluster.worker_nodes if raylet_pid(n) == parent]
    return node


def raylet_pid(node):
    return node.all_processes["raylet"][0].process.pid


def alive(settings):
    return [worker for worker in look(settings).workers if worker.liveness == "alive"]
