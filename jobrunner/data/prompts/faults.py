"""What is wrong with one row, raised while its request is made. Knows nothing of tokens."""

from __future__ import annotations

from jobrunner.records import ErrorKind, RowError, RowId


def reason(error: BaseException) -> str:
    """What an error says, or its type where it says nothing."""
    return str(error) or type(error).__name__


class RowFault(Exception):  # noqa: N818 - of a row, not of the program
    """A row cannot become a request. `words` go on after "row 7 of `a.parquet` "."""

    def __init__(self, kind: ErrorKind, words: str, *, prompt_tokens: int = 0) -> None:
        super().__init__(words)
        self.kind = kind
        self.words = words
        self.prompt_tokens = prompt_tokens

    def error(self, row: RowId) -> RowError:
        """The same as a record, in words that any file can hold."""
        # words may quote the row, and JSON can spell half of a surrogate pair
        words = self.words.encode(errors="backslashreplace").decode()
        return RowError(self.kind, f"{row} {words}")


def shown(value: object, most_characters: int = 60) -> str:
    """Show a value in a message, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, OverflowError):
        # a date of Arrow's that Python has not
        text = f"a {type(value).__name__}"
    return text if len(text) <= most_characters else text[:most_characters] + "..."
