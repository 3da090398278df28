"""Two workers on one shard: what waits in the engine of one is shared with the other."""

import os
import time

import pytest

from jobrunner.data import ledger
from jobrunner.errors import ExitCode
from tests.world import World

ROWS = 60


@pytest.fixture
def world(tmp_path, tiny_model):
    world = World(tmp_path, tiny_model)
    world.add_shard("a.parquet", [f"row {index}" for index in range(ROWS)])
    return world


def test_a_window_that_holds_all_rows_is_shared_with_a_worker_that_has_none(
    world, tmp_path, monkeypatch
):
    monkeypatch.setattr(ledger, "POLL_S", 0.02)
    first_has_begun, second_has_done = tmp_path / "begun", tmp_path / "done"

    def slow():
        first_has_begun.touch()
        if not second_has_done.exists():
            time.sleep(0.1)

    first = world.start_worker("one", batch=2, lookahead=ROWS, before_step=slow)
    while not first_has_begun.exists():
        time.sleep(0.01)

    def observe(step):
        if step.completions:
            second_has_done.touch()

    second = world.start_worker("two", batch=2, observe=observe)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (first, second)]
    assert codes == [ExitCode.OK, ExitCode.OK]
    assert second_has_done.exists()
    assert world.problems() == []
