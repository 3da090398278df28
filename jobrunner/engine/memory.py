"""How much memory KV may take, on the device and the host. Knows nothing of models or tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobrunner.errors import ModelError

# bytes, or a share of the memory of the device
KvMemory = int | float | Literal["auto"]

# left free beside all that is counted: allocators cut memory into pieces that do not all fit
HEADROOM_BYTES = 256 << 20

_ROOT = Path("/")


def kv_block_count(
    kv_memory: int | Literal["auto"],
    *,
    bytes_per_token: int,
    block_size: int,
    wanted_tokens: int,
    spare_bytes: int,
    free_bytes: int,
) -> int:
    """Return how many blocks the pool gets.

    `auto` takes what `wanted_tokens` need, at most `spare_bytes`; a size in bytes is taken as
    it is. Raises ModelError where not even one block fits, or more is asked for than is free.
    """
    block_bytes = bytes_per_token * block_size
    if kv_memory == "auto":
        wanted = -(-wanted_tokens // block_size)
        count = min(wanted, spare_bytes // block_bytes)
        given = spare_bytes
    else:
        count = kv_memory // block_bytes
        given = kv_memory
        if kv_memory > free_bytes:
            raise ModelError(
                f"batching.kv_memory is {kv_memory:,} bytes, free are {free_bytes:,}",
                hint='lower it, or leave it at "auto"',
            )
    if count < 1:
        raise ModelError(
            f"KV memory of {given:,} bytes holds no block of {block_size} tokens "
            f"({block_bytes:,} bytes)",
            hint="raise batching.kv_memory, or lower batching.block_size",
        )
    return count


@dataclass(frozen=True, slots=True)
class Needs:
    """What holds a device's memory beside KV, in bytes; `said` tells how it is known.

    `others` are other processes, and what the driver keeps for this one; `step` is the largest
    step beside weights and KV, `graphs` all recorded steps.
    """

    total: int
    others: int
    weights: int
    step: int
    graphs: int
    said: str
    measured: bool = False

    def left(self, share: float) -> int:
        """Bytes for KV if no more than a share of all is taken: less than nothing if too few."""
        taken = self.others + self.weights + self.step + self.graphs + HEADROOM_BYTES
        return int(self.total * share) - taken

    def figures(self, share: float) -> str:
        """All of them, for a person."""
        parts = (
            ("others", self.others),
            ("weights", self.weights),
            ("the largest step", self.step),
            ("recorded steps", self.graphs),
            ("headroom", HEADROOM_BYTES),
        )
        return (
            f"{share:.0%} of {_mib(self.total)} - "
            + " - ".join(f"{name} {_mib(size)}" for name, size in parts)
            + f" = {_mib(self.left(share))}, {self.said}"
        )

    def check(self, share: float, wanted_bytes: int) -> None:
        """Raise ModelError where so many bytes are not left."""
        if wanted_bytes > self.left(share):
            raise ModelError(
                f"KV memory of {wanted_bytes:,} bytes has no room: {self.figures(share)}",
                hint="lower batching.token_budget or max_batch_size, set another"
                " batching.kv_memory, or let nobody else use the device",
            )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def swap_block_count(
    swap_memory: int | Literal["auto"],
    *,
    block_bytes: int,
    kv_blocks: int,
    spare_bytes: int,
    free_bytes: int,
) -> int:
    """Return how many blocks of host memory take what is swapped out.

    `auto` takes as many as the pool has, at most `spare_bytes`; a size in bytes is taken as it
    is, too little for a block means none. Raises ModelError where more is asked for than is free.
    """
    if swap_memory == "auto":
        return min(kv_blocks, spare_bytes // block_bytes)
    if swap_memory > free_bytes:
        raise ModelError(
            f"batching.swap_memory is {swap_memory:,} bytes, free are {free_bytes:,}",
            hint='lower it, or leave it at "auto"',
        )
    return swap_memory // block_bytes


def check_fits(weight_bytes: int, block_bytes: int, free_bytes: int) -> None:
    """Raise ModelError where the weights and one block of KV are more than the free memory."""
    needed = weight_bytes + block_bytes
    if needed > free_bytes:
        raise ModelError(
            f"the model needs {needed:,} bytes of memory ({weight_bytes:,} of weights, "
            f"{block_bytes:,} for one block of KV), free are {free_bytes:,}",
            hint="free some, use a machine with more, a smaller model or a narrower model.dtype",
        )


def available_memory(root: Path = _ROOT) -> int:
    """Bytes of host memory this process may still take, limits of its control groups included.

    Page cache counts as available, because the kernel gives it back.
    """
    available = _fields(root / "proc/meminfo")["MemAvailable:"] * 1024
    for group in _control_groups(root):
        available = min(available, _left_in_group(group, available))
    return max(0, available)


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of host memory that this process may use if nothing else does; see above."""
    total = _fields(root / "proc/meminfo")["MemTotal:"] * 1024
    for group in _control_groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = group / name
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                total = min(total, int(text))
    return total


def _control_groups(root: Path) -> list[Path]:
    """The folders of the control groups whose memory limits hold here, both versions."""
    listing = root / "proc/self/cgroup"
    if not listing.exists():
        return []
    folders: list[Path] = []
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mount = root / "sys/fs/cgroup" / controllers
            group = mount / path.lstrip("/")
            # a limit higher up holds as well; inside a container only the mount may be visible
            folders += [group, *(up for up in group.parents if up.is_relative_to(mount))]
    return [folder for folder in folders if folder.is_dir()]


def _left_in_group(group: Path, unlimited: int) -> int:
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = group / limit_name, group / usage_name
        if limit.exists() and usage.exists():
            text = limit.read_text().strip()
            if text == "max":
                return unlimited
            cache = _fields(group / "memory.stat").get("inactive_file", 0)
            return int(text) - int(usage.read_text()) + cache
    return unlimited


def _fields(path: Path) -> dict[str, int]:
    if not path.exists():
        return {}
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) >= 2}
