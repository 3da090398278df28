"""A crew of real processes: they are started, heard, restarted, told and waited for."""

import os
import signal
import sys
import time

import pytest

from jobrunner.cluster import local
from jobrunner.cluster.local import MOST_DEATHS, MOST_DEATHS_AT_START, Crew, Ended, worst
from jobrunner.cluster.places import Place
from jobrunner.errors import ExitCode

CORE = min(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(local, "FIRST_PAUSE_S", 0.0)


def crew_of(*scripts, cores=None):
    """A crew of shell scripts; a script may use $life."""

    def command(number, life):
        return ["sh", "-c", f"life={life}; {scripts[number]}"]

    return Crew([Place(f"place {number}", cores) for number in range(len(scripts))], command)


def work(crew, count, heard=None):
    """Start workers and see them through; return all ends."""
    for number in range(count):
        crew.start(number)
    ended = []
    deadline_s = time.monotonic() + 30
    while crew.working:
        assert time.monotonic() < deadline_s
        for line in crew.lines(0.01):
            (heard if heard is not None else []).append((line.worker, line.text))
            crew.begun(line.worker, finished=line.text == "row")
        ended += crew.look()
    return ended


def test_what_workers_say_and_how_they_end_is_heard():
    heard = []
    crew = crew_of("echo one >&2; exit 3", "echo two >&2")
    ended = work(crew, 2, heard)
    heard += [(line.worker, line.text) for line in crew.lines(0.1)]
    assert sorted(heard) == [(0, "one"), (1, "two")]
    assert sorted(crew.codes) == [0, 3]
    assert {(end.worker, end.code) for end in ended} == {(0, 3), (1, 0)}


def test_a_worker_that_dies_is_started_again_until_it_ends_by_itself():
    crew = crew_of("[ $life = 2 ] || kill -9 $$")
    ended = work(crew, 1)
    assert [end.words for end in ended] == ["killed by SIGKILL"] * 2 + ["exit code 0"]
    assert crew.codes == [0]


@pytest.mark.parametrize("code", [2, 4, 74, 75, 130])
def test_an_end_that_another_start_would_not_change_is_final(code):
    crew = crew_of(f"exit {code}")
    [ended] = work(crew, 1)
    assert ended == Ended(0, ended.pid, code)
    assert crew.codes == [code]


def test_a_worker_that_never_begins_is_given_up_soon():
    crew = crew_of("exit 1")
    ended = work(crew, 1)
    assert len(ended) == MOST_DEATHS_AT_START
    assert ended[-1].crash_loop
    assert crew.codes == [ExitCode.UNEXPECTED]


def test_a_worker_that_begins_and_finishes_nothing_is_given_up_later():
    crew = crew_of("echo begun >&2; sleep 0.05; kill -SEGV $$")
    ended = work(crew, 1)
    assert len(ended) == MOST_DEATHS
    assert ended[-1].crash_loop


def test_a_worker_that_finishes_something_in_each_life_is_never_given_up():
    lives = MOST_DEATHS + 3
    crew = crew_of(f"echo row >&2; sleep 0.05; [ $life = {lives} ] || exit 1")
    assert len(work(crew, 1)) == lives + 1
    assert crew.codes == [0]


def test_a_signal_reaches_every_worker_and_nobody_starts_again():
    script = "trap 'exit 75' TERM; echo ready >&2; while :; do sleep 0.01; done"
    crew = crew_of(script, script, "exit 1")
    for number in range(3):
        crew.start(number)
    ready = 0
    while ready < 2:
        ready += sum(line.text == "ready" for line in crew.lines(0.1))
    crew.tell(signal.SIGTERM)
    while crew.working:
        crew.look()
    assert crew.codes == [75, 75, 75]


def test_a_worker_sees_its_cores_its_environment_and_how_many_it_shares_the_machine_with():
    heard = []
    script = (
        "import os, sys; print(os.sched_getaffinity(0), os.environ['GPU'],"
        " os.environ['CBJOB_WORKERS_HERE'], file=sys.stderr)"
    )
    place = Place("here", frozenset({CORE}), {"GPU": "7"})
    before = os.sched_getaffinity(0)
    crew = Crew([place, place], lambda number, life: [sys.executable, "-c", script])
    work(crew, 1, heard)
    heard += [(line.worker, line.text) for line in crew.lines(0.1)]
    assert heard == [(0, f"{{{CORE}}} 7 2")]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([3, 3], 3),
        ([75, 0], 0),
        ([74, 3], 3),
        ([75, 75], 75),
        ([74, 75], 74),
        ([1, 74], 1),
        ([4, 75], 4),
        ([2, 75], 2),
        ([130, 75], 130),
    ],
)
def test_the_exit_code_is_the_worst_unless_a_worker_saw_the_job_complete(codes, code):
    assert worst(codes) == code
