"""Tell who works in a run directory and whether they are still there. Only looks, never writes.

So the age of a heartbeat is by this machine's clock, which may differ from the file server's: a
worker that this process can see is judged by its process instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobrunner.data.claims import STALE_S, Identity, read_identity
from jobrunner.data.layout import RunDirectory, files_in, is_gone

Liveness = Literal["alive", "stale", "gone"]
# a word that is older than so many of its intervals is no news any more
STALE_INTERVALS = 3


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker and what it last said of itself.

    "stale" is a worker elsewhere without a sign of life, "gone" one that is known to be dead or
    has left. `numbers` are the fields of its status file, empty where it has said nothing yet,
    and `silent_s` the seconds since then; `fresh` tells whether they are still news.
    """

    name: str
    host: str
    pid: int
    device: str
    liveness: Liveness
    silent_s: float | None = None
    fresh: bool = False
    numbers: Mapping[str, Any] = field(default_factory=dict)


def find_workers(run: RunDirectory, here: Identity, now_s: float | None = None) -> list[Worker]:
    """Find the workers that claim a device or something else, or have left a word, by name.

    `here` is who asks, `now_s` Unix seconds, by default this moment.
    """
    now_s = time.time() if now_s is None else now_s
    holders: dict[str, Identity] = {}
    heartbeats_s: dict[str, float] = {}
    for holder, heartbeat_s in _holders(run.claims):
        holders[holder.worker] = holder
        heartbeats_s[holder.worker] = max(heartbeat_s, heartbeats_s.get(holder.worker, 0.0))
    words = dict(_words(run.status))
    found = []
    for name in sorted({*holders, *words}):
        holder_or_none = holders.get(name)
        word = words.get(name, {})
        silent_s = max(0.0, now_s - word["time"]) if word else None
        fresh = silent_s is not None and silent_s <= STALE_INTERVALS * word["interval_s"]
        heartbeat_age_s = now_s - heartbeats_s.get(name, 0.0)
        found.append(
            Worker(
                name=name,
                host=holder_or_none.host if holder_or_none else word["host"],
                pid=holder_or_none.pid if holder_or_none else word["pid"],
                device=holder_or_none.device if holder_or_none else "",
                liveness=_liveness(here, holder_or_none, heartbeat_age_s, fresh=fresh),
                silent_s=silent_s,
                fresh=fresh,
                numbers=word,
            )
        )
    return found


def _liveness(
    here: Identity, holder: Identity | None, heartbeat_age_s: float, *, fresh: bool
) -> Liveness:
    if holder is None:
        # whoever holds nothing has left
        return "gone"
    alive = here.knows_alive(holder)
    if alive is None:
        return "alive" if fresh or heartbeat_age_s <= STALE_S else "stale"
    return "alive" if alive else "gone"


def _holders(claims: Path) -> Iterator[tuple[Identity, float]]:
    """Who holds a claim, with the Unix seconds of its heartbeat."""
    for path in sorted(claims.rglob("*.json")):
        try:
            # a shard may be called x.json, and its claims lie in a folder of that name
            holder = read_identity(path) if path.is_file() else None
            if holder is not None:
                yield holder, path.stat().st_mtime
        except OSError as error:
            if not is_gone(error):
                raise


def _words(status: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each worker last said, by its name; a file that is no whole word is none."""
    for path in files_in(status):
        if path.suffix != ".json":
            # one that is being written
            continue
        try:
            word = json.loads(path.read_text())
            numbers = [word["time"], word["interval_s"], word["pid"]]
            if all(isinstance(number, int | float) for number in numbers):
                yield str(word["worker"]), word
        except (ValueError, KeyError, TypeError):
            # as a loss of power leaves it
            continue
        except OSError as error:
            if not is_gone(error):
                raise
