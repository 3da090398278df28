"""Choose the attention backend for a device and a number format. Knows nothing of models."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from jobrunner.engine.attention.hook import Attention
from jobrunner.engine.attention.torch_paged import TorchPagedAttention
from jobrunner.engine.kv import KvPool
from jobrunner.errors import ModelError
from jobrunner.user_cache import user_cache_folder

log = logging.getLogger("cbjob")

Wanted = Literal["auto", "kernels", "torch"]
MakeAttention = Callable[[KvPool, torch.device], Attention]


def choose_attention(wanted: Wanted, device: str, dtype: torch.dtype) -> MakeAttention:
    """Return what makes an attention over a pool: compiled kernels on a CPU, else plain torch.

    Logs which, and why not the kernels; compiles them. Raises ModelError where they are asked
    for and cannot be had.
    """
    reason = "as model.attention asks" if wanted == "torch" else _kernels_problem(device, dtype)
    if reason is None:
        return _kernels(dtype)
    if wanted == "kernels":
        raise ModelError(
            f'model.attention is "kernels", but {reason}', hint='set model.attention = "auto"'
        )
    log.info("attention by torch: %s", reason)
    return TorchPagedAttention


def _kernels_problem(device: str, dtype: torch.dtype) -> str | None:
    if device.partition(":")[0] != "cpu":
        return f"the kernels are for a CPU, not for {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"there are no kernels for {str(dtype).removeprefix('torch.')}"
    try:
        import numba  # noqa: F401
    except ImportError as error:
        # newest versions of Python come before the numba that knows them
        return f"numba cannot be imported: {error}"
    return None


def _kernels(dtype: torch.dtype) -> MakeAttention:
    import numba

    from jobrunner.engine.attention import kernels
    from jobrunner.engine.attention.numba_paged import STORED, NumbaPagedAttention

    place, keep = _keep_compiled(numba.config)
    started = time.perf_counter()
    kernels.compiled(STORED[dtype], keep=keep)
    log.info(
        "attention by compiled kernels (numba %s): ready in %.1f s, %s",
        numba.__version__,
        time.perf_counter() - started,
        place,
    )
    return partial(NumbaPagedAttention, keep_compiled=keep)


def _keep_compiled(config: object) -> tuple[str, bool]:
    """Tell numba where to keep what it compiles; say whether it can."""
    folder = getattr(config, "CACHE_DIR", "") or str(user_cache_folder() / "kernels")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return f"compiled at every start, as `{folder}` cannot be made: {error.strerror}", False
    if not os.access(folder, os.W_OK):
        return f"compiled at every start, as `{folder}` cannot be written to", False
    config.CACHE_DIR = folder  # type: ignore[attr-defined]
    return f"kept in `{folder}`", True
