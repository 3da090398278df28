"""Say in words of the user what is wrong with a run directory. Knows nothing of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jobrunner.data.layout import RunDirectory
from jobrunner.errors import ConfigError, InfrastructureError


def create(directory: RunDirectory) -> None:
    """Make a run directory, or raise ConfigError or InfrastructureError with what is in the way."""
    try:
        directory.create()
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"`output.path` cannot be a folder: `{error.filename}` is a file",
            hint="choose another output.path",
        ) from error
    except OSError as error:
        raise InfrastructureError(
            f"cannot make the run directory `{directory.root}`: {error.strerror}",
            hint="mend that or choose another output.path, then run the same command again",
        ) from error


@contextmanager
def telling_if_gone(directory: RunDirectory) -> Iterator[None]:
    """Say so where the run directory went while the job ran, whatever showed that first."""
    try:
        yield
    except (OSError, InfrastructureError) as error:
        if directory.job_file.exists():
            raise
        raise InfrastructureError(
            f"the run directory `{directory.root}` was removed or moved while the job ran",
            hint="put it back, then run the same command again: what was committed in it counts;"
            " without it the job begins anew",
        ) from error
