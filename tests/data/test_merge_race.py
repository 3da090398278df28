"""Two processes merge one shard at the same time."""

import os
import time
import traceback

from jobrunner.data.layout import RunDirectory
from jobrunner.data.results.merge import merge_shard
from jobrunner.data.results.parts import Results
from tests.data.conftest import answer, kept_columns, read_result

ROWS = 300


def merge_in_a_process(root, name, start_s):
    pid = os.fork()
    if pid:
        return pid
    try:
        run = RunDirectory(root, worker=name)
        while time.monotonic() < start_s:
            pass
        tally = merge_shard(run, "a", ROWS, *kept_columns(ROWS))
        os._exit(0 if tally.rows == ROWS else 1)
    except BaseException:  # noqa: BLE001 - a child must never return into the tests
        traceback.print_exc()
        os._exit(99)


def test_processes_that_merge_one_shard_at_once_leave_one_whole_result(tmp_path):
    for round_ in range(8):
        run = RunDirectory(tmp_path / str(round_), worker="host-1-aa")
        run.create()
        results = Results(run, part_rows=100)
        for start in range(0, ROWS, 20):
            for index in range(start, start + 20):
                results.add(answer("a", index))
            results.commit()
        # the later one begins anywhere from before the other to after its end
        begin_s = time.monotonic() + 0.05
        late_s = begin_s + 0.004 * round_
        pids = [
            merge_in_a_process(run.root, "host-2-bb", begin_s),
            merge_in_a_process(run.root, "host-3-cc", late_s),
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes == [0, 0]
        assert [row["row"] for row in read_result(run, "a")] == list(range(ROWS))
        left = [path for path in run.state.rglob("*") if path.is_file()]
        assert left == []
