"""What a step costs, fitted to metrics that say what the machine could do at best."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest

from jobrunner.commands.simulate_fit import fit_cost
from jobrunner.commands.simulate_prior import best_costs
from jobrunner.console.machine import MachineLimits
from jobrunner.console.snapshot import Totals, metrics_line
from jobrunner.console.stats import Stats
from jobrunner.errors import ConfigError
from jobrunner.records import Step
from jobrunner.simulate.cost import StepCost

# a small model on a small machine: 2.5e-4 s a prompt token, 1e-7 s a pair, 15 ms the weights
MACHINE = MachineLimits(
    flops_per_token=2e8,
    flops_per_output_token=5e7,
    weight_bytes=3e8,
    kv_bytes_per_token=2e4,
    attention_flops=8e4,
    gemm_flops_per_s=8e11,
    read_bytes_per_s=2e10,
)
NAMES = {
    "steps": "step_s",
    "prefill_tokens": "prefill_token_s",
    "decode_tokens": "decode_s",
    "context_tokens": "context_token_s",
    "attended_tokens": "attended_token_s",
}


def times_the_best(step: float, **times: float) -> StepCost:
    """What a machine costs that needs so many times what it would at its rates."""
    factors = {"steps": step, **times}
    return StepCost(
        **{NAMES[kind]: factors[kind] * best for kind, best in best_costs(MACHINE).items()}
    )


def alike(times: float, step: float) -> StepCost:
    return times_the_best(step, **{kind: times for kind in NAMES if kind != "steps"})


def workload(prompts: tuple[int, int], outputs: tuple[int, int], seed: int = 0) -> list[Step]:
    """Steps of rows with such lengths, eight at a time, one prompt a step."""
    draws = Random(seed)
    running: list[list[int]] = []
    steps = []
    for _ in range(300):
        running = [[context + 1, left - 1] for context, left in running if left > 1]
        prompt = draws.randint(*prompts) if len(running) < 8 else 0
        steps.append(
            Step(
                prefill_tokens=prompt,
                attended_tokens=prompt * (prompt + 1) // 2,
                decode_tokens=len(running),
                context_tokens=sum(context for context, _ in running),
                tokens_computed=prompt + len(running),
                batch_size=len(running) + (prompt > 0),
            )
        )
        if prompt:
            running.append([prompt, draws.randint(*outputs)])
    return steps


SHORT, LONG = workload((10, 60), (5, 60)), workload((30, 1500), (5, 60), seed=1)


def seconds(cost: StepCost, step: Step) -> float:
    return cost.seconds(
        step.prefill_tokens, step.decode_tokens, step.context_tokens, step.attended_tokens
    )


def all_seconds(cost: StepCost, steps: Iterable[Step]) -> float:
    return sum(seconds(cost, step) for step in steps)


def metrics(
    path: Path,
    cost: StepCost,
    steps: list[Step],
    *,
    machine: Mapping[str, object] | None = None,
    noise: float = 0.0,
) -> Path:
    """The metrics of a run on a machine that is slower at times, a line for ten steps."""
    draws = Random(2)
    stats, lines = Stats(Totals(1), slots=8, started_s=0.0), []
    for place, step in enumerate(steps):
        if place % 10 == 0:
            slowness = 1.0 + noise * draws.random()
        stats.observe(replace(step, step_s=slowness * seconds(cost, step)), 0.0)
        if place % 10 == 9:
            lines.append(metrics_line(stats.snapshot(0.0)))
    lines[0]["machine"] = asdict(MACHINE) if machine is None else machine
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_each_best_cost_is_work_over_rate():
    assert best_costs(MACHINE) == pytest.approx(
        {
            "steps": 3e8 / 2e10,
            "prefill_tokens": 2e8 / 8e11,
            "decode_tokens": 2.5e8 / 8e11,
            "context_tokens": 2e4 / 2e10,
            "attended_tokens": 8e4 / 8e11,
        }
    )


def test_context_that_is_read_faster_than_attended_to_costs_its_arithmetic():
    best = best_costs(replace(MACHINE, attention_flops=8e6))
    assert best["context_tokens"] == best["attended_tokens"] == 8e6 / 8e11


@pytest.mark.parametrize(
    ("times", "step", "noise"),
    [(1.0, 1.0, 0.2), (1.6, 1.6, 0.2), (1.6, 5.0, 0.0), (0.3, 2.0, 0.0)],
)
def test_short_prompts_tell_the_time_of_long_ones_on_a_machine_of_one_efficiency(
    tmp_path, times, step, noise
):
    truth = alike(times, step)
    found = fit_cost(metrics(tmp_path / "m.jsonl", truth, SHORT, noise=noise)).cost
    # on the average the machine is slower by half of the noise
    assert all_seconds(found, LONG) == pytest.approx(
        (1 + noise / 2) * all_seconds(truth, LONG), rel=0.1
    )


def test_prompts_that_never_ran_cost_as_much_more_than_the_best_as_decodes(tmp_path):
    decodes = [
        replace(step, prefill_tokens=0, attended_tokens=0, tokens_computed=step.decode_tokens)
        for step in SHORT
        if step.decode_tokens
    ]
    found = fit_cost(metrics(tmp_path / "m.jsonl", alike(2.0, 2.0), decodes)).cost
    best = best_costs(MACHINE)
    assert found.prefill_token_s == pytest.approx(2.0 * best["prefill_tokens"], rel=0.01)
    assert found.attended_token_s == pytest.approx(2.0 * best["attended_tokens"], rel=0.01)


def test_what_the_steps_tell_apart_is_found_however_far_from_the_best(tmp_path):
    truth = times_the_best(
        9.0, prefill_tokens=1.2, decode_tokens=4.0, context_tokens=0.5, attended_tokens=6.0
    )
    found = fit_cost(metrics(tmp_path / "m.jsonl", truth, LONG)).cost
    for name in NAMES.values():
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-3)


def test_what_costs_nothing_is_found_to_cost_nothing(tmp_path):
    truth = times_the_best(
        3.0, prefill_tokens=1.2, decode_tokens=0.0, context_tokens=2.0, attended_tokens=1.0
    )
    found = fit_cost(metrics(tmp_path / "m.jsonl", truth, LONG)).cost
    assert found.decode_s == pytest.approx(0.0, abs=1e-3 * best_costs(MACHINE)["decode_tokens"])
    assert min(getattr(found, name) for name in NAMES.values()) >= 0


def test_the_fit_tells_the_time_that_its_own_steps_took_together(tmp_path):
    truth = alike(1.6, 5.0)
    path = metrics(tmp_path / "m.jsonl", truth, SHORT, noise=3.0)
    took_s = json.loads(path.read_text().splitlines()[-1])["busy_s"]
    assert all_seconds(fit_cost(path).cost, SHORT) == pytest.approx(took_s)


def test_one_interval_is_enough_where_the_machine_is_known(tmp_path):
    truth = alike(1.6, 1.6)
    found = fit_cost(metrics(tmp_path / "m.jsonl", truth, SHORT[:10])).cost
    assert all_seconds(found, LONG) == pytest.approx(all_seconds(truth, LONG), rel=0.01)


def test_a_run_that_went_on_elsewhere_is_fitted_to_the_later_machine(tmp_path):
    first = metrics(tmp_path / "1.jsonl", alike(1.6, 1.6), SHORT, machine={**asdict(MACHINE)})
    slower = {**asdict(MACHINE), "gemm_flops_per_s": 4e11, "read_bytes_per_s": 1e10}
    second = metrics(tmp_path / "2.jsonl", alike(1.6, 1.6), SHORT, machine=slower)
    both = tmp_path / "m.jsonl"
    both.write_text(first.read_text() + second.read_text())
    # twice the rates, half the best costs: times the same ones it is the same cost
    found = fit_cost(both).cost
    assert all_seconds(found, LONG) == pytest.approx(all_seconds(alike(1.6, 1.6), LONG), rel=0.01)


def test_the_words_say_where_what_is_left_open_comes_from(tmp_path):
    path = metrics(tmp_path / "m.jsonl", alike(1.6, 1.6), SHORT)
    assert "at the machine's rates" in fit_cost(path).words
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[0]["machine"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "costs 0" in fit_cost(path).words


@pytest.mark.parametrize(
    "machine",
    [
        {},
        {**asdict(MACHINE), "gemm_flops_per_s": 0.0},
        {**asdict(MACHINE), "attention_flops": -1.0},
        {**asdict(MACHINE), "read_bytes_per_s": "fast"},
        [1.0],
    ],
)
def test_a_machine_that_cannot_be_is_refused(tmp_path, machine):
    path = metrics(tmp_path / "m.jsonl", alike(1.6, 1.6), SHORT, machine=machine)
    with pytest.raises(ConfigError, match=r"line 1 of the metrics .* cannot be used"):
        fit_cost(path)
