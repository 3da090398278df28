"""Choose who attends, and the KV pool that goes with it. Knows nothing of models or steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch

from jobrunner.engine.attention import torch_kernels
from jobrunner.engine.attention.device_paged import DevicePagedAttention
from jobrunner.engine.attention.hook import Attention
from jobrunner.engine.attention.torch_paged import TorchPagedAttention
from jobrunner.engine.attention.triton_tiles import MOST_WIDTH
from jobrunner.engine.block_pool import BlockPool
from jobrunner.engine.kv import AttentionCall, KvPool
from jobrunner.errors import ModelError

log = logging.getLogger("cbjob")

Wanted = Literal["auto", "kernels", "torch", "reference"]


@dataclass(frozen=True, slots=True)
class Backend:
    """Who attends. `make_pool` takes what KvPool takes."""

    make_pool: Callable[..., KvPool]
    make_attention: Callable[[KvPool, torch.device], Attention]


PLAIN = Backend(KvPool, TorchPagedAttention)
BY_BLOCK = Backend(BlockPool, TorchPagedAttention)
# all that surrounds the kernels of a GPU, and in their place what they mean
REFERENCE = Backend(BlockPool, partial(DevicePagedAttention, torch_kernels))


def choose_backend(
    wanted: Wanted, device: torch.device, dtype: torch.dtype, calls: Sequence[AttentionCall]
) -> Backend:
    """Return who attends to these calls: the kernels compiled for the device, else plain torch.

    `reference` is all that surrounds the kernels of a GPU, on any device, without them.
    Logs which, and why not the kernels; those of a CPU are compiled, and logged, for the first pool
    of their kind. Raises ModelError where kernels
    are asked for and cannot be had.
    """
    if wanted == "reference":
        log.info("attention by the reference of the kernels: as model.attention asks")
        return REFERENCE
    reason = "as model.attention asks"
    if wanted != "torch":
        found = why_no_kernels(device, dtype, calls)
        if found is None:
            return _numba() if device.type == "cpu" else _triton_said()
        reason = found
    if wanted == "kernels":
        raise ModelError(
            f'model.attention is "kernels", but {reason}', hint='set model.attention = "auto"'
        )
    log.info("attention by torch: %s", reason)
    return PLAIN if device.type == "cpu" else BY_BLOCK


def why_no_kernels(
    device: torch.device, dtype: torch.dtype, calls: Sequence[AttentionCall]
) -> str | None:
    """Say why the kernels of this device cannot serve these calls, None where they can."""
    if device.type == "cpu":
        return _why_no_numba(dtype)
    return why_no_triton(device, calls)


def _why_no_numba(dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16):
        return f"there are no kernels for {str(dtype).removeprefix('torch.')}"
    try:
        import numba  # noqa: F401
    except ImportError as error:
        # newest versions of Python come before the numba that knows them
        return f"numba cannot be imported: {error}"
    return None


def _numba() -> Backend:
    from jobrunner.engine.attention.numba_paged import NumbaPagedAttention

    return Backend(KvPool, NumbaPagedAttention)


def why_no_triton(device: torch.device, calls: Sequence[AttentionCall]) -> str | None:
    """Say why the Triton kernels cannot serve these calls here, None where they can."""
    if find_spec("triton") is None:
        return "the package triton is missing"
    if device.type == "cpu" and not _interprets():
        return "Triton kernels run on a CPU only where TRITON_INTERPRET=1 is set"
    widest = max(max(call.key_width, call.value_width) for call in calls)
    if widest > MOST_WIDTH:
        return f"a head of the model is {widest} wide, the kernels serve {MOST_WIDTH}"
    return None


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def triton_backend() -> Backend:
    """Attend by Triton kernels, which also copy blocks."""
    # triton reads at import whether it interprets, and is no small thing to import
    from jobrunner.engine.attention import triton_launch as kernels

    pool = partial(BlockPool, gather=kernels.gather_blocks, scatter=kernels.scatter_blocks)
    return Backend(pool, partial(DevicePagedAttention, kernels))


def _triton_said() -> Backend:
    import triton

    log.info("attention by compiled kernels (triton %s)", triton.__version__)
    return triton_backend()
