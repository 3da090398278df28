"""Decide after each token whether a text ends. Knows nothing of models or scheduling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jobrunner.records import FinishReason, Sampling, TextStream

OpenText = Callable[[], TextStream]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a text ended, and the stop string that did it, if one did."""

    reason: FinishReason
    stop_string: str | None = None


class Stopping:
    """Watches the output of one sequence; the prompt is never shown to it.

    Only as much text is kept as a stop string could still begin in.
    """

    def __init__(self, sampling: Sampling, open_text: OpenText) -> None:
        self._sampling = sampling
        self._stream = open_text() if sampling.stop else None
        self._keep = max(map(len, sampling.stop), default=1) - 1
        self._tail = ""
        self._count = 0

    def replay(self, tokens: Iterable[int]) -> tuple[int, Ending | None]:
        """Show the output of an earlier run; return how many tokens count and how it ended."""
        if self._sampling.max_new_tokens < 1:
            return 0, Ending("length")
        for token in tokens:
            ending = self.after(token)
            if ending is not None:
                return self._count, ending
        return self._count, None

    def after(self, token: int) -> Ending | None:
        """Show the next output token; return the ending if the text ends with it."""
        self._count += 1
        if token in self._sampling.stop_ids:
            return Ending("stop")
        stop = self._stop_string(token)
        if stop is not None:
            return Ending("stop", stop)
        if self._count >= self._sampling.max_new_tokens:
            return Ending("length")
        return None

    def _stop_string(self, token: int) -> str | None:
        if self._stream is None:
            return None
        text = self._tail + self._stream.step(token)
        found = [(text.find(stop), stop) for stop in self._sampling.stop if stop in text]
        if found:
            return min(found)[1]
        self._tail = text[-self._keep :] if self._keep else ""
        return None
