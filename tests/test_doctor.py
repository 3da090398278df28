"""`cbjob doctor`: the machine is described, kernels are proven, and a model is bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobrunner.cli import cli
from jobrunner.commands.doctor import ceilings, examine, machine_warnings
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
from jobrunner.console.machine import MachineLimits
from jobrunner.engine.machine import Rates
from tests.world import World

GOLDEN = Path(__file__).parent / "golden"

MACHINE = Machine(
    processor="AMD EPYC 9B14",
    system="Linux 6.1",
    memory_bytes=24 << 30,
    free_bytes=20 << 30,
    cores_present=4,
    cores_allowed=2,
    threads=2,
    torch="2.13.0+cpu",
    busy_cores=0.1,
)
REPORT = DoctorReport(
    machine=MACHINE,
    device=Device("AMD EPYC 9B14", "cpu", "this build of torch is for CPUs only", 31.2e9),
    formats=(
        NumberFormat("float32", True, 190e9),
        NumberFormat("bfloat16", True, 440e9),
        NumberFormat("float16", False, None),
    ),
    kernels=(
        KernelReport("attention", "torch", "float32", 1e-5, 1.75e-7, None, False),
        KernelReport("attention", "tiles", "float16", 3e-3, None, "no kernels for float16", False),
        KernelReport("projection", "torch", "bfloat16", 2e-2, 1.6e-3, None, False),
    ),
    model=ModelCeilings(
        name="demo",
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        parameters=134_515_008,
        weight_bytes=269_030_016,
        max_model_len=8192,
        kv_bytes_per_token=23_040,
        kv_is_a_guess=False,
        kv_tokens=262_144,
        ceilings=(
            Ceiling("prefill", 512, None, 2071.3),
            Ceiling("decode", 1, 512, 110.4),
            Ceiling("decode", 64, 512, 1634.0),
        ),
    ),
)


@pytest.fixture
def quick_rates(monkeypatch):
    """A machine of round numbers, in the place of this one."""
    rates = Rates(gemm_flops_per_s=1e12, read_bytes_per_s=1e10)
    monkeypatch.setattr("jobrunner.engine.machine.measure_rates", lambda device, dtype: rates)


def doctor(*options: object):
    return CliRunner().invoke(cli, ["doctor", *map(str, options)], standalone_mode=False)


def test_the_report_reads_as_it_always_did():
    assert "\n".join(text_lines(REPORT)) + "\n" == (GOLDEN / "doctor.txt").read_text()


def test_a_wrong_kernel_is_named_and_fails_the_command():
    wrong = KernelReport("attention", "tiles", "bfloat16", 2e-2, 0.7, None, True)
    report = replace(REPORT, kernels=(*REPORT.kernels, wrong))
    assert report.exit_code == 1
    assert text_lines(report)[-1] == (
        "problem: attention tiles in bfloat16: not what the reference computes"
    )
    assert as_json(report)["ok"] is False


def test_the_machine_alone_is_described_without_any_model(quick_rates):
    report = examine(None)
    assert report.model is None
    assert report.exit_code == 0
    assert report.machine.cores_allowed <= report.machine.cores_present
    assert {kernel.part for kernel in report.kernels} >= {"attention", "projection"}
    measured = {one.dtype for one in report.formats if one.gemm_flops_per_s is not None}
    assert measured == {one.dtype for one in report.formats if one.native}


def test_a_jobs_model_is_bounded_with_its_settings(quick_rates, tmp_path, tiny_model):
    job = World(tmp_path, tiny_model).job_file
    changes = ("--set", "batching.kv_memory=1MiB", "--set", "batching.max_batch_size=8")
    done = doctor(job, "--json", *changes)
    assert done.return_value == 0
    model = json.loads(done.stdout)["model"]
    assert model["dtype"] == "float32"
    assert 0 <= 2**20 - model["kv_tokens"] * model["kv_bytes_per_token"] < 2**14
    kinds = [(one["kind"], one["batch"]) for one in model["ceilings"]]
    assert kinds == [("prefill", 512), ("decode", 1), ("decode", 5)]
    # of 512 tokens each no more fit
    assert 5 * 512 <= model["kv_tokens"] < 6 * 512


def test_a_named_model_needs_no_job(quick_rates, tiny_model):
    done = doctor("--model", tiny_model)
    assert done.return_value == 0
    assert f"model     {tiny_model}: LlamaForCausalLM" in done.stdout


def test_a_model_that_is_not_there_is_said_in_json_too(quick_rates, tmp_path):
    done = doctor("--json", "--model", tmp_path / "nothing")
    said = json.loads(done.stdout)
    assert said["ok"] is False
    assert "there is no folder" in said["error"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["job.toml", "--model", "demo"], "not both"),
        (["--set", "model.dtype=float32"], "give JOB"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options, words):
    done = doctor(*options)
    assert words in str(done.exception)


def test_ceilings_follow_their_formulas():
    limits = MachineLimits(
        flops_per_token=2e8,
        flops_per_output_token=5e7,
        weight_bytes=2e8,
        kv_bytes_per_token=2e4,
        gemm_flops_per_s=4e11,
        read_bytes_per_s=2e10,
    )
    found = ceilings(limits, token_budget=512, batch_size=64, context=512)
    # prompts are bound by the arithmetic, one sequence and a full batch by what they read
    alone_s = (2e8 + 512 * 2e4) / 2e10
    full_s = (2e8 + 64 * 512 * 2e4) / 2e10
    assert full_s > 64 * 2.5e8 / 4e11
    assert [one.tokens_per_s for one in found] == pytest.approx([2000, 1 / alone_s, 64 / full_s])


def test_one_sequence_is_not_listed_twice():
    limits = MachineLimits(1.0, 1.0, 1.0, 1.0, 1.0)
    assert [one.batch for one in ceilings(limits, 8, 1, 4)] == [8, 1]


@pytest.mark.parametrize(
    ("changed", "environment", "words"),
    [
        ({"threads": 4}, {}, "4 threads share 2 cores"),
        ({"threads": 1}, {"OMP_NUM_THREADS": "1"}, "because of OMP_NUM_THREADS"),
        ({"threads": 1}, {}, "because of model.threads"),
        ({"busy_cores": 1.5}, {}, "1.5 of 4 cores' worth of work"),
        ({}, {"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY"),
    ],
)
def test_what_slows_a_machine_down_is_warned_of(changed, environment, words):
    (warning,) = machine_warnings(replace(MACHINE, **changed), environment)
    assert words in warning


def test_a_quiet_machine_that_uses_its_cores_gets_no_warning():
    assert machine_warnings(MACHINE, {"OMP_WAIT_POLICY": "PASSIVE"}) == []
