"""Show a `DoctorReport`: lines for a person, or one object for a program. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from jobrunner.commands.doctor_report import (
    Ceiling,
    DoctorReport,
    KernelReport,
    ModelCeilings,
    NumberFormat,
)
from jobrunner.commands.figures import number
from jobrunner.console.printable import printable

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def as_json(report: DoctorReport) -> dict[str, Any]:
    """The report as one JSON object; `ok` says that the exit code is 0."""
    said: dict[str, Any] = asdict(report)
    said["ok"], said["exit_code"] = report.exit_code == 0, int(report.exit_code)
    return said


def text_lines(report: DoctorReport) -> list[str]:
    """The report for a person."""
    lines = [*_machine_lines(report), *_format_lines(report.formats)]
    lines += _kernel_lines(report.kernels)
    if report.model is not None:
        lines += _model_lines(report.model)
    lines += [f"warning: {warning}" for warning in report.warnings]
    lines.append(_verdict(report))
    return [printable(line) for line in lines]


def _machine_lines(report: DoctorReport) -> Iterator[str]:
    machine, device = report.machine, report.device
    yield f"machine   {machine.processor}, {machine.system}"
    yield (
        f"  cores   {machine.cores_allowed} of {machine.cores_present} are ours,"
        f" torch computes with {machine.threads}"
    )
    yield f"  memory  {_bytes(machine.memory_bytes)}, {_bytes(machine.free_bytes)} of it free"
    yield f"device    {device.kind}: {device.name}"
    yield f"  chosen  {device.reason}"
    yield f"  torch   {machine.torch}"
    yield f"  reads   {device.read_bytes_per_s / 1e9:,.1f} GB/s"


def _format_lines(formats: tuple[NumberFormat, ...]) -> Iterator[str]:
    yield "formats   how fast large matrices are multiplied"
    for one in formats:
        kind = "computed by the device" if one.native else "only emulated: avoid it"
        rate = one.gemm_flops_per_s
        shown = "not measured" if rate is None else f"{number(rate / 1e9)} GFLOP/s"
        yield f"  {one.dtype:8}  {shown:>16}  {kind}"


def _kernel_lines(kernels: tuple[KernelReport, ...]) -> Iterator[str]:
    yield "kernels   against a plain reference in float64"
    parts = max((len(kernel.part) for kernel in kernels), default=0)
    names = max((len(kernel.name) for kernel in kernels), default=0)
    for kernel in kernels:
        label = f"{kernel.part:{parts}}  {kernel.name:{names}}  {kernel.dtype:8}"
        yield f"  {label}  {_kernel_words(kernel)}"


def _kernel_words(kernel: KernelReport) -> str:
    if kernel.error is None:
        return f"not usable: {kernel.reason}"
    verdict = "WRONG" if kernel.wrong else "ok"
    return f"{verdict}: relative error {kernel.error:.1e}, limit {kernel.limit:.0e}"


def _model_lines(model: ModelCeilings) -> Iterator[str]:
    yield f"model     {model.name}: {model.architecture}"
    yield (
        f"  weights {model.parameters:,} parameters, {_bytes(model.weight_bytes)} as {model.dtype}"
    )
    about = "about " if model.kv_is_a_guess else ""
    fit = model.kv_tokens / model.max_model_len
    yield (
        f"  KV      {about}{model.kv_bytes_per_token:,} bytes per token, room for about"
        f" {model.kv_tokens:,} tokens: {fit:,.1f} sequences of {model.max_model_len:,}"
    )
    yield "  tokens/s that no engine can pass at the rates above"
    for ceiling in model.ceilings:
        yield f"    {_ceiling_words(ceiling):44} {number(ceiling.tokens_per_s, 4):>10}"


def _ceiling_words(ceiling: Ceiling) -> str:
    if ceiling.context is None:
        return f"{ceiling.kind}, {ceiling.batch:,} tokens a step"
    sequences = "1 sequence" if ceiling.batch == 1 else f"{ceiling.batch:,} sequences"
    return f"{ceiling.kind}, {sequences} of {ceiling.context:,} tokens"


def _verdict(report: DoctorReport) -> str:
    wrong = [f"{one.part} {one.name} in {one.dtype}" for one in report.kernels if one.wrong]
    if wrong:
        return f"problem: {', '.join(wrong)}: not what the reference computes"
    return "ok: every usable kernel computes what the reference does"


def _bytes(count: int) -> str:
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"
