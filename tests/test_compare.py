"""`cbjob compare`: the same rows in several ways, each at its best, and nothing is written."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.cli import cli
from jobrunner.commands import compare_view
from jobrunner.commands.compare import (
    Asked,
    Comparison,
    arriving,
    compare,
    contenders_of,
    read_policies,
    read_rate,
    read_sizes,
)
from jobrunner.commands.compare_model import limits_of
from jobrunner.commands.compare_runs import (
    GENERATE,
    Bench,
    Contender,
    Listed,
    Result,
    in_turns,
    source_of,
    sweep,
)
from jobrunner.commands.compare_texts import Texts, compare_texts, plainly_greedy
from jobrunner.commands.compare_view import as_json, lines, show
from jobrunner.console.snapshot import BandLatency
from jobrunner.engine.scheduler import Limits
from jobrunner.errors import ConfigError
from jobrunner.opening import open_job
from jobrunner.records import Completion, Request, RowId, SampleId, Sampling, Step, TokenLogprob
from tests.fakes import FakeClock
from tests.world import World, fake_engine

GOLDEN = Path(__file__).parent / "golden"
LIMITS = Limits(max_batch_size=4, token_budget=64, chunk_size=64, lookahead=16)
STATIC = Contender("static", "static")
WHOLE = Contender("continuous, whole prompts", "continuous")
CONTINUOUS = Contender("continuous", "continuous", chunked=True)
ASKED = Asked(("static", "dynamic", "continuous"), (2, 4), None, 1, False)
PROMPTS = ["one", "two words", "three", "a rather longer prompt", "five", "six", None]


class NoMemory:
    """A machine that tells nothing of its memory."""

    def begin(self):
        pass

    def peak_bytes(self):
        return None

    def grown_bytes(self):
        return None


class Scripted:
    """An engine that does what it is told."""

    def __init__(self, steps):
        self._steps = steps

    def run(self, requests):
        yield from self._steps

    def partials(self):
        return []


@pytest.fixture
def world(tmp_path, tiny_model):
    world = World(tmp_path, tiny_model)
    world.add_shard("a.parquet", PROMPTS)
    return world


def fake_bench(job, batch_size, requests):
    """A bench on the fake model; `generate` answers as it does alone."""

    def open_engine(contender, limits):
        return fake_engine(batch=limits.max_batch_size)(job)

    return Bench(open_engine, generate=lambda batches: [], memory=NoMemory(), kv_bytes=1000)


def request(index, prompt=(5, 6), most=8, sample=0, **sampling):
    return Request(
        RowId("a", index), list(prompt), Sampling(most, **sampling), sample=sample, samples=1
    )


def run_of(rate, tokens=(7, 8), index=0):
    """A run of one row at so many output tokens a second."""
    asked = request(index)
    done = Completion(
        asked.id, tokens, "length", prompt_tokens=2, queue_s=1.0, prefill_s=0.5, request=asked
    )
    step = Step([done], output_tokens=10, tokens_computed=4, batch_size=1, step_s=1.0, kv_blocks=4)
    clock = iter([0.0, 10 / rate, 10 / rate])
    bench = Bench(
        lambda contender, limits: Scripted([step]),
        generate=lambda batches: [step],
        memory=NoMemory(),
        kv_bytes=1000,
        clock=lambda: next(clock),
    )
    return bench.serve(STATIC, LIMITS, [asked])


def cbjob(world, *options):
    result = CliRunner().invoke(
        cli, ["compare", str(world.job_file), *options], standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_every_policy_gives_the_same_answers_on_the_real_model(world):
    found = json.loads(
        cbjob(world, "--json", "--with-generate", "--batch-sizes", "2,3", "--repeats", "2")
    )
    names = [each["name"] for each in found["contenders"]]
    assert names == ["static", "generate", "dynamic", "continuous, whole prompts", "continuous"]
    assert found["rows"] == 6
    assert found["error_rows"] == 1
    assert found["texts"]["answers"] == 6
    assert found["texts"]["different"] == 0
    static, generate, *ours = found["contenders"]
    tokens = static["output_tokens"]
    assert all(each["output_tokens"] == tokens for each in found["contenders"])
    assert all(len(each["runs_output_tokens_per_s"]) == 2 for each in found["contenders"])
    assert generate["padding_efficiency"] < 1.0 == static["padding_efficiency"]
    assert generate["utilization"] == static["utilization"]
    assert all(each["limits"]["max_batch_size"] in (2, 3) for each in ours)


def test_nothing_is_written(world):
    before = sorted(world.folder.rglob("*"))
    cbjob(world, "--json", "--batch-sizes", "3", "--policies", "continuous")
    assert sorted(world.folder.rglob("*")) == before


def test_a_table_and_one_json_line_are_printed(world, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    printed = cbjob(world, "--batch-sizes", "3", "--policies", "static", "--limit", "4")
    *table, line = printed.splitlines()
    assert json.loads(line)["rows"] == 4
    assert any(row.split()[:1] == ["utilization"] for row in table)
    assert "\x1b" not in printed


def test_rows_that_arrive_over_time_are_all_served(world):
    options = ["--batch-sizes", "4", "--policies", "continuous", "--arrivals", "poisson:200"]
    found = json.loads(cbjob(world, "--json", *options))
    assert found["arrivals"] == "poisson:200"
    assert found["contenders"][0]["rows_done"] == 6


def test_samples_of_a_row_arrive_together_and_rows_in_order():
    rows = [request(index, sample=sample) for index in range(6) for sample in range(2)]
    arrived = arriving(rows, 2.0, seed=1)
    times = [each.arrival_s for each in arrived]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[::2] == times[1::2]
    assert len(set(times)) == 6
    assert arriving(rows, 2.0, seed=1) == arrived


def test_the_sweep_finds_the_best_size_for_each_policy(world):
    comparison = compare(open_job(world.settings()), ASKED, open_bench=fake_bench)
    for result in comparison.results:
        assert [tried.max_batch_size for tried in result.tried] == [2, 4]
        best = max(result.tried, key=lambda tried: tried.output_tokens_per_s)
        assert result.limits.max_batch_size == best.max_batch_size


def test_no_size_is_larger_than_there_are_rows(world):
    asked = replace(ASKED, sizes=(4, 64, 128), policies=("static",))
    (static,) = compare(open_job(world.settings()), asked, open_bench=fake_bench).results
    assert [tried.max_batch_size for tried in static.tried] == [4, 6]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=8, unique=True))
def test_a_sweep_ends_when_two_sizes_in_a_row_were_slower(rates):
    by_size = dict(enumerate(rates, 1))
    best, tried = sweep(list(by_size), by_size.__getitem__)
    # slow and obvious: the best before the first place with two slower ones behind it
    for count in range(1, len(rates) + 1):
        place = rates.index(max(rates[:count]))
        if place < count - 2:
            break
    assert [each.output_tokens_per_s for each in tried] == rates[:count]
    assert best == place + 1


def test_contenders_run_in_turns_and_backwards_every_other_time():
    order = []

    def serve(contender):
        order.append(contender.name)
        return run_of(1)

    in_turns([STATIC, GENERATE, CONTINUOUS], serve, 2)
    assert order == ["static", "generate", "continuous", "continuous", "generate", "static"]


def test_the_run_in_the_middle_counts():
    runs = [run_of(rate) for rate in (5, 1, 3, 2)]
    result = Result(STATIC, LIMITS, (), runs)
    assert result.run.snapshot.output_tokens_per_s == pytest.approx(2)
    assert compare_view.ratios(result, Result(STATIC, LIMITS, (), [run_of(2)] * 4))[
        "output_tokens_per_s"
    ] == pytest.approx(1.25)


def test_the_first_token_is_counted_from_when_a_row_is_there():
    assert run_of(1).first_token.p50_s == pytest.approx(1.5)


def test_without_chunks_nothing_is_ever_cut(world):
    job = open_job(world.settings())
    rows = [request(0, range(30), 9), request(1, range(50), 8), request(2, range(10), 7)]
    limits = limits_of(STATIC, job, 2, rows)
    assert (limits.token_budget, limits.chunk_size) == (39 + 58, 58)
    assert limits_of(CONTINUOUS, job, 2, rows).chunk_size == 512


def test_a_row_never_needs_more_than_the_model_takes(world):
    job = open_job(world.settings("model.max_model_len=40"))
    limits = limits_of(STATIC, job, 1, [request(0, range(30), 100)])
    assert (limits.token_budget, limits.chunk_size) == (40, 40)


def test_a_list_hands_over_its_requests_in_order():
    rows = [request(index) for index in range(5)]
    source = Listed(rows)
    assert [*source.take(2), *source.take(9)] == rows
    assert source.exhausted


def test_only_rows_that_arrive_later_are_held_back():
    now = [request(0), request(1)]
    assert isinstance(source_of(now), Listed)
    assert not source_of([replace(now[0], arrival_s=50.0)]).take(1)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_policies, "static,fastest", "names `fastest`"),
        (read_sizes, "8,0", "names `0`"),
        (read_sizes, "8,x", "names `x`"),
        (read_rate, "poisson:0", "rows a second above 0"),
        (read_rate, "2.5", "must be poisson:RATE"),
    ],
)
def test_wrong_options_are_explained(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("changes", "asked", "message"),
    [
        (["generation.temperature=1.0"], ASKED, "greedy answers"),
        (['generation.stop="x"'], ASKED, "without stop strings"),
        ([], replace(ASKED, policies=("continuous",)), "the batches of static"),
        ([], replace(ASKED, rate=1.0), "all rows being there"),
    ],
)
def test_what_generate_cannot_answer_is_refused(world, changes, asked, message):
    job = open_job(world.settings(*changes))
    with pytest.raises(ConfigError, match=message):
        compare(job, replace(asked, generate=True), open_bench=fake_bench)


def test_rows_that_are_all_errors_are_refused(world):
    world.add_shard("a.parquet", [None, None])
    with pytest.raises(ConfigError, match="no row can be served"):
        compare(open_job(world.settings()), ASKED, open_bench=fake_bench)


def test_generate_comes_right_after_static():
    names = [each.name for each in contenders_of(replace(ASKED, generate=True))]
    assert names[:2] == ["static", "generate"]


def test_greedy_is_what_no_rule_changes():
    assert plainly_greedy(request(0, top_p=0.5, top_k=3, min_p=0.1, stop_ids=frozenset({2})))
    assert not plainly_greedy(request(0, temperature=0.5))
    assert not plainly_greedy(request(0, repetition_penalty=1.1))
    assert not plainly_greedy(request(0, stop=("x",)))


def answers_of(*tokens):
    return {SampleId(RowId("a", index)): list(each) for index, each in enumerate(tokens)}


def texts_of(one, other, gap=0.0):
    """Compare two answers to one row; the model tells the 7 from the 9 by so much."""
    top = ((7, -1.0), (9, -1.0 - gap))
    done = Completion(RowId("a", 0), [7], "length", logprobs=(TokenLogprob(7, -1.0, top),))
    asked = []

    class Likeliest(Scripted):
        def run(self, requests):
            asked.extend(requests.take(9))
            yield from self._steps

    texts = compare_texts(
        "static",
        {"static": answers_of(one), "other": answers_of(other)},
        [request(0)],
        lambda: Likeliest([Step([done])]),
        near_tie=0.1,
    )
    return texts, asked


def test_equal_answers_differ_nowhere():
    texts, _ = texts_of([7, 8], [7, 8])
    assert (texts.answers, len(texts.differences)) == (1, 0)


def test_answers_that_part_at_a_near_tie_are_told_apart_from_wrong_ones():
    near, asked = texts_of([5, 7, 1], [5, 9, 1], gap=0.05)
    assert (near.near_ties, near.beyond) == (1, 0)
    assert near.differences[0].position == 1
    assert asked[0].prompt == [5, 6, 5]
    wrong, _ = texts_of([5, 7], [5, 9], gap=3.0)
    assert (wrong.near_ties, wrong.beyond, wrong.largest_gap) == (0, 1, 3.0)


def test_an_answer_that_stops_early_has_no_gap():
    texts, _ = texts_of([5, 7], [5])
    assert (len(texts.differences), texts.near_ties, texts.beyond) == (1, 0, 0)


def comparison_of(texts=None):
    """Static and continuous over the same two rows, counted by hand."""
    results = []
    for contender, forward_s, batches in ((STATIC, 1.0, (2, 1, 1)), (CONTINUOUS, 0.5, (2, 2))):
        rows = [request(index) for index in range(2)]
        done = [
            Completion(
                row.id,
                [7, 8],
                "length",
                prompt_tokens=10,
                prefill_s=0.25,
                decode_s=4.0,
                longest_gap_s=1.5,
                request=row,
            )
            for row in rows
        ]
        steps = [
            Step(
                completions=done if place == len(batches) - 1 else (),
                prefill_tokens=20 if place == 0 else 0,
                decode_tokens=0 if place == 0 else size,
                output_tokens=size,
                tokens_computed=20 if place == 0 else size,
                batch_size=size,
                running=size,
                kv_blocks=64,
                kv_blocks_used=16,
                forward_s=forward_s,
                step_s=1.0,
            )
            for place, size in enumerate(batches)
        ]
        bench = Bench(
            lambda contender, limits, steps=steps: Scripted(steps),
            generate=lambda batches: [],
            memory=NoMemory(),
            kv_bytes=1 << 30,
            price_per_gpu_hour=3600.0,
            clock=FakeClock(),
        )
        run = replace(bench.serve(contender, LIMITS, rows), peak_bytes=3 << 30, grown_bytes=5 << 20)
        results.append(Result(contender, LIMITS, (), [run]))
    return Comparison(
        job="job",
        model="demo",
        device="cpu",
        dtype="float32",
        rows=2,
        requests=2,
        error_rows=1,
        prompt_tokens=20,
        arrivals="poisson:2",
        kv_bytes=1 << 30,
        results=results,
        texts=texts or Texts("static", 2, (), 1e-3),
    )


def test_the_table_is_as_it_should_be(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with (tmp_path / "table.txt").open("w+") as stream:
        show(comparison_of(), stream)
        stream.seek(0)
        shown = "".join(line.rstrip() + "\n" for line in stream)
    assert shown == (GOLDEN / "compare.txt").read_text()


def test_answers_that_differ_are_said_below_the_table():
    near, _ = texts_of([5, 7], [5, 9], gap=0.05)
    assert lines(comparison_of(near))[-1] == (
        "answers: 1 are not those of static; 1 part at a near tie (gap of logits up to 0.1)"
    )


def test_the_table_tells_latencies_by_priority():
    comparison = comparison_of()
    run = comparison.results[0].run
    bands = (BandLatency(0, 1, 0.5, 0.5, 0.75), BandLatency(2, 1, 4.0, 4.0, 5.0))
    snapshot = replace(run.snapshot, latency_by_priority=bands)
    static = replace(comparison.results[0], runs=[replace(run, snapshot=snapshot)])
    several = replace(comparison, results=[static, comparison.results[1]])
    stream = io.StringIO()
    show(several, stream)
    assert re.search(r"of priority 0, p99 s +0.75 +-", stream.getvalue())
    assert re.search(r"of priority 2, p50 s +4 +-", stream.getvalue())
    found = as_json(several)["contenders"][0]["latency_by_priority"]
    assert [(band["priority"], band["p99_s"]) for band in found] == [(0, 0.75), (2, 5.0)]


def test_all_numbers_are_in_the_json():
    found = as_json(comparison_of())
    static, continuous = found["contenders"]
    wanted = set(
        "rows_per_s output_tokens_per_s total_tokens_per_s utilization padding_efficiency"
        " fused_fraction batch_size_histogram preemptions tokens_recomputed swap_overhead_s"
        " latency_p50_s latency_p95_s latency_p99_s longest_gap_s queue_p50_s prefill_p50_s"
        " first_token_p50_s kv_peak_bytes peak_memory_bytes working_memory_bytes cost_per_row"
        " ratios sweep limits".split()
    )
    assert wanted <= static.keys()
    assert static["kv_peak_bytes"] == 1 << 28
    assert static["ratios"]["output_tokens_per_s"] == 1.0
    assert continuous["ratios"]["output_tokens_per_s"] == pytest.approx((4 / 3) / (4 / 4))
    assert json.dumps(found, allow_nan=False)
