"""How suspect rows are handed out: after the others, few together, alone at last."""

from types import SimpleNamespace

import pytest

from jobrunner.data.claims import Identity
from jobrunner.data.suspects import Flight, Suspicion
from jobrunner.guard import Guard
from jobrunner.records import Completion, Request, RowId, Sampling
from tests.fakes import FakeRequests


def request(index, sample=0, samples=1):
    return Request(RowId("a", index), [1], Sampling(1), sample=sample, samples=samples)


class Known:
    """Suspicions as a test says."""

    def __init__(self, weights, guilty=()):
        self._weights, self._guilty = weights, guilty

    def suspicion(self, row):
        if row.index not in self._weights:
            return None
        alone = row.index in self._guilty
        return Suspicion(self._weights[row.index], 3, alone)

    def few(self):
        return 2


class Handed(FakeRequests):
    """A feed that is ended once all is taken."""

    ended = FakeRequests.exhausted
    left_over = False

    def stop_admitting(self):
        """Nothing is left anyway."""

    def give_back(self, requests):
        self._requests[:0] = requests

    def errors(self):
        return []


@pytest.fixture
def unbegun():
    """The rows that the ledger hears are not begun any more."""
    return []


@pytest.fixture
def guarded(tmp_path, unbegun):
    def make(requests, weights, guilty=()):
        run = SimpleNamespace(flights=tmp_path / "flights")
        flight = Flight(run, Identity.of_this_process("cpu"))
        flight.__enter__()
        ledger = SimpleNamespace(begin=list, unbegin=unbegun.extend)
        return Guard(Handed(requests), ledger, flight, Known(weights, guilty))

    return make


def groups(guard):
    """What the engine gets, each time it has finished all it had."""
    found = []
    while not guard.ended:
        taken = list(guard.take(100))
        if taken:
            found.append([(one.id.index, one.sample) for one in taken])
        guard.finish(Completion(one.id) for one in taken)
    return found


def test_suspects_run_after_the_others_in_small_groups_and_then_alone(guarded):
    requests = [request(index) for index in range(8)]
    guard = guarded(requests, {1: 1, 2: 3, 3: 3, 4: 3, 5: 6, 6: 6})
    rows = [[row for row, _ in group] for group in groups(guard)]
    assert rows == [[0, 1, 7], [2, 3], [4], [5], [6]]


def test_all_samples_of_a_suspect_row_run_together(guarded):
    requests = [request(0, sample, 2) for sample in range(2)]
    assert groups(guarded(requests, {0: 6})) == [[(0, 0), (0, 1)]]


def test_a_group_is_not_joined_and_waits_for_nobody(guarded):
    guard = guarded([request(0), request(1)], {0: 6, 1: 6})
    assert list(guard.take(100)) == []
    assert not guard.exhausted
    [first] = guard.take(100)
    assert first.id.index == 0
    # a policy that waits for a full batch lets it run
    assert guard.exhausted
    assert not guard.ended
    assert list(guard.take(100)) == []


def test_once_it_stops_admitting_no_suspect_begins_either(guarded):
    guard = guarded([request(0), request(1)], {0: 6, 1: 6})
    assert list(guard.take(100)) == []
    [first] = guard.take(100)
    guard.stop_admitting()
    guard.finish([Completion(first.id)])
    assert list(guard.take(100)) == []
    assert (guard.exhausted, guard.ended, guard.left_over, guard.wants_more) == (
        *(True, True, True, False),
    )


def test_a_guilty_row_is_an_error_once_and_is_never_handed_out(guarded):
    guard = guarded([request(0, sample, 2) for sample in range(2)], {0: 9}, guilty=(0,))
    assert groups(guard) == []
    [error] = guard.errors()
    assert (error.id.index, error.error.kind) == (0, "internal")
    assert guard.errors() == []


def test_what_the_engine_gives_back_is_not_in_flight_and_comes_again(guarded, unbegun):
    guard = guarded([request(0), *(request(1, sample, 2) for sample in range(2))], {})
    taken = guard.take(100)
    guard.take_back(taken[:2])
    # another sample of row 1 may run
    assert unbegun == [RowId("a", 0)]
    assert not guard.exhausted
    assert list(guard.take(100)) == taken[:2]
    guard.finish(Completion(one.id) for one in taken)
    assert guard.ended


def test_suspects_that_come_back_run_alone_again(guarded):
    guard = guarded([request(0), request(1)], {0: 6, 1: 6})
    assert list(guard.take(100)) == []
    taken = guard.take(100)
    guard.take_back(taken)
    assert groups(guard) == [[(1, 0)], [(0, 0)]]
