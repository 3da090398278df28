"""Find the devices that one machine gives to the workers of a job. Imports nothing that is slow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from jobrunner.config import WorkersTable
from jobrunner.errors import ConfigError

_GPU_FILE = re.compile(r"nvidia(\d+)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker runs: on a GPU, by an environment that shows no other, or on some cores."""

    name: str
    cores: frozenset[int] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def find_places(
    workers: WorkersTable,
    device: Literal["auto", "cpu", "cuda"],
    gpus: Sequence[str],
    cores: frozenset[int],
) -> list[Place]:
    """Choose where the workers of a job run; one place means that no other process is needed.

    `gpus` and `cores` are what this process may use. By default there is a worker for each GPU,
    or one for all cores. Raises ConfigError where more is asked for than is there.
    """
    if device != "cpu" and (gpus or device == "cuda"):
        return _on_gpus(workers, gpus)
    return _on_cores(workers, cores)


def visible_gpus(
    environment: Mapping[str, str] | None = None, devices: Path = Path("/dev")
) -> list[str]:
    """The GPUs that CUDA would show, as `CUDA_VISIBLE_DEVICES` names them. Loads no driver."""
    environment = os.environ if environment is None else environment
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        found = sum(_GPU_FILE.fullmatch(path.name) is not None for path in devices.iterdir())
        return [str(number) for number in range(found)]
    gpus: list[str] = []
    for name in named.split(","):
        # CUDA takes the list up to the first name that is none
        if name.strip() in ("", "-1"):
            break
        gpus.append(name.strip())
    return gpus


def _on_gpus(workers: WorkersTable, gpus: Sequence[str]) -> list[Place]:
    chosen = list(workers.devices) or list(gpus)
    count = len(chosen) if workers.count == "auto" else workers.count
    if absent := [name for name in chosen if gpus and name not in gpus]:
        raise ConfigError(
            f"`workers.devices` names GPU {absent[0]}; there are {', '.join(gpus)}",
            hint="take the names that `CUDA_VISIBLE_DEVICES` has, or count from 0",
        )
    if count > len(chosen) and count > 1:
        raise ConfigError(
            f"`workers.count` is {count}, but there are {len(chosen)} GPUs",
            hint='leave it out, or set it to "auto": a worker for each GPU',
        )
    names = chosen[:count]
    return [Place(f"gpu {name}", environment={"CUDA_VISIBLE_DEVICES": name}) for name in names]


def _on_cores(workers: WorkersTable, cores: frozenset[int]) -> list[Place]:
    if workers.devices:
        sets = [_read_cores(text) for text in workers.devices]
    else:
        count = 1 if workers.count == "auto" else workers.count
        if count > len(cores):
            raise ConfigError(
                f"`workers.count` is {count}, but there are {len(cores)} cores",
                hint="every worker needs a core of its own",
            )
        sets = _split(sorted(cores), count)
    for chosen in sets:
        if absent := sorted(chosen - cores):
            raise ConfigError(
                f"`workers.devices` names core {absent[0]}, which this process may not use",
                hint=f"it may use {_spell(cores)}",
            )
    if len(sets) > 1 and sum(map(len, sets)) > len(frozenset().union(*sets)):
        raise ConfigError(
            "`workers.devices` gives a core to two workers",
            hint='sets of cores are spelled like "0-3" and must not overlap',
        )
    return [Place(f"cores {_spell(chosen)}", cores=chosen) for chosen in sets]


def _split(cores: Sequence[int], count: int) -> list[frozenset[int]]:
    """Neighbours stay together: they share caches."""
    bounds = [len(cores) * number // count for number in range(count + 1)]
    return [frozenset(cores[start:stop]) for start, stop in pairwise(bounds)]


def _read_cores(text: str) -> frozenset[int]:
    """Read "0-3,8" as taskset does."""
    found: set[int] = set()
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", piece)
        if match is None:
            raise ConfigError(
                f"`workers.devices` has `{text}`, which is no set of cores",
                hint='on a CPU a device is a set of cores, like "0-3" or "0,2"',
            )
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def _spell(cores: frozenset[int]) -> str:
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)
