"""Rows of several samples and the books of errors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobrunner.console.rows import EXAMPLES, EndedRow, Errors, OpenRows
from jobrunner.records import Completion, Request, RowError, RowId, Sampling


def sample(row: int, number: int, samples: int, error: RowError | None = None) -> Completion:
    row_id = RowId("a", row)
    request = Request(row_id, [1, 2], Sampling(9), sample=number, samples=samples)
    tokens = () if error else (5,) * (number + 1)
    return Completion(row_id, tokens, prompt_tokens=2, request=request, error=error)


@given(
    st.lists(st.integers(1, 4), max_size=6).flatmap(
        lambda counts: st.permutations([(r, n, c) for r, c in enumerate(counts) for n in range(c)])
    )
)
def test_row_ends_once_with_its_last_sample_in_any_order(
    samples: list[tuple[int, int, int]],
) -> None:
    rows, ended, left = OpenRows(), [], [row for row, _, _ in samples]
    for row, number, count in samples:
        left.remove(row)
        found = rows.add(sample(row, number, count))
        assert (found is not None) == (row not in left)
        if found:
            ended.append(row)
            assert found == EndedRow(0, tokens=2 + count * (count + 1) // 2)
    assert sorted(ended) == sorted({row for row, _, _ in samples})
    assert not rows._rows


def test_row_with_one_failed_sample_has_its_error() -> None:
    rows, error = OpenRows(), RowError("cannot_fit", "too big")
    assert rows.add(sample(0, 1, samples=2, error=error)) is None
    assert rows.add(sample(0, 0, samples=2)) == EndedRow(0, tokens=3, error=error)


def test_row_that_never_became_a_request_ends_at_once() -> None:
    error = RowError("null_prompt", "")
    assert OpenRows().add(Completion(RowId("a", 0), error=error)) == EndedRow(0, 0, error)


def test_first_messages_of_each_kind_are_kept_with_their_rows() -> None:
    errors = Errors()
    for index in range(5):
        errors.add(RowError("cannot_fit", "too big"), RowId("a.parquet", 1000 + index))
    errors.add(RowError("bad_text", "row 7 of `a.parquet` has no text"), RowId("a.parquet", 7))
    assert errors.by_kind == {"bad_text": 1, "cannot_fit": 5}
    assert errors.total == 6
    assert errors.examples == {
        "bad_text": ("row 7 of `a.parquet` has no text",),
        "cannot_fit": tuple(
            f"row {index:,} of `a.parquet`: too big" for index in range(1000, 1000 + EXAMPLES)
        ),
    }


def test_long_messages_are_cut() -> None:
    errors = Errors()
    errors.add(RowError("bad_text", "x" * 10_000), RowId("a", 7))
    (message,) = errors.examples["bad_text"]
    assert len(message) == 200
    assert message.startswith("row 7 of `a`: xxx")
    assert message.endswith("x…")
