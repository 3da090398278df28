"""Remember what a run was begun with, and refuse to go on with anything else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from jobrunner.data.json_text import read_json_text
from jobrunner.data.layout import RunDirectory, sync
from jobrunner.errors import InfrastructureError, MismatchError

ABSENT = "absent"


def remember(run: RunDirectory, fingerprint: Mapping[str, Any]) -> None:
    """Record the fingerprint of a new run, or compare it with the one recorded.

    Keys are what a person would call the thing, values plain JSON. Raises MismatchError that
    names every difference with both values; nothing is written then.
    """
    now = json.loads(json.dumps(fingerprint))
    recorded = read_fingerprint(run)
    if recorded is None:
        if any(path.is_file() for path in run.results.rglob("*")):
            raise MismatchError(
                f"`{run.root}` has results, but no record of the job that made them",
                hint="give this job another output.path, or remove that folder",
            )
        _write_first(run, now)
        recorded = read_fingerprint(run) or {}
    # whoever wrote it may have died before it was on the disk, where parts come to be
    sync(run.state)
    differences = [
        f"  {key}: {show(recorded.get(key, ABSENT))} then, {show(now.get(key, ABSENT))} now"
        for key in sorted({*recorded, *now})
        if not same(recorded.get(key, ABSENT), now.get(key, ABSENT))
    ]
    if differences:
        raise MismatchError(
            f"`{run.root}` was begun with another job; it differs in\n" + "\n".join(differences),
            hint="put back what changed, give this job another output.path, or remove that folder",
        )


def read_fingerprint(run: RunDirectory) -> dict[str, Any] | None:
    """What the run was begun with; None where no run was begun."""
    try:
        recorded: Any = read_json_text(run.job_file.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(run, str(error)) from error
    if not isinstance(recorded, dict):
        raise _damaged(run, "it is no JSON object")
    return recorded


def _damaged(run: RunDirectory, why: str) -> InfrastructureError:
    return InfrastructureError(
        f"`{run.job_file}` is damaged: {why}", hint="restore it or use another output.path"
    )


def _write_first(run: RunDirectory, fingerprint: Mapping[str, Any]) -> None:
    """Write the file unless another worker is first."""
    fresh = run.temporary / f"{run.worker}.job"
    try:
        fresh.write_text(json.dumps(fingerprint, indent=1, sort_keys=True))
        sync(fresh)
        os.link(fresh, run.job_file)
    except FileExistsError:
        return
    finally:
        fresh.unlink(missing_ok=True)


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are the same in JSON: 1, 1.0 and true are three."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def show(value: Any) -> str:
    """Spell a recorded value for a person."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(item)}" for key, item in sorted(value.items()))
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
