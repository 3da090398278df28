"""Gather the n samples of a row until all are there. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass

from jobrunner.records import Completion, Partial, RowError, RowId


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished sample: how it ended, its text (None for an error), its prompt's if wanted."""

    completion: Completion
    text: str | None
    prompt_text: str | None = None


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A row with all its samples, in order; one that never became requests has one answer."""

    answers: tuple[Answer, ...]

    @property
    def id(self) -> RowId:
        return self.answers[0].completion.id

    @property
    def error(self) -> RowError | None:
        """Why the row has no answer: the error of the first sample that has one."""
        return next((a.completion.error for a in self.answers if a.completion.error), None)


class Gathering:
    """The finished samples of rows whose other samples still run."""

    def __init__(self) -> None:
        self._waiting: dict[RowId, dict[int, Answer]] = {}

    def add(self, answer: Answer) -> FinishedRow | None:
        """Take a finished sample; return its row if it is the last one of it."""
        row, request = answer.completion.id, answer.completion.request
        if request is None:
            self._waiting.pop(row, None)
            return FinishedRow((answer,))
        there = self._waiting.setdefault(row, {})
        there[request.sample] = answer
        if len(there) < request.samples:
            return None
        del self._waiting[row]
        return FinishedRow(tuple(there[sample] for sample in sorted(there)))

    def partials(self) -> list[Partial]:
        """The tokens of what waits here, as of rows in flight.

        Whoever goes on with them gets the whole text back without computing anything.
        """
        return [
            _partial(answer.completion)
            for answers in self._waiting.values()
            for answer in answers.values()
            if answer.completion.error is None and answer.completion.tokens
        ]


def _partial(completion: Completion) -> Partial:
    request = completion.request
    assert request is not None, "a row without requests does not wait for samples"
    return Partial(
        completion.id, completion.tokens, request.attempt, request.sample, completion.logprobs
    )
