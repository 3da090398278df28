"""Read JSON out of text, with one bound on its nesting. Knows nothing of who wrote it.

Python's own bound counts from wherever a program stands: one thread would read a text that another
cannot, and what reads it once more would answer another row. This one is the same for all, and
whatever walks through a value afterwards has room for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

# lists and objects inside each other; real ones have less than half as many
MOST_LEVELS = 128
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]+|\\.)*"?|[][{}]', re.DOTALL)


class NestedTooDeep(ValueError):  # noqa: N818 - it says what is wrong with a text
    """Lists or objects of a text are nested beyond `MOST_LEVELS`."""

    def __init__(self) -> None:
        super().__init__(f"it is nested over {MOST_LEVELS} levels deep")


def read_json_text(text: str, decode: Callable[[str], Any] = json.loads) -> Any:
    """Read one value. Raises ValueError, which is NestedTooDeep where it is nested too deep."""
    # hardly any text has enough brackets to be looked at closely
    if text.count("[") + text.count("{") > MOST_LEVELS and _is_too_deep(text):
        raise NestedTooDeep
    return decode(text)


def _is_too_deep(text: str) -> bool:
    """Look at brackets outside of strings, whether they belong together or not."""
    level = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        first = text[token.start()]
        level += (first in "[{") - (first in "]}")
        if level > MOST_LEVELS:
            return True
    return False
