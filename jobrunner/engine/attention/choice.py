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

AttentionName = Literal["auto", "torch", "triton", "reference"]


@dataclass(frozen=True, slots=True)
class Backend:
    """Who attends. `make_pool` takes what KvPool takes."""

    make_pool: Callable[..., KvPool]
    make_attention: Callable[[KvPool, torch.device], Attention]


PLAIN = Backend(KvPool, TorchPagedAttention)
BY_BLOCK = Backend(BlockPool, TorchPagedAttention)
# all that surrounds the kernels, and in their place what they mean
REFERENCE = Backend(BlockPool, partial(DevicePagedAttention, torch_kernels))


def choose_backend(
    name: AttentionName, device: torch.device, calls: Sequence[AttentionCall]
) -> Backend:
    """Return who attends on this device to these calls; log what was chosen on a GPU and why.

    `torch` is plain torch over the memory layout of a GPU, also on a CPU; `reference` all that
    surrounds the kernels, without them. `auto` takes the kernels on a GPU, and on a CPU plain
    torch over a layout that suits it better.
    Raises ModelError where the kernels are asked for and cannot be had.
    """
    if name == "torch":
        return BY_BLOCK
    if name == "reference":
        return REFERENCE
    if name == "auto" and device.type == "cpu":
        return PLAIN
    reason = _why_no_kernels(device, calls)
    if reason is None:
        log.info("attention triton: the device is `%s`", device.type)
        return _triton()
    if name == "triton":
        raise ModelError(
            f"model.attention is `triton`, but {reason}", hint='set model.attention = "auto"'
        )
    log.info("attention torch, which is slower: %s", reason)
    return BY_BLOCK


def _why_no_kernels(device: torch.device, calls: Sequence[AttentionCall]) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is missing"
    if device.type == "cpu" and not _interprets():
        return "its kernels run on a CPU only where TRITON_INTERPRET=1 is set"
    widest = max(max(call.key_width, call.value_width) for call in calls)
    if widest > MOST_WIDTH:
        return f"a head of the model is {widest} wide, the kernels serve {MOST_WIDTH}"
    return None


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _triton() -> Backend:
    # triton reads at import whether it interprets, and is no small thing to import
    from jobrunner.engine.attention import triton_launch as kernels

    pool = partial(BlockPool, gather=kernels.gather_blocks, scatter=kernels.scatter_blocks)
    return Backend(pool, partial(DevicePagedAttention, kernels))
