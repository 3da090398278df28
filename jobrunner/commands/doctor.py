"""`cbjob doctor`: what this machine can do, whether its kernels are right, and what bounds a model.

What is found goes into a `DoctorReport`; how it reads is in `doctor_view`.
"""

from __future__ import annotations

import json as json_module
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobrunner.commands.doctor_report import (
    Ceiling,
    Device,
    DoctorReport,
    KernelReport,
    Machine,
    ModelCeilings,
    NumberFormat,
)
from jobrunner.commands.doctor_view import as_json, text_lines
from jobrunner.commands.run import share_the_cores
from jobrunner.config import BatchingTable, ModelTable
from jobrunner.console.machine import MachineLimits
from jobrunner.cores import granted_cores
from jobrunner.data.models import resolve_model
from jobrunner.errors import JobError
from jobrunner.jobfile import load_settings

if TYPE_CHECKING:
    from jobrunner.engine.loading import ModelInfo
    from jobrunner.engine.machine import Rates

_CPUINFO = Path("/proc/cpuinfo")
# the length of the sequences that ceilings are given for, if a model takes so many tokens
_CONTEXT = 512
# the share of the cores that others may use before the rates say little
_QUIET = 0.25


@dataclass(frozen=True, slots=True)
class Asked:
    """The model to give ceilings for, and the settings that decide what fits."""

    model: ModelTable
    batching: BatchingTable
    folder: Path


def doctor_command(
    job: Path | None, *, model: str | None, overrides: Sequence[str], json: bool
) -> int:
    """Print what is known of the machine, and of a model if one is named; return the exit code."""
    if job is not None and model is not None:
        raise click.UsageError("give JOB, which names a model, or --model, not both")
    if job is None and overrides:
        raise click.UsageError("--set changes JOB's keys: give JOB")
    share_the_cores()
    try:
        report = examine(asked_for(job, model, overrides))
    except JobError as error:
        if json:
            click.echo(json_module.dumps({"ok": False, "error": str(error), "hint": error.hint}))
        raise
    click.echo(json_module.dumps(as_json(report)) if json else "\n".join(text_lines(report)))
    return report.exit_code


def asked_for(job: Path | None, model: str | None, overrides: Sequence[str]) -> Asked | None:
    """Read what the command line names; None where it names no model."""
    if job is not None:
        settings = load_settings(job, overrides)
        return Asked(settings.model, settings.batching, settings.folder)
    if model is not None:
        return Asked(ModelTable(name=model), BatchingTable(), Path.cwd())
    return None


def examine(asked: Asked | None) -> DoctorReport:
    """Measure the machine, prove its kernels, and bound what a model can do on it.

    Raises JobError for a model that cannot run here.
    """
    import torch

    from jobrunner.engine.devices import DTYPES, is_native, resolve_device
    from jobrunner.engine.kernel_checks import check_kernels
    from jobrunner.engine.machine import measure_rates

    if asked is not None and asked.model.threads != "auto":
        torch.set_num_threads(asked.model.threads)
    device = resolve_device(asked.model.device if asked else "auto")
    machine = machine_facts()
    # a model that cannot run is said before anything is measured
    info = None if asked is None else _model_info(asked)
    native = {dtype: is_native(dtype, device) for dtype in DTYPES}
    # what is emulated takes forever, and only matters where it is asked for
    wanted = [dtype for dtype in DTYPES if native[dtype] or (info and info.dtype == dtype)]
    rates = {dtype: measure_rates(device, dtype) for dtype in wanted}
    return DoctorReport(
        machine=machine,
        device=_device(device, asked, max(r.read_bytes_per_s for r in rates.values())),
        formats=tuple(
            NumberFormat(
                dtype, native[dtype], rates[dtype].gemm_flops_per_s if dtype in rates else None
            )
            for dtype in DTYPES
        ),
        kernels=tuple(
            KernelReport(v.part, v.name, v.dtype, v.limit, v.error, v.reason, v.wrong)
            for v in check_kernels(device, DTYPES)
        ),
        model=model_ceilings(asked, info, rates) if asked and info else None,
        warnings=tuple(machine_warnings(machine, os.environ)),
    )


def machine_facts() -> Machine:
    """What the system says of the machine and of our part of it."""
    import torch

    from jobrunner.engine.memory import available_memory

    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(
        processor=_processor(),
        system=f"{platform.system()} {platform.release()}",
        memory_bytes=pages * page_bytes,
        free_bytes=available_memory(),
        cores_present=os.cpu_count() or 1,
        cores_allowed=granted_cores(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        busy_cores=os.getloadavg()[0],
    )


def machine_warnings(machine: Machine, environment: Mapping[str, str]) -> list[str]:
    """What makes a machine slower than it has to be."""
    found = []
    if machine.threads > machine.cores_allowed:
        found.append(
            f"{machine.threads} threads share {machine.cores_allowed} cores: they wait for each"
            " other; set model.threads, or leave it out"
        )
    if machine.threads < machine.cores_allowed:
        why = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in environment else "model.threads, perhaps"
        found.append(
            f"{machine.threads} of {machine.cores_allowed} cores compute, because of {why}"
        )
    if machine.busy_cores > _QUIET * machine.cores_present:
        found.append(
            f"{machine.busy_cores:.1f} of {machine.cores_present} cores' worth of work was going on"
            " before: the rates, and the ceilings with them, are lower than on a quiet machine"
        )
    if environment.get("OMP_WAIT_POLICY", "PASSIVE").upper() != "PASSIVE":
        found.append(
            "OMP_WAIT_POLICY lets idle threads spin: beside another busy process they slow each"
            " other down tenfold"
        )
    return found


def model_ceilings(asked: Asked, info: ModelInfo, rates: Mapping[str, Rates]) -> ModelCeilings:
    """Tell what fits, and the rates that cannot be passed: see MachineLimits for the formulas."""
    from jobrunner.engine.loading import estimate_kv_blocks, resolve_limits
    from jobrunner.measuring import machine_limits

    batching = asked.batching
    limits = resolve_limits(
        info.device,
        batching.max_batch_size,
        batching.token_budget,
        batching.chunk_size,
        batching.lookahead,
    )
    blocks = estimate_kv_blocks(
        info, limits, kv_memory=batching.kv_memory, block_size=batching.block_size
    )
    kv_tokens = blocks * batching.block_size
    context = min(_CONTEXT, info.max_model_len)
    fitting = max(1, min(limits.max_batch_size, kv_tokens // context))
    return ModelCeilings(
        name=asked.model.name,
        architecture=info.architecture,
        dtype=info.dtype,
        parameters=info.parameters,
        weight_bytes=info.weight_bytes,
        max_model_len=info.max_model_len,
        kv_bytes_per_token=info.kv_bytes_per_token,
        kv_is_a_guess=info.kv_is_a_guess,
        kv_tokens=kv_tokens,
        ceilings=ceilings(
            machine_limits(info, rates[info.dtype]), limits.token_budget, fitting, context
        ),
    )


def ceilings(
    limits: MachineLimits, token_budget: int, batch_size: int, context: int
) -> tuple[Ceiling, ...]:
    """Bounds for full steps of prompts, for one sequence alone, and for a full batch."""
    prefill = limits.most_prefill_tokens_per_s(token_budget)
    return (
        Ceiling("prefill", token_budget, None, prefill),
        *(
            Ceiling("decode", size, context, limits.most_decode_tokens_per_s(size, context))
            for size in sorted({1, batch_size})
        ),
    )


def _model_info(asked: Asked) -> ModelInfo:
    from jobrunner.engine.loading import read_model_info

    table = asked.model
    return read_model_info(
        resolve_model(table.name, asked.folder, table.revision),
        device=table.device,
        dtype=table.dtype,
        max_model_len=table.max_model_len,
        block_size=asked.batching.block_size,
    )


def _device(device: str, asked: Asked | None, read_bytes_per_s: float) -> Device:
    import torch

    if device.startswith("cuda"):
        kind, name = "cuda", torch.cuda.get_device_name()
        reason = "a GPU is present"
    else:
        kind, name = "cpu", _processor()
        reason = "torch finds no GPU"
        if torch.version.cuda is None:
            reason = "this build of torch is for CPUs only"
    if asked is not None and asked.model.device != "auto":
        reason = f'model.device is "{asked.model.device}"'
    return Device(name, kind, reason, read_bytes_per_s)


def _processor() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
