"""The exception tree, exit codes and hints. An error row is a record, not an exception."""

from __future__ import annotations

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """What `cbjob` tells its caller."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    ROW_ERRORS = 3
    TOO_MANY_ERRORS = 4
    INFRASTRUCTURE = 74
    RUN_AGAIN = 75
    INTERRUPTED = 130


class JobError(Exception):
    """Something that ends the job: what and where in `str()`, the fix in `hint`."""

    exit_code = ExitCode.UNEXPECTED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(JobError):
    """The job file, an option or the input cannot be used as it is."""

    exit_code = ExitCode.USAGE


class MismatchError(JobError):
    """The run directory belongs to a job that differs from this one."""

    exit_code = ExitCode.USAGE


class ModelError(JobError):
    """The model cannot run here."""

    exit_code = ExitCode.USAGE


class InfrastructureError(JobError):
    """A disk, a file or a device failed: mend it and run again."""

    exit_code = ExitCode.INFRASTRUCTURE


class HostMemoryError(InfrastructureError):
    """This machine has no memory for something; it may have once others need less."""


class HungError(InfrastructureError):
    """A device does not come to an end: this process must end without waiting for it."""


class TooManyErrorsError(JobError):
    """More rows are errors than `errors.max_rate` or `errors.max_count` allow."""

    exit_code = ExitCode.TOO_MANY_ERRORS


class DeviceBusyError(JobError):
    """Another worker of this job holds the device."""

    exit_code = ExitCode.RUN_AGAIN


def lacks_host_memory(error: BaseException) -> bool:
    """Whether an error is this machine's lack of memory, whoever asked for it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        # torch has no type of its own for it
        return "can't allocate memory" in str(error)
    return isinstance(error, MemoryError | HostMemoryError)
