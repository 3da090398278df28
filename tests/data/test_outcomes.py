"""Outcome rows say what their samples said; several samples of a row are gathered into one."""

import math

import pytest

from jobrunner.data.layout import EXTRA_FIELDS, outcome_schema
from jobrunner.data.results.outcome_checks import is_sound
from jobrunner.data.results.outcomes import outcome_table
from jobrunner.data.results.parts import Results, list_parts
from jobrunner.data.results.samples import Answer, FinishedRow, Gathering
from jobrunner.records import (
    Completion,
    Partial,
    Request,
    RowError,
    RowId,
    Sampling,
    TokenLogprob,
)
from tests.data.conftest import answer, failure

ALL = tuple(EXTRA_FIELDS)
ROW = RowId("a.parquet", 3)
FITS_NOT = RowError("cannot_fit", "it is too long")


def sample(number, of=2, tokens=(5, 6), error=None, row=ROW):
    """A finished sample, one of several, with the log-probabilities of its tokens."""
    tokens = () if error else tokens
    request = Request(row, [1, 2, 3], Sampling(9), sample=number, samples=of, truncated_tokens=7)
    completion = Completion(
        row,
        tokens=tokens,
        finish_reason=None if error else "stop",
        prompt_tokens=3,
        error=error,
        request=request,
        logprobs=[TokenLogprob(token, -0.5, ((token, -0.5), (9, -math.inf))) for token in tokens],
        chunks=2,
    )
    return Answer(completion, None if error else f"text {number}", "the prompt")


def outcome(row, extras=ALL):
    [outcome] = outcome_table([row], extras).to_pylist()
    return outcome


def test_extra_columns_say_what_the_first_sample_said_and_samples_all():
    row = FinishedRow((sample(0), sample(1, tokens=(7,))))
    one = [
        {"token_id": 5, "logprob": -0.5, "top": [{"token_id": 5, "logprob": -0.5}, NO_WORD]},
        {"token_id": 6, "logprob": -0.5, "top": [{"token_id": 6, "logprob": -0.5}, NO_WORD]},
    ]
    other = [{"token_id": 7, "logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.5}, NO_WORD]}]
    assert outcome(row) == {
        "row": 3,
        "status": "ok",
        "text": "text 0",
        "finish_reason": "stop",
        "error_kind": None,
        "error": None,
        "prompt_tokens": 3,
        "output_tokens": 3,
        "truncated_tokens": 7,
        "prompt_text": "the prompt",
        "token_ids": [5, 6],
        "logprobs": one,
        "chunks": 2,
        "samples": [
            {
                "text": "text 0",
                "finish_reason": "stop",
                "output_tokens": 2,
                "token_ids": [5, 6],
                "logprobs": one,
            },
            {
                "text": "text 1",
                "finish_reason": "stop",
                "output_tokens": 1,
                "token_ids": [7],
                "logprobs": other,
            },
        ],
    }


# a log-probability of minus infinity
NO_WORD = {"token_id": 9, "logprob": None}


def test_samples_have_no_tokens_where_none_are_asked_for():
    [first, second] = outcome(FinishedRow((sample(0), sample(1))), ["samples"])["samples"]
    assert (first["token_ids"], second["logprobs"]) == (None, None)
    assert second["text"] == "text 1"


def test_a_row_with_one_failed_sample_is_an_error_row_with_the_first_error():
    late = RowError("internal", "later")
    failed = outcome(
        FinishedRow((sample(0, 3), sample(1, 3, error=FITS_NOT), sample(2, 3, error=late)))
    )
    assert (failed["status"], failed["error_kind"], failed["error"]) == (
        "error",
        "cannot_fit",
        "it is too long",
    )
    assert failed["output_tokens"] == 2
    answers = ("text", "finish_reason", "token_ids", "logprobs", "samples")
    assert {name: failed[name] for name in answers} == dict.fromkeys(answers)


@pytest.mark.parametrize("extras", [(), ("logprobs",), ("samples",), ("token_ids", "samples"), ALL])
def test_a_table_mixes_answers_and_failures_in_the_schema_of_its_job(extras):
    rows = [failure("a", 0), FinishedRow((sample(0, 1),)), failure("a", 4), answer("a", 5)]
    table = outcome_table(rows, extras)
    assert table.schema.equals(outcome_schema(extras))
    table.validate(full=True)
    assert table["row"].to_pylist() == [0, 3, 4, 5]
    assert all(is_sound(found) for found in table.slice(0, 3).to_pylist())


def test_no_rows_make_an_empty_table_of_the_same_schema():
    assert outcome_table([], ALL).schema.equals(outcome_schema(ALL))


def test_a_row_is_whole_when_its_last_sample_is_there_in_the_order_of_samples():
    gathering = Gathering()
    assert gathering.add(sample(2, 3)) is None
    assert gathering.add(sample(0, 3)) is None
    row = gathering.add(sample(1, 3))
    assert [answer.completion.request.sample for answer in row.answers] == [0, 1, 2]
    assert gathering.partials() == []


def test_a_row_that_never_became_requests_is_whole_by_itself():
    [failed] = failure("a", 0).answers
    assert Gathering().add(failed) == failure("a", 0)


def test_rows_are_gathered_apart():
    gathering = Gathering()
    other = RowId("a.parquet", 4)
    gathering.add(sample(0))
    gathering.add(sample(0, row=other))
    assert gathering.add(sample(1, row=other)).id == other


def test_finished_samples_are_partials_while_others_run_and_failed_ones_are_not():
    gathering = Gathering()
    gathering.add(sample(1, 3))
    gathering.add(sample(2, 3, error=FITS_NOT))
    logprobs = sample(1, 3).completion.logprobs
    assert gathering.partials() == [Partial(ROW, (5, 6), 1, sample=1, logprobs=logprobs)]


def test_many_log_probabilities_fill_a_part_before_its_rows_do(run, monkeypatch):
    monkeypatch.setattr("jobrunner.data.results.parts.MOST_LOGPROBS", 10)
    results = Results(run, part_rows=100, extras=("logprobs",))
    results.add(FinishedRow((sample(0, 1),)))
    assert not results.full
    results.add(FinishedRow((sample(0, 1, row=RowId("a.parquet", 4)),)))
    assert results.full
    results.commit()
    assert not results.full
    assert len(list_parts(run, "a.parquet")) == 1


WRONG = {
    "a sample without text": lambda o: o["samples"][1].update(text=None),
    "a sample with tokens missing": lambda o: o["samples"][1].update(token_ids=[1]),
    "a first sample that differs": lambda o: o["samples"][0].update(text="other"),
    "no samples": lambda o: o.update(samples=[]),
    "a sum that is wrong": lambda o: o.update(output_tokens=5),
    "no token ids": lambda o: o.update(token_ids=None),
    "chunks below zero": lambda o: o.update(chunks=-1),
    "an error": lambda o: o.update(error="oops"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_an_outcome_that_contradicts_itself_is_not_sound(change):
    right = outcome(FinishedRow((sample(0), sample(1))))
    assert is_sound(right)
    change(right)
    assert not is_sound(right)


@pytest.mark.parametrize("name", ["text", "finish_reason", "token_ids", "logprobs", "samples"])
def test_an_error_row_with_something_of_an_answer_is_not_sound(name):
    wrong = outcome(failure("a", 0))
    assert is_sound(wrong)
    assert not is_sound(wrong | {name: "x"})
