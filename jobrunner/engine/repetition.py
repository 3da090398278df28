"""Notice a text that runs in circles. Knows nothing of what its tokens mean."""

from __future__ import annotations

import numpy as np

LONGEST_PERIOD = 64
REPEATS = 3


class Repetition:
    """Watches for the last `length` tokens to be one block, repeated.

    They are where, for a period p of at most `length // 3` and 64, every one of them but the
    first p equals the token p before it: the block stands there at least three times, and the
    last one may be cut. No period fits a `length` under 3, so such a text never repeats itself.
    The cost of a token doesn't depend on `length`.
    """

    def __init__(self, length: int) -> None:
        periods = min(LONGEST_PERIOD, length // REPEATS)
        # the token p before the next one is at p - 1; no token is negative
        self._recent = np.full(periods, -1, dtype=np.int64)
        # how many of the last tokens, without a gap, equal the token p before them
        self._runs = np.zeros(periods, dtype=np.int64)
        self._needed = length - np.arange(1, periods + 1)

    def after(self, token: int) -> bool:
        """Show the next token; return whether the text repeats itself now."""
        self._runs += 1
        self._runs *= self._recent == token
        self._recent[1:] = self._recent[:-1]
        self._recent[:1] = token
        return bool((self._runs >= self._needed).any())
