"""Decide who works on what. Claims save work and nothing more: results never depend on them.

A claim is a small file that names its holder, created atomically, its modification time the
holder's heartbeat. Times are compared with the file server's clock, never with this machine's; and
as any clock may be set anew, who takes a claim over has watched it for a while without a heartbeat.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from jobrunner.data.layout import is_gone, make_folder, sync
from jobrunner.errors import DeviceBusyError

# A claim whose holder cannot be looked at counts as abandoned after so many seconds without
# a heartbeat; the loop gives one every HEARTBEAT_S, and no step takes that long.
STALE_S = 120.0
HEARTBEAT_S = 10.0
# One that has an old heartbeat is watched for this share of that time before it is taken over,
# three heartbeats long: had a clock been set ahead, a holder that lives would have given another.
WATCHED_SHARE = 4
# A file of a worker that cannot be looked at is nobody's after so long: its machine may be off for
# good, or know nothing of what ran before it was switched on again.
ABANDONED_S = 3600.0
# set by whoever starts several workers that may use the same cores
TASK_VARIABLE = "CBJOB_TASK"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process this is, so that others can tell whether it still runs."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: int
    slurm_job: str
    slurm_restarts: int
    device: str
    token: str

    @property
    def worker(self) -> str:
        """A name for file names: readable, and unique over hosts, boots and containers."""
        host = "".join(c if c.isalnum() else "_" for c in self.host)[:40]
        place = hashlib.blake2b(f"{self.boot} {self.pid_namespace}".encode(), digest_size=4)
        return f"{host}-{place.hexdigest()}-{self.pid}-{self.token}"

    @staticmethod
    def of_this_process(device: str) -> Identity:
        """Read this process's identity; `token` tells two workers in one process apart."""
        return Identity(
            host=socket.gethostname(),
            boot=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            started=_start_ticks(os.getpid()) or 0,
            slurm_job=os.environ.get("SLURM_JOB_ID", ""),
            slurm_restarts=_count(os.environ.get("SLURM_RESTART_COUNT", "")),
            device=device,
            token=secrets.token_hex(4),
        )

    def knows_alive(self, other: Identity) -> bool | None:
        """Tell whether `other` runs, or None where this process cannot see that."""
        same_job = self.slurm_job and self.slurm_job == other.slurm_job
        if same_job and other.slurm_restarts < self.slurm_restarts:
            return False
        if self.host != other.host:
            return None
        if self.boot != other.boot:
            return False
        if self.pid_namespace != other.pid_namespace:
            return None
        return _start_ticks(other.pid) == other.started


class Claims:
    """The claims of one worker in one run directory."""

    def __init__(
        self,
        folder: Path,
        temporary: Path,
        identity: Identity,
        stale_s: float = STALE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._temporary = temporary
        self._identity = identity
        self._stale_s = stale_s
        self._clock = clock
        self._held: dict[str, Path] = {}
        # the last heartbeat seen of a claim of somebody else, and when it was first seen
        self._watched: dict[Path, tuple[float, float]] = {}

    def acquire(self, name: str, *, exclusive: bool = False) -> bool:
        """Claim `name`, or take it over from a holder that is gone; False where one is alive.

        `exclusive` is for devices: a holder seen to be alive keeps its claim however old its
        heartbeat, since loading a model can take long.
        """
        path = self._folder / f"{name}.json"
        make_folder(path.parent)
        fresh = self._write_identity()
        try:
            for _ in range(3):
                try:
                    os.link(fresh, path)
                except FileExistsError:
                    if self._is_mine(path):
                        # on NFS the answer to a link that succeeded can get lost
                        break
                    if not self._evict(path, now=fresh.stat().st_mtime, exclusive=exclusive):
                        return False
                else:
                    break
            else:
                return False
            self._held[name] = path
            self._watched.pop(path, None)
            return True
        finally:
            fresh.unlink(missing_ok=True)

    def heartbeat(self) -> None:
        """Show that this worker is alive; a claim that was taken over meanwhile is let go."""
        for name, path in list(self._held.items()):
            try:
                if self._is_mine(path):
                    # without times the file server sets its own clock's
                    os.utime(path)
                    continue
            except FileNotFoundError:
                # taken over between the look and the touch
                pass
            del self._held[name]

    def release(self, name: str) -> None:
        """Give a claim back. One that was taken over belongs to its new holder."""
        path = self._held.pop(name, None)
        if path is not None and self._is_mine(path):
            path.unlink(missing_ok=True)

    def release_all(self) -> None:
        """Give every claim back."""
        for name in list(self._held):
            self.release(name)

    def sweep(self) -> None:
        """Remove the claims of workers that are known to be dead."""
        for path in self._folder.rglob("*.json"):
            # a shard may be called x.json, and its claims lie in a folder of that name
            if path.is_file():
                self._evict(path, now=0.0, exclusive=True)

    def holder(self, name: str) -> Identity | None:
        """Who holds `name`, if anyone does."""
        return read_identity(self._folder / f"{name}.json")

    def others(self) -> list[Identity]:
        """The other workers that hold claims and are not known to be gone, in no order."""
        now = self._file_server_s()
        found = []
        for path in self._folder.rglob("*.json"):
            holder = read_identity(path) if path.is_file() else None
            if holder is None or holder == self._identity or holder in found:
                continue
            if not self._is_stale(path, holder, now, exclusive=True):
                found.append(holder)
        return found

    def abandoned(self, paths: Iterable[Path]) -> list[Path]:
        """Those of some files, named after the workers that wrote them, that are nobody's any more.

        A worker of this host, boot and container is looked at; what others wrote is left alone
        until nobody has touched it for ABANDONED_S: they may be writing at this moment.
        """
        found, unseen = [], []
        for path in paths:
            alive = self._runs_here(path.name.strip(".").partition(".")[0])
            if alive is None:
                unseen.append(path)
            elif not alive:
                found.append(path)
        if unseen:
            now = self._file_server_s()
            found += [path for path in unseen if _age_s(path, now) > ABANDONED_S]
        return found

    def _runs_here(self, worker: str) -> bool | None:
        """Tell by a worker's name whether it runs, or None where this process cannot see that."""
        place, _, rest = self._identity.worker.rpartition(f"-{self._identity.pid}-")
        where, pid = worker.rpartition("-")[0].rpartition("-")[::2]
        if not rest or where != place or not pid.isdigit():
            return None
        return _start_ticks(int(pid)) is not None

    def _file_server_s(self) -> float:
        """What the file server's clock says, in Unix seconds."""
        fresh = self._write_identity()
        try:
            return fresh.stat().st_mtime
        finally:
            fresh.unlink(missing_ok=True)

    def _evict(self, path: Path, now: float, exclusive: bool) -> bool:
        """Remove a claim whose holder is gone; False where it has to stay.

        A file that names nobody, as a loss of power leaves it, is a claim of nobody.
        """
        holder = read_identity(path)
        if holder is not None and not self._is_stale(path, holder, now, exclusive):
            return False
        aside = self._own_file()
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return True
        try:
            if read_identity(aside) == holder:
                return True
            # another worker took it over between the look and the rename: put theirs back
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            aside.unlink()
        return False

    def _is_stale(self, path: Path, holder: Identity, now: float, exclusive: bool) -> bool:
        alive = self._identity.knows_alive(holder)
        if alive is False:
            return True
        if alive and exclusive:
            return False
        try:
            heartbeat_s = path.stat().st_mtime
        except FileNotFoundError:
            return True
        old = now - heartbeat_s > self._stale_s
        if exclusive:
            # a device is asked for once, as a worker starts
            return old
        return self._silent_s(path, heartbeat_s) > self._stale_s / (WATCHED_SHARE if old else 1)

    def _silent_s(self, path: Path, heartbeat_s: float) -> float:
        """How long this worker has seen no other heartbeat of a claim."""
        now_s = self._clock()
        last_s, since_s = self._watched.get(path, (math.nan, now_s))
        if last_s != heartbeat_s:
            since_s = now_s
            self._watched[path] = heartbeat_s, since_s
        return now_s - since_s

    def _write_identity(self) -> Path:
        fresh = self._own_file()
        try:
            fresh.write_text(json.dumps(asdict(self._identity)))
            sync(fresh)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        return fresh

    def _own_file(self) -> Path:
        return self._temporary / f"{self._identity.worker}.{secrets.token_hex(4)}"

    def _is_mine(self, path: Path) -> bool:
        return read_identity(path) == self._identity


@contextmanager
def holding_device(claims: Claims, identity: Identity) -> Iterator[None]:
    """Hold the device for this job, or refuse: cron may start a job that still runs.

    Raises DeviceBusyError where another worker of the job has the device of this host.
    """
    name = _device_claim(identity)
    if not claims.acquire(name, exclusive=True):
        raise _busy(identity, claims.holder(name))
    try:
        yield
    finally:
        claims.release(name)


def refuse_busy_device(folder: Path, identity: Identity) -> None:
    """Refuse a device whose holder is seen to be alive, before anything is loaded.

    Only looks, and leaves what it cannot see to `holding_device`. Raises DeviceBusyError.
    """
    try:
        holder = read_identity(folder / f"{_device_claim(identity)}.json")
    except NotADirectoryError:
        # whoever makes the run directory says so
        return
    if holder is not None and identity.knows_alive(holder):
        raise _busy(identity, holder)


def _device_claim(identity: Identity) -> str:
    return f"devices/{identity.host}/{identity.device}"


def _busy(identity: Identity, holder: Identity | None) -> DeviceBusyError:
    pid = f" (process {holder.pid})" if holder else ""
    return DeviceBusyError(
        f"another worker of this job{pid} already runs on {identity.device} of {identity.host}",
        hint="let it finish; a worker on another device or machine may join in",
    )


def likely_device(device: str, driver: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The device that `model.device` comes to, as far as it can be told without torch."""
    if device == "auto":
        return "cuda" if driver.exists() else "cpu"
    return device


def device_name(device: str) -> str:
    """Name the device that this process uses: on a CPU the set of cores it may run on.

    Slurm gives each task devices of its own that may bear the same number everywhere, or cores
    without binding the task to them: there the name says which task it is, and so it does where
    `TASK_VARIABLE` is set.
    """
    task = _slurm_task(os.environ)
    if named := os.environ.get(TASK_VARIABLE):
        task += f"-{named}"
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        digest = hashlib.blake2b(repr(cores).encode(), digest_size=4).hexdigest()
        return f"cpu-{len(cores)}-cores-{digest}{task}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return f"{device}-{visible}{task}"


def _slurm_task(environ: Mapping[str, str]) -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
    numbers = [environ.get(name, "") for name in names]
    if not numbers[0].isdigit():
        return ""
    return "-slurm-" + "-".join(number for number in numbers if number.isdigit())


def read_identity(path: Path) -> Identity | None:
    """Who a claim names; None where there is no claim, or none that can be read."""
    try:
        return Identity(**json.loads(path.read_text()))
    except OSError as error:
        if is_gone(error):
            return None
        raise
    except (ValueError, TypeError):
        return None


def _age_s(path: Path, now_s: float) -> float:
    """How long nobody has touched a file; for ever where it is gone."""
    try:
        return now_s - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where none runs (field 22, proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    # a killed process that nobody has waited for yet runs no more
    return None if state in "ZX" else int(fields[18])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
