"""Let Ray place the workers of a job on its machines and start them again. Runs no rows.

Needs the extra `ray`. A worker is an actor with a GPU, or with cores, of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jobrunner.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ended:
    """How a worker ended: an exit code, and why if that is a failure."""

    code: int
    message: str = ""
    hint: str = ""


class Worker(Protocol):
    """What becomes an actor. `stop` is called while `work` runs."""

    def work(self, retry_errors: bool) -> Ended:
        """Share the job until nothing is left."""

    def stop(self, reason: str) -> None:
        """Ask `work` to save and return."""


@dataclass(frozen=True, slots=True)
class Share:
    """What each of `count` workers gets."""

    count: int
    gpus: int
    cores: int


def connect() -> None:
    """Join the Ray cluster that this machine belongs to. Raises ConfigError without one."""
    ray = _import_ray()
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster was found: {error}",
            hint="`ray start --head` on one machine and `ray start --address=...` on the others",
        ) from error


def find_share(*, gpu: bool | None, count: int | None, cores: int | None) -> Share:
    """What the cluster has for the workers of a job: by default one for each GPU or machine.

    `gpu` None takes GPUs where there are some. `cores` are those of a worker on a CPU, by default
    as many as the smallest machine has. Raises ConfigError where more is asked for than is there.
    """
    nodes = [n["Resources"] for n in _import_ray().nodes() if n["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if gpu or (gpu is None and gpus):
        return _shared("GPUs", gpus, count, Share(0, gpus=1, cores=0))
    per_node = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    of_one = cores or min(per_node, default=1)
    return _shared(
        f"times {of_one} cores", sum(n // of_one for n in per_node), count, Share(0, 0, of_one)
    )


def _shared(what: str, room: int, count: int | None, share: Share) -> Share:
    if (count or 1) > room:
        raise ConfigError(
            f"`workers.count` is {count or 1}, but the Ray cluster has {room} {what}",
            hint='leave it out, or set it to "auto": as many workers as there is room for',
        )
    return Share(count or room, share.gpus, share.cores)


class RayCrew:
    """The workers of one job as actors, which Ray starts again wherever there is room."""

    def __init__(self, worker: type[Worker], arguments: Sequence[Any], share: Share) -> None:
        self._ray = _import_ray()
        # a second thread, to be told to stop while it works
        actor = self._ray.remote(
            num_gpus=share.gpus,
            num_cpus=share.cores,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=2,
        )(worker)
        self._actors = [actor.remote(number, *arguments) for number in range(share.count)]
        self._working: dict[Any, int] = {}

    def start(self, *, retry_errors: bool) -> None:
        """Let all of them work, or with `retry_errors` the first, which makes rows run again."""
        for number, actor in enumerate(self._actors[: 1 if retry_errors else None]):
            self._working[actor.work.remote(retry_errors)] = number

    @property
    def working(self) -> int:
        return len(self._working)

    def wait(self, timeout_s: float) -> list[Ended]:
        """Those that have ended since the last call; waits for the first for so long."""
        if not self._working:
            return []
        done, _ = self._ray.wait(list(self._working), num_returns=1, timeout=timeout_s)
        for task in done:
            del self._working[task]
        return [self._ray.get(task) for task in done]

    def stop(self, reason: str) -> None:
        """Ask all that work to save and return; one that is nowhere cannot hear it."""
        for number in self._working.values():
            self._actors[number].stop.remote(reason)

    def kill(self) -> None:
        """End what still runs, at once."""
        for actor in self._actors:
            self._ray.kill(actor)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            '`workers.engine` is "ray", but ray is not installed',
            hint="pip install 'jobrunner[ray]' on every machine",
        ) from error
    return ray
