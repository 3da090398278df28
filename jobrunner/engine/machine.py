"""Measure how fast this machine multiplies and reads. Knows nothing of models or sequences."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from jobrunner.engine.devices import DTYPES

# beyond what caches hold, small enough to be measured in a fraction of a second
_GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
_READ_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
_BUDGET_S = 0.1
_MOST_TRIES = 10


@dataclass(frozen=True, slots=True)
class Rates:
    """The best rates seen: of a large matrix product, and of reading memory once through."""

    gemm_flops_per_s: float
    read_bytes_per_s: float


def measure_rates(device: str, dtype: str) -> Rates:
    """Measure both rates on `device`, "cpu" or "cuda", the product in `dtype`, "bfloat16" or so.

    Takes some tenths of a second and up to about 600 MB of the device's memory, given back.
    """
    kind = torch.device(device).type
    rates = Rates(
        gemm_flops_per_s=_gemm_rate(_GEMM_SIZE[kind], device, DTYPES[dtype]),
        read_bytes_per_s=_read_rate(_READ_BYTES[kind], device),
    )
    if kind == "cuda":
        torch.cuda.empty_cache()
    return rates


def _gemm_rate(size: int, device: str, dtype: torch.dtype) -> float:
    a_NN = torch.ones(size, size, device=device, dtype=dtype)
    b_NN = torch.ones(size, size, device=device, dtype=dtype)
    out_NN = torch.empty_like(a_NN)
    seconds = _best_s(lambda: torch.mm(a_NN, b_NN, out=out_NN), device)
    return 2.0 * size**3 / seconds


def _read_rate(count: int, device: str) -> float:
    # a sum reads all and writes nothing; its own arithmetic hides behind the memory
    numbers_N = torch.ones(count // 4, device=device, dtype=torch.float32)
    return count / _best_s(numbers_N.sum, device)


def _best_s(work: Callable[[], object], device: str) -> float:
    """The shortest of several runs after one to warm up: what disturbs only makes it longer."""
    _timed_s(work, device)
    best_s = spent_s = _timed_s(work, device)
    for _ in range(_MOST_TRIES - 1):
        if spent_s > _BUDGET_S:
            break
        took_s = _timed_s(work, device)
        spent_s += took_s
        best_s = min(best_s, took_s)
    return best_s


def _timed_s(work: Callable[[], object], device: str) -> float:
    started_s = time.perf_counter()
    work()
    if torch.device(device).type == "cuda":
        # a launch returns before the work is done
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def device_memory_bytes(device: str) -> int | None:
    """The memory of a GPU that this process holds now; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    return int(torch.cuda.memory_reserved(device))
