"""The real command on a tiny real model: signals, kills, and one and the same answer."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 24
JOB = """
[input]
path = "input"
prompt = "prompt"
[output]
path = "{run}"
[model]
name = "{model}"
dtype = "float32"
threads = 1
[generation]
max_new_tokens = 60
{generation}
[batching]
max_batch_size = 8
token_budget = 32
kv_memory = "200KiB"
[checkpoint]
every = "50ms"
[progress]
every = "1s"
"""


class Command:
    """`cbjob run` on a tiny model whose KV memory is too small for its batch."""

    def __init__(self, folder: Path, model: Path, generation: str = "") -> None:
        self.folder = folder
        self.model = model
        self.generation = generation
        draw = random.Random(0)
        prompts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 90))) for _ in range(ROWS)]
        (folder / "input").mkdir()
        pq.write_table(pa.table({"prompt": prompts}), folder / "input/a.parquet")

    def start(self, run: str) -> subprocess.Popen:
        path = self.folder / f"{run}.toml"
        path.write_text(JOB.format(run=run, model=self.model, generation=self.generation))
        return subprocess.Popen(
            [sys.executable, "-m", "jobrunner.cli", "run", path], stderr=subprocess.PIPE, text=True
        )

    def finish(self, run: str) -> str:
        child = self.start(run)
        _, said = child.communicate(timeout=120)
        assert child.returncode == 0, said
        return said

    def wait_for_progress(self, run: str, child: subprocess.Popen) -> None:
        """Return once this process has saved tokens, so that there is something to lose."""
        partials = self.folder / run / ".cbjob/partials"
        before = set(partials.rglob("*.parquet"))
        while not set(partials.rglob("*.parquet")) - before:
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.005)

    def rows(self, run: str) -> list[dict]:
        return pq.read_table(self.folder / run / "results/a.parquet").to_pylist()

    def verify(self, run: str) -> int:
        command = [sys.executable, "-m", "jobrunner.cli", "verify", self.folder / f"{run}.toml"]
        return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode


@pytest.fixture(scope="module")
def command(tmp_path_factory, tiny_model):
    command = Command(tmp_path_factory.mktemp("greedy"), tiny_model)
    command.finish("peace")
    return command


def test_each_signal_saves_everything_and_exits_75(command):
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
        child = command.start("signals")
        command.wait_for_progress("signals", child)
        child.send_signal(signal.Signals[name])
        _, said = child.communicate(timeout=60)
        assert child.returncode == 75
        assert f"{name}: saved; " in said
    assert command.verify("signals") == 1
    command.finish("signals")
    assert command.rows("signals") == command.rows("peace")
    assert command.verify("signals") == 0


def test_case_A_killed_again_and_again_the_answers_are_those_of_one_run(tmp_path, tiny_model):
    generation = 'temperature = 0.9\ntop_p = 0.8\nstop = ["a", "eh"]'
    command = Command(tmp_path, tiny_model, generation)
    command.finish("peace")
    for _ in range(2):
        child = command.start("killed")
        command.wait_for_progress("killed", child)
        child.kill()
        child.communicate()
    command.finish("killed")
    assert command.rows("killed") == command.rows("peace")
    assert command.verify("killed") == 0


def test_a_finished_job_says_where_its_results_are(command):
    said = command.finish("peace")
    assert "every row is done" in said
    assert str(command.folder / "peace/results") in said
