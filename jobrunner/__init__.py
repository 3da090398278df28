"""cbjob: offline batch inference over Parquet with its own continuous-batching loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobrunner.job import run

__all__ = ["run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # imported on first use: `cbjob --help` must not load what a run needs
    if name == "run":
        from jobrunner.job import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
