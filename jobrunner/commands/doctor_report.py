"""What `cbjob doctor` finds out of a machine and a model, as plain records. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from jobrunner.errors import ExitCode


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores_allowed` of `cores_present` may be used by this process, `threads` compute.

    `busy_cores` is how much work went on in the minute before, the system's load.
    """

    processor: str
    system: str
    memory_bytes: int
    free_bytes: int
    cores_present: int
    cores_allowed: int
    threads: int
    torch: str
    busy_cores: float


@dataclass(frozen=True, slots=True)
class Device:
    """What models run on here, why, and how fast it reads its memory."""

    name: str
    kind: str
    reason: str
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """`native` where the device computes in it; the rate of a large product, if measured."""

    dtype: str
    native: bool
    gemm_flops_per_s: float | None


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One way to compute a part of a step: how far off it is here, or why it is not usable."""

    part: str
    name: str
    dtype: str
    limit: float
    error: float | None
    reason: str | None
    wrong: bool


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A rate that no engine can pass on this machine, in tokens of a kind per second.

    `batch` sequences decode a token each, with `context` tokens before it; or so many tokens of
    prompts are read in one step.
    """

    kind: str
    batch: int
    context: int | None
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ModelCeilings:
    """What a model needs and what fits, without its weights being loaded."""

    name: str
    architecture: str
    dtype: str
    parameters: int
    weight_bytes: int
    max_model_len: int
    kv_bytes_per_token: int
    kv_is_a_guess: bool
    kv_tokens: int
    ceilings: tuple[Ceiling, ...]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What is known of a machine, and of a model on it if one was named."""

    machine: Machine
    device: Device
    formats: tuple[NumberFormat, ...]
    kernels: tuple[KernelReport, ...]
    model: ModelCeilings | None = None
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        wrong = any(kernel.wrong for kernel in self.kernels)
        return ExitCode.UNEXPECTED if wrong else ExitCode.OK
