"""Write the numbers to files: lines of metrics, and the status of one worker."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from jobrunner.console.machine import MachineLimits
from jobrunner.console.snapshot import Snapshot, metrics_line
from jobrunner.errors import InfrastructureError


class Metrics:
    """The file of metrics, one JSON object a line; an earlier run's lines stay.

    The first line of a run says under `machine` what the machine was measured to give, if it was.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first: dict[str, object] = {}
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._fault(error) from error

    def measured(self, limits: MachineLimits) -> None:
        """Let the next line tell of the machine too."""
        self._first = {"machine": asdict(limits)}

    def append(self, snapshot: Snapshot) -> None:
        """Add a line; it is in the file when this returns. Raises InfrastructureError."""
        line = {**metrics_line(snapshot), **self._first}
        self._first = {}
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._fault(error) from error

    def close(self) -> None:
        """Close the file. Raises InfrastructureError."""
        try:
            self._file.close()
        except OSError as error:  # what could not be written before fails here again
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> InfrastructureError:
        return InfrastructureError(
            f"cannot write metrics to `{self._path}`: {error.strerror}",
            hint="mend the disk or change `progress.metrics`, then run the same command again",
        )


class StatusFile:
    """What a worker last said of itself: one JSON object, always whole, replaced each time.

    `identity` are the fields that tell which worker it is. A loss of power may lose the file:
    it says nothing that a run needs.
    """

    def __init__(self, path: Path, identity: Mapping[str, object], interval_s: float) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._fixed = {**identity, "interval_s": interval_s}

    def write(self, snapshot: Snapshot, unix_s: float) -> None:
        """Replace the file by the numbers of this moment. Raises InfrastructureError."""
        status = {**self._fixed, "time": unix_s, **metrics_line(snapshot)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._temporary.write_text(json.dumps(status, allow_nan=False) + "\n", "utf-8")
            os.replace(self._temporary, self._path)
        except OSError as error:
            raise InfrastructureError(
                f"cannot write the status to `{self._path}`: {error.strerror}",
                hint="mend the disk, then run the same command again",
            ) from error
