"""`cbjob simulate` from its command line, the examples and the tuning page included."""

import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from jobrunner.cli import cli
from jobrunner.commands.simulate_fit import fit_cost
from jobrunner.console.snapshot import Totals, metrics_line
from jobrunner.console.stats import Stats
from jobrunner.errors import ConfigError
from jobrunner.records import Step
from jobrunner.simulate.cost import StepCost

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "jobs" / "TUNING.md").read_text()
SMALL = ["--set", "rows.count=6", "--set", "rows.output=3", "--set", "cost.step_s=1"]


def run(*words: str) -> str:
    """What a simulation prints; its errors are raised."""
    result = CliRunner().invoke(cli, ["simulate", *words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def numbers(*words: str) -> dict[str, dict]:
    """The numbers of each simulation, by name."""
    found = json.loads(run(*words, "--json"))
    return {simulation["name"]: simulation for simulation in found["simulations"]}


@cache
def simulated(line: str) -> list[dict]:
    """The numbers of each simulation that a line of the tuning page does."""
    return list(numbers(*shlex.split(line)).values())


def commands(text: str) -> list[str]:
    return re.findall(r"^cbjob simulate (.*)$", text, re.MULTILINE)


def page(title: str, place: int = 0) -> list[dict]:
    """The numbers of a command of the tuning page, found by the title of its section."""
    section = next(part for part in PAGE.split("\n## ") if part.startswith(title))
    return simulated(commands(section)[place])


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_thirty_requests_on_four_slots_need_fewer_steps_continuously():
    static, continuous = simulated("jobs/simulate/slots.toml")
    assert static["rows_done"] == continuous["rows_done"] == 30
    assert continuous["steps"] < 0.85 * static["steps"]
    assert continuous["utilization"] > static["utilization"]
    assert continuous["padding_efficiency"] == 1.0 > static["padding_efficiency"]
    assert continuous["middle"]["utilization"] >= 0.95


def test_arrivals_are_answered_sooner_continuously():
    gathered, continuous, _ = simulated("jobs/simulate/arrivals.toml")
    assert gathered["elapsed_s"] == continuous["elapsed_s"] == 40.0
    assert continuous["rows_done"] >= gathered["rows_done"]
    assert continuous["latency_mean_s"] < gathered["latency_mean_s"]
    assert continuous["latency_p99_s"] < gathered["latency_p99_s"]


def test_a_bigger_batch_is_not_always_faster():
    eight, _, most = page("A bigger batch")
    assert most["elapsed_s"] == pytest.approx(2 * eight["elapsed_s"], rel=0.1)


def test_a_shorter_queue_delay_can_cost_throughput():
    long, _, short = page("A shorter queue delay")
    assert (long["rows_done"], short["rows_done"]) == (19, 15)
    assert short["queue_mean_s"] > 3 * long["queue_mean_s"]


def test_preempted_is_not_lost():
    reserved, recomputed, swapped = page("Preempted is not lost")
    assert reserved["preemptions"] == 0 < recomputed["preemptions"]
    assert 0 < recomputed["tokens_recomputed_share"] < 0.1
    assert swapped["tokens_recomputed_share"] == 0
    for preempted in (recomputed, swapped):
        assert preempted["rows_done"] == reserved["rows_done"]
        assert preempted["elapsed_s"] < reserved["elapsed_s"]


def test_a_long_prompt_in_chunks_finishes_later_but_the_whole_earlier():
    cut, whole = page("A long prompt")
    assert cut["prefill_p99_s"] > whole["prefill_p99_s"]
    assert cut["elapsed_s"] < whole["elapsed_s"]
    assert cut["longest_gap_s"] < whole["longest_gap_s"]


def test_kv_memory_is_not_free():
    times = [simulation["elapsed_s"] for simulation in page("KV memory")]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[-1]
    times = [simulation["decode_mean_s"] for simulation in page("KV memory", 1)]
    assert times == sorted(times)


def test_redeciding_every_step_is_not_free():
    every, some, seldom = page("Re-deciding")
    assert some["both_kinds_share"] < every["both_kinds_share"]
    assert some["latency_mean_s"] < min(every["latency_mean_s"], seldom["latency_mean_s"])
    assert every["elapsed_s"] < some["elapsed_s"] < seldom["elapsed_s"]


def test_settings_age_when_lengths_change():
    for place, best in ((0, 2), (1, 0)):
        speeds = [s["output_tokens_per_s"] for s in page("Settings age", place)]
        assert speeds.index(max(speeds)) == best


def test_every_command_of_the_page_runs(tmp_path, monkeypatch):
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    monkeypatch.chdir(tmp_path)
    assert len(commands(PAGE)) >= 12
    for line in commands(PAGE):
        assert all(simulation["rows_done"] for simulation in simulated(line)), line
    assert (tmp_path / "slots.svg").exists()


def test_latencies_are_told_by_priority(tmp_path):
    # one slot and steps of a second: the rows of priority 0 take 1 and 2 s, the others wait
    (tmp_path / "trace.csv").write_text("prompt,output,priority\n1,1,0\n1,1,1\n1,1,0\n1,1,1\n")
    words = ["--trace", str(tmp_path / "trace.csv"), "--set", "cost.step_s=1"]
    words += [*("--set", "batching.max_batch_size=1"), "--variant", "policy=continuous"]
    words += ["--set", "trace.prompt=prompt", "--set", "trace.output=output"]
    bands = numbers(*words)["continuous"]["latency_by_priority"]
    assert [(band["priority"], band["samples"]) for band in bands] == [(0, 2), (1, 2)]
    found = [band[name] for band in bands for name in ("p50_s", "p99_s")]
    assert found == pytest.approx([1.0, 2.0, 3.0, 4.0], rel=0.05)
    assert re.search(r"of priority 1, p99 s +4", run(*words))


def test_without_a_sweep_the_three_policies_are_compared():
    assert list(numbers(*SMALL)) == ["static", "dynamic", "continuous"]


def test_a_sweep_names_the_best():
    found = json.loads(run(*SMALL, "--sweep", "max_batch_size=1,6,2", "--json"))
    assert found["best"]["output_tokens_per_s"] == "continuous max_batch_size=6"
    assert "best output_tokens_per_s: continuous max_batch_size=6" in run(
        *SMALL, "--sweep", "max_batch_size=1,6,2"
    )


def test_sweeps_and_variants_are_combined():
    names = numbers(
        *SMALL,
        *("--sweep", "max_batch_size=1,2"),
        *("--sweep", "rows.count=3,4"),
        *("--variant", "policy=static"),
    )
    assert len(names) == 4
    assert "static max_batch_size=2 rows.count=3" in names


def test_many_outcomes_stand_below_each_other():
    shown = run(*SMALL, "--sweep", "max_batch_size=1,2,3,4,5,6")
    assert len(re.findall(r"continuous max_batch_size=\d", shown)) >= 6


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    drawn = [*SMALL, "--set", "rows.output=1..99", "--arrivals", "poisson:2", "--json"]
    seeded = [*drawn, "--set", "simulation.seed=5"]
    assert run(*drawn) == run(*drawn)
    assert run(*drawn) != run(*seeded)


def test_what_is_left_to_the_machine_is_tuned_as_in_a_job():
    # a step is as long as its tokens: one with few of them loses nothing
    words = [*("--set", "rows.count=800"), *("--set", "rows.prompt=2000")]
    words += [*("--set", "rows.output=5"), *("--variant", "policy=continuous")]
    words += [*("--set", "cost.prefill_token_s=0.001"), *("--set", "cost.decode_s=0.001")]
    words += ["--set", "batching.max_batch_size=32"]
    [tuned] = numbers(*words).values()
    [fixed] = numbers(*words, "--set", "batching.token_budget=8192").values()
    assert tuned["steps"] > 2 * fixed["steps"]
    assert tuned["elapsed_s"] == pytest.approx(fixed["elapsed_s"])


def test_a_trace_is_read_and_cut(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens,timestamp\n5,2,0\n5,2,0\n5,3,9\n")
    cost = ["--set", "cost.step_s=1", "--trace", str(trace), "--variant", "policy=continuous"]
    [all_at_once] = numbers(*cost).values()
    assert (all_at_once["rows_total"], all_at_once["elapsed_s"]) == (3, 3.0)
    [as_they_came] = numbers(*cost, "--arrivals", "trace").values()
    assert as_they_came["elapsed_s"] == 12.0
    [two] = numbers(*cost, "--limit", "2").values()
    assert (two["rows_total"], two["output_tokens"]) == (2, 4)


def test_workers_share_the_rows():
    [alone] = numbers(*SMALL, "--sweep", "max_batch_size=1").values()
    [together] = numbers(*SMALL, "--sweep", "max_batch_size=1", "--workers", "3").values()
    assert alone["elapsed_s"] == 18.0
    assert together["elapsed_s"] == 6.0
    assert together["busy_s"] == 18.0


def test_the_timeline_is_drawn_in_text_and_as_an_image(tmp_path):
    words = [*SMALL, "--set", "batching.max_batch_size=2", "--variant", "policy=continuous"]
    shown = run(*words, "--timeline", str(tmp_path / "t.svg"))
    assert shown.count("▓██▓██▓██") == 2
    assert ElementTree.parse(tmp_path / "t.svg").getroot().tag.endswith("svg")


def test_a_timeline_with_json_prints_json_alone(tmp_path):
    json.loads(run(*SMALL, "--timeline", str(tmp_path / "t.svg"), "--json"))
    assert (tmp_path / "t.svg").exists()


def test_a_price_gives_a_cost():
    [found] = numbers(
        *SMALL, "--sweep", "max_batch_size=6", "--set", "simulation.price_per_gpu_hour=3600"
    ).values()
    assert found["cost"] == found["busy_s"] == 3.0


def test_memory_in_bytes_needs_to_know_the_bytes_of_a_token():
    with pytest.raises(ConfigError, match="nothing says how many bytes"):
        run(*SMALL, "--set", "batching.kv_memory=1GiB")
    tokens = "cost.kv_bytes_per_token=1024"
    assert run(*SMALL, "--set", "batching.kv_memory=1GiB", "--set", tokens)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "must have rows"),
        (["--set", "rows.output=3"], "must say how many rows"),
        (["--set", "rows.output=3", "--set", "rows.count=3"], "must say what a step costs"),
        ([*SMALL, "--profile", "h100"], "must be one of h200-8b"),
        ([*SMALL, "--set", "rows.output=9..3"], "must begin at 1 or more"),
        ([*SMALL, "--arrivals", "poisson:0"], "must be .none."),
        ([*SMALL, "--arrivals", "trace"], "needs a trace"),
        ([*SMALL, "--set", "batching.max_batch=3"], "did you mean `max_batch_size`"),
        ([*SMALL, "--set", "cots.step_s=3"], "unknown table `cots`.*did you mean `cost`"),
        ([*SMALL, "--sweep", "max_batch_size"], "must have the form key=value,value"),
        ([*SMALL, "--sweep", "max_batch_size=1,many"], "max_batch_size=many"),
        ([*SMALL, "--variant", "static"], "must be like"),
        ([*SMALL, "--timeline", "x.png"], "must be an image of vectors"),
        ([*SMALL, "--profile", "h200-8b", "--metrics", "m"], "not both"),
        ([*SMALL, "--workers", "-1"], "greater than or equal to 1"),
        ([*SMALL, "--set", "cost.kv_tokens=3"], "holds no block of 16"),
        (["nothing.toml"], "no job file `nothing.toml`"),
    ],
)
def test_what_cannot_be_simulated_is_said(words, message):
    with pytest.raises(ConfigError) as raised:
        run(*words)
    assert re.search(message, str(raised.value)), raised.value


def metrics(path: Path, cost: StepCost, steps: list[tuple[int, int, int]]) -> Path:
    """The metrics of a run whose steps took exactly what `cost` says, a line a step."""
    stats = Stats(Totals(len(steps)), slots=4, started_s=0.0)
    lines = []
    for prefill, decodes, context in steps:
        seconds = cost.seconds(prefill, decodes, context)
        step = Step(
            prefill_tokens=prefill,
            decode_tokens=decodes,
            context_tokens=context,
            tokens_computed=prefill + decodes,
            batch_size=1,
            step_s=seconds,
        )
        stats.observe(step, 0.0)
        lines.append(json.dumps(metrics_line(stats.snapshot(0.0))))
    with path.open("a") as file:
        file.write("\n".join(lines) + "\n")
    return path


COST = StepCost(0.01, 0.002, 0.003, 0.00001)
STEPS = [(10, 0, 0), (0, 4, 40), (7, 3, 900), (0, 1, 5000), (50, 2, 20), (0, 8, 300)]


def test_a_fit_finds_what_the_steps_of_a_run_cost(tmp_path):
    found = fit_cost(metrics(tmp_path / "m.jsonl", COST, STEPS)).cost
    for name in ("step_s", "prefill_token_s", "decode_s", "context_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=1e-4)


def on_a_clock(
    path: Path, steps: list[Step], every_s: float, slowness: Callable[[], float]
) -> list[Step]:
    """The metrics of steps that are slower at times, a line whenever so many seconds are over.

    Returns the steps with the times that they took.
    """
    stats = Stats(Totals(1), slots=16, started_s=0.0)
    lines, taken, now_s, due_s = [], [], 0.0, every_s
    for step in steps:
        taken.append(replace(step, step_s=step.step_s * slowness()))
        now_s += taken[-1].step_s
        stats.observe(taken[-1], now_s)
        if now_s >= due_s:
            due_s = now_s + every_s
            lines.append(json.dumps(metrics_line(stats.snapshot(now_s))))
    lines.append(json.dumps(metrics_line(stats.snapshot(now_s))))
    path.write_text("\n".join(lines) + "\n")
    return taken


def test_a_fit_to_a_noisy_machine_tells_the_time_that_all_steps_took(tmp_path):
    draws = Random(0)
    cost = StepCost(0.03, 0.001, 0.001, 1e-6)
    steps = []
    for _ in range(2000):
        prefill, decodes = draws.choice((0, 0, 90)), draws.randint(1, 16)
        steps.append(
            Step(
                prefill_tokens=prefill,
                decode_tokens=decodes,
                context_tokens=100 * decodes,
                tokens_computed=prefill + decodes,
                batch_size=decodes,
                step_s=cost.seconds(prefill, decodes, 100 * decodes),
            )
        )
    # others take the processor for a while now and then
    slowness = cycle([1.0] * 40 + [3.0] * 25)
    taken = on_a_clock(tmp_path / "m.jsonl", steps, 0.5, lambda: next(slowness))
    found = fit_cost(tmp_path / "m.jsonl").cost
    predicted_s = sum(
        found.seconds(step.prefill_tokens, step.decode_tokens, step.context_tokens)
        for step in taken
    )
    assert predicted_s == pytest.approx(sum(step.step_s for step in taken), rel=0.01)


def test_attending_and_swapping_have_costs_of_their_own(tmp_path):
    stats, lines = Stats(Totals(1), slots=4, started_s=0.0), []
    for prefill, attended, decodes, swapped in (
        (10, 55, 0, 0),
        (10, 955, 1, 4),
        (50, 1275, 2, 0),
        (0, 0, 7, 2),
        (0, 0, 3, 0),
    ):
        step = Step(
            prefill_tokens=prefill,
            attended_tokens=attended,
            decode_tokens=decodes,
            tokens_computed=prefill + decodes,
            batch_size=1,
            swapped_blocks=swapped,
            swap_s=swapped * 0.5,
            step_s=1.0 + 0.02 * prefill + 0.003 * attended + 0.1 * decodes + swapped * 0.5,
        )
        stats.observe(step, 0.0)
        lines.append(json.dumps(metrics_line(stats.snapshot(0.0))))
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    found = fit_cost(tmp_path / "m.jsonl").cost
    assert (found.step_s, found.prefill_token_s) == pytest.approx((1.0, 0.02))
    assert (found.decode_s, found.attended_token_s) == pytest.approx((0.1, 0.003))
    assert found.swapped_block_s == pytest.approx(0.5)


def test_a_run_that_went_on_later_is_fitted_too(tmp_path):
    metrics(tmp_path / "m.jsonl", COST, STEPS[:4])
    found = fit_cost(metrics(tmp_path / "m.jsonl", COST, STEPS[4:])).cost
    assert found.decode_s == pytest.approx(COST.decode_s, rel=1e-4)


def test_steps_that_are_all_alike_give_what_they_cost_together(tmp_path):
    found = fit_cost(metrics(tmp_path / "m.jsonl", COST, [(0, 4, 40)] * 5)).cost
    assert found.seconds(0, 4, 40) == pytest.approx(COST.seconds(0, 4, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 intervals"),
        ("{}\n", "line 1 .* cannot be used"),
        ("not json\n", "line 1 .* cannot be used"),
    ],
)
def test_metrics_that_say_too_little_are_refused(tmp_path, text, message):
    (tmp_path / "m.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        fit_cost(tmp_path / "m.jsonl")


def test_a_simulation_uses_the_fit(tmp_path):
    path = metrics(tmp_path / "m.jsonl", COST, STEPS)
    rows = ["--set", "rows.count=1", "--set", "rows.output=1", "--set", "rows.prompt=10"]
    found = json.loads(run(*rows, "--metrics", str(path), "--json"))
    assert found["simulations"][0]["elapsed_s"] == pytest.approx(COST.seconds(10, 0, 0), rel=1e-4)
    assert "m.jsonl" in found["assumes"]


def test_simulating_imports_neither_torch_nor_the_reading_of_jobs():
    code = (
        "import sys; from jobrunner.cli import cli;"
        "cli(['simulate', 'jobs/simulate/slots.toml', '--json'], standalone_mode=False);"
        "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
