"""Choose the device and the number format. Knows nothing of weights or sequences."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig

from jobrunner.errors import ModelError

log = logging.getLogger("cbjob")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_TILE_FLAG = "amx_bf16"
_FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})


def resolve_device(device: str) -> str:
    """Return `cpu` or `cuda`; `auto` takes a GPU where there is one.

    Raises ModelError where a GPU is asked for and absent.
    """
    present = torch.cuda.is_available()
    if device == "auto":
        chosen = "cuda" if present else "cpu"
        log.info("device %s: %s", chosen, "a GPU is present" if present else "no GPU was found")
        return chosen
    if device.startswith("cuda") and not present:
        raise ModelError(
            f"model.device is `{device}`, but torch {torch.__version__} finds no GPU",
            hint='set model.device = "auto", or install a driver and a CUDA build of torch',
        )
    return device


def resolve_dtype(dtype: str, device: str, config: PretrainedConfig) -> str:
    """Return the name of the number format for weights, activations and KV.

    `auto` is the checkpoint's own on a GPU; on a CPU it is bfloat16 where the processor has
    instructions for it, else float32.
    """
    if dtype != "auto":
        return dtype
    if device.startswith("cuda"):
        chosen, reason = _checkpoint_dtype(config)
    elif cpu_has_bfloat16():
        chosen, reason = "bfloat16", "the processor has bfloat16 instructions"
    else:
        chosen, reason = "float32", "the processor has no bfloat16 instructions"
    log.info("dtype %s: %s", chosen, reason)
    return chosen


def cpu_has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether bfloat16 is fast on this processor, not merely emulated."""
    supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return supported and not _BF16_FLAGS.isdisjoint(_cpu_flags(cpuinfo))


def cpu_has_float16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether float16 is fast on this processor, not merely emulated."""
    supported = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return supported and not _FP16_FLAGS.isdisjoint(_cpu_flags(cpuinfo))


def cpu_multiplies_tiles(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the processor multiplies tiles of bfloat16, as no vector instruction can.

    On those that do, Intel's since Sapphire Rapids, products of vectors of pairs are no faster than
    float32.
    """
    return _TILE_FLAG in _cpu_flags(cpuinfo)


def is_native(dtype: str, device: str) -> bool:
    """Whether a device computes in this number format, not merely stores it."""
    if device.startswith("cuda"):
        # since Ampere; before, bfloat16 is emulated
        return dtype != "bfloat16" or torch.cuda.get_device_capability() >= (8, 0)
    native = {"float32": True, "bfloat16": cpu_has_bfloat16(), "float16": cpu_has_float16()}
    return native[dtype]


def _cpu_flags(cpuinfo: Path) -> list[str]:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return flags.split()


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device without waiting for what it is computing."""
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    # from memory that is not page-locked, a larger copy waits for its turn on the device
    return tensor.pin_memory().to(device, non_blocking=True)


def device_state(device: torch.device) -> str:
    """Say what is known of a device without asking it anything: it may not answer."""
    if device.type != "cuda":
        return f"the device is `{device.type}`"
    counts = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    used, held = (f"{count / 2**30:,.1f} GiB" for count in counts)
    properties = torch.cuda.get_device_properties(device)
    return (
        f"the device is {properties.name} with {properties.total_memory / 2**30:,.1f} GiB,"
        f" {used} in use and {held} held"
    )


def _checkpoint_dtype(config: PretrainedConfig) -> tuple[str, str]:
    name = str(config.dtype).removeprefix("torch.")
    if name in DTYPES:
        return name, "as in the checkpoint"
    return "bfloat16", f"the checkpoint says {name}"
