"""cbjob: offline batch inference with its own continuous-batching loop.

`load_settings` reads a job file, `run` runs it and returns how it ended: what `cbjob run` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobrunner.job import run
    from jobrunner.jobfile import load_settings

__all__ = ["load_settings", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # imported on first use: `cbjob --help` must not load what a run needs
    if name == "run":
        from jobrunner.job import run

        return run
    if name == "load_settings":
        from jobrunner.jobfile import load_settings

        return load_settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
