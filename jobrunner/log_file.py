"""Keep the log of a job in a file. Knows nothing of jobs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobrunner.console.printable import printable_lines

log = logging.getLogger("cbjob")


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Write what is logged meanwhile to the end of this file, too."""
    handler = _LogFile(path)
    handler.setFormatter(_Printable("%(asctime)s %(process)d %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


class _Printable(logging.Formatter):
    """Lets names and texts from outside write no control characters, and no lines of their own."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


class _LogFile(logging.FileHandler):
    """Fails as any other file does: logging would print a traceback and go on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        raise
