"""Which rows are held against whom, after a worker died."""

from dataclasses import replace

import pytest

from jobrunner.data.claims import Identity
from jobrunner.data.suspects import Flight, Suspects, note_crash
from jobrunner.errors import InfrastructureError
from jobrunner.records import RowId

HERE = Identity.of_this_process("cpu")
# no process can have this number
DEAD = replace(HERE, pid=2**22 + 1, started=1)
ROWS = [RowId("a", index) for index in range(4)]


def die(run, rows, *, token="t", tokens=0, crash=True, dead=DEAD, finished=()):
    """A worker dies with rows in its engine."""
    flight = Flight(run, replace(dead, token=token))
    flight.__enter__()
    flight.begin((row, tokens) for row in rows)
    flight.end(finished)
    if crash:
        note_crash(run, dead.pid)


def looked(run):
    suspects = Suspects(run, HERE)
    suspects.look()
    return suspects


def test_rows_that_were_in_the_engine_of_a_worker_that_died_are_suspect(run):
    die(run, ROWS, finished=ROWS[:2])
    suspects = looked(run)
    assert [suspects.suspicion(row) is not None for row in ROWS] == [False, False, True, True]
    assert suspects.suspicion(ROWS[2]).weight == 3
    assert not list(run.flights.iterdir())
    # it is on record for whoever comes next
    assert looked(run).suspicion(ROWS[2]) == suspects.suspicion(ROWS[2])


def test_a_row_is_guilty_at_its_third_crash_if_it_was_alone(run):
    die(run, ROWS, token="1")
    die(run, ROWS[:2], token="2")
    assert not looked(run).suspicion(ROWS[0]).guilty
    die(run, ROWS[:1], token="3")
    suspects = looked(run)
    assert [bool(s and s.guilty) for s in map(suspects.suspicion, ROWS)] == [True] + [False] * 3
    assert suspects.suspicion(ROWS[0]).deaths == 3


def test_in_company_no_number_of_crashes_makes_a_row_guilty(run):
    for token in "12345":
        die(run, ROWS[:2], token=token)
    assert not looked(run).suspicion(ROWS[0]).guilty


def test_a_silent_death_weighs_a_third(run):
    die(run, ROWS[:1], crash=False)
    assert looked(run).suspicion(ROWS[0]).weight == 1


def test_deaths_before_a_row_got_further_do_not_count(run):
    for token in "12":
        die(run, ROWS[:1], token=token, tokens=5)
    die(run, ROWS[:1], token="3", tokens=9)
    assert looked(run).suspicion(ROWS[0]).weight == 3


@pytest.mark.parametrize("change", [{"boot": "other"}, {"slurm_job": "7"}], ids=repr)
def test_a_machine_or_a_job_that_went_down_is_no_rows_fault(run, change):
    die(run, ROWS, dead=replace(DEAD, **change))
    assert looked(run).suspicion(ROWS[0]) is None
    assert not list(run.flights.iterdir())


def test_a_worker_that_lives_is_let_be(run):
    with Flight(run, HERE) as flight:
        flight.begin([(ROWS[0], 0)])
        assert looked(run).suspicion(ROWS[0]) is None
        assert len(list(run.flights.iterdir())) == 1
    assert not list(run.flights.iterdir())


def raise_in_flight(run, error):
    with Flight(run, HERE) as flight:
        flight.begin([(ROWS[0], 0)])
        raise error


@pytest.mark.parametrize(
    "error", [InfrastructureError("x"), OSError("full"), KeyboardInterrupt()], ids=repr
)
def test_an_end_that_has_a_cause_elsewhere_is_no_death(run, error):
    with pytest.raises(type(error)):
        raise_in_flight(run, error)
    assert looked(run).suspicion(ROWS[0]) is None


def test_an_exception_that_nobody_expected_is_a_crash(run):
    with pytest.raises(RuntimeError):
        raise_in_flight(run, RuntimeError("the device is lost"))
    assert looked(run).suspicion(ROWS[0]).weight == 3


def test_a_journal_is_written_anew_and_a_cut_line_is_passed_over(run, monkeypatch):
    monkeypatch.setattr("jobrunner.data.suspects._MOST_LINES", 10)
    flight = Flight(run, DEAD)
    flight.__enter__()
    for index in range(100):
        flight.begin([(RowId("a", index), 0)])
        if index < 98:
            flight.end([RowId("a", index)])
    [path] = run.flights.iterdir()
    assert len(path.read_text().splitlines()) < 40
    path.write_text(path.read_text() + '["-", "a", 9')
    suspects = looked(run)
    found = [index for index in range(100) if suspects.suspicion(RowId("a", index))]
    assert found == [98, 99]


def test_what_is_forgotten_is_not_held_against_anyone(run):
    die(run, ROWS)
    suspects = looked(run)
    suspects.forget()
    assert suspects.suspicion(ROWS[0]) is None
    assert looked(run).suspicion(ROWS[0]) is None
