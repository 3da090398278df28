"""`cbjob compare`: the rows of a job through each policy on the real model, side by side.

Joins job, model and engine with what measures them. Writes no results and no run directory.
"""

from __future__ import annotations

import json as json_module
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import get_args

import click

from jobrunner.commands.compare_model import limits_of, open_bench
from jobrunner.commands.compare_runs import (
    GENERATE,
    Bench,
    Contender,
    PolicyName,
    Result,
    Run,
    Tried,
    in_turns,
    sweep,
)
from jobrunner.commands.compare_texts import NEAR_TIE, Texts, compare_texts, plainly_greedy
from jobrunner.commands.compare_view import as_json, show
from jobrunner.commands.run import share_the_cores
from jobrunner.data.input.sources import Reader
from jobrunner.engine.arrivals import poisson_arrivals
from jobrunner.engine.scheduler import Limits
from jobrunner.errors import ConfigError, ExitCode
from jobrunner.jobfile import load_settings
from jobrunner.opening import Job, open_job
from jobrunner.records import Completion, Request

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
# what the sweep tries where the command line names nothing
SIZES = {"cpu": (8, 16, 32, 64, 128), "cuda": (32, 64, 128, 256, 512)}
# rows that the sweep serves
SWEEP_ROWS = 96
# what nobody counts, because machines start slowly
WARM_UP_ROWS, WARM_UP_TOKENS = 8, 8
_POISSON = re.compile(r"poisson:(\d+(?:\.\d+)?)")

Say = Callable[[str], None]
OpenBench = Callable[[Job, int, Sequence[Request]], Bench]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for. `sizes` empty: the usual ones; `rate` rows a second."""

    policies: Sequence[PolicyName]
    sizes: Sequence[int]
    rate: float | None
    repeats: int
    generate: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that is shown: the rows that were served, and what came of each contender."""

    job: str
    model: str
    device: str
    dtype: str
    rows: int
    requests: int
    error_rows: int
    prompt_tokens: int
    arrivals: str | None
    kv_bytes: int
    results: Sequence[Result]
    texts: Texts


def compare_command(
    job: Path,
    *,
    limit: int | None,
    overrides: Sequence[str],
    policies: str,
    sizes: str,
    arrivals: str | None,
    repeats: int,
    generate: bool,
    json: bool,
) -> int:
    """Serve the rows in each way and print the numbers; exit code 0."""
    asked = Asked(
        read_policies(policies), read_sizes(sizes), read_rate(arrivals), repeats, generate
    )
    share_the_cores()
    opened = open_job(load_settings(job, overrides, limit))
    comparison = compare(opened, asked, say=lambda line: click.echo(line, err=True))
    if json:
        click.echo(json_module.dumps(as_json(comparison), allow_nan=False))
    else:
        show(comparison, sys.stdout)
        click.echo(json_module.dumps(as_json(comparison), allow_nan=False))
    return ExitCode.OK


def read_policies(text: str) -> Sequence[PolicyName]:
    """The policies of `--policies`, in the order of the table. Raises ConfigError."""
    named = [name.strip() for name in text.split(",")]
    if unknown := [name for name in named if name not in POLICIES]:
        raise ConfigError(
            f"`--policies` names `{unknown[0]}`, which is none",
            hint=f"a list out of {', '.join(POLICIES)}",
        )
    return [name for name in POLICIES if name in named]


def read_sizes(text: str) -> Sequence[int]:
    """The batch sizes of `--batch-sizes`; empty where it is. Raises ConfigError."""
    named = [size.strip() for size in text.split(",")] if text else []
    if wrong := [size for size in named if not size.isdecimal() or int(size) < 1]:
        raise ConfigError(
            f"`--batch-sizes` names `{wrong[0]}`, which is no number of rows",
            hint="for example --batch-sizes 8,16,32",
        )
    return sorted({int(size) for size in named})


def read_rate(arrivals: str | None) -> float | None:
    """Rows a second of `--arrivals`. Raises ConfigError."""
    if arrivals is None:
        return None
    match = _POISSON.fullmatch(arrivals)
    if match is None or float(match[1]) == 0:
        raise ConfigError(
            f"`--arrivals {arrivals}` must be poisson:RATE with rows a second above 0",
            hint="for example --arrivals poisson:2.5",
        )
    return float(match[1])


def contenders_of(asked: Asked) -> list[Contender]:
    """What is compared: `generate` right after static, whose batches it answers."""
    found = []
    for policy in asked.policies:
        if policy == "continuous":
            found.append(Contender("continuous, whole prompts", policy))
        # without chunks static and dynamic are what they are elsewhere
        found.append(Contender(policy, policy, chunked=policy == "continuous"))
        if policy == "static" and asked.generate:
            found.append(GENERATE)
    return found


def compare(
    job: Job,
    asked: Asked,
    *,
    say: Say = lambda line: None,
    open_bench: OpenBench = open_bench,
) -> Comparison:
    """Load the model once and serve the rows in every way that is asked for.

    `open_bench` replaces the model.
    """
    encoded = read_requests(job)
    requests = [each for each in encoded if isinstance(each, Request)]
    check_requests(requests, asked)
    sizes = sizes_for(asked, job, requests)
    bench = open_bench(job, max(sizes), requests)
    results = _Compared(job, asked, bench, requests, sizes, say).results()
    texts = compare_texts(
        results[0].contender.name,
        {result.contender.name: result.run.answers for result in results},
        requests,
        lambda: bench.open_engine(Contender("alone", "continuous"), results[0].limits),
        NEAR_TIE[job.dtype],
    )
    return Comparison(
        job=job.settings.job.name,
        model=job.settings.model.name,
        device=job.device,
        dtype=job.dtype,
        rows=len({request.id for request in requests}),
        requests=len(requests),
        error_rows=sum(isinstance(each, Completion) for each in encoded),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        arrivals=None if asked.rate is None else f"poisson:{asked.rate:g}",
        kv_bytes=bench.kv_bytes,
        results=results,
        texts=texts,
    )


def read_requests(job: Job) -> list[Request | Completion]:
    """Read and tokenise every row once."""
    shards = list(job.input.shards.values())
    with Reader(shards, job.settings.input.column, job.input.needed) as reader:
        batches = (rows for span in job.input.spans for rows in reader.read(span))
        return list(chain.from_iterable(job.prompts.encode(rows, {}) for rows in batches))


def check_requests(requests: Sequence[Request], asked: Asked) -> None:
    """Raise ConfigError where these rows cannot be compared like this."""
    if not requests:
        raise ConfigError(
            "no row can be served",
            hint="`cbjob check JOB --rows` tells why",
        )
    if not asked.generate:
        return
    if "static" not in asked.policies or asked.rate is not None:
        raise ConfigError(
            "`--with-generate` answers the batches of static, all rows being there",
            hint="add static to --policies and drop --arrivals",
        )
    if not all(map(plainly_greedy, requests)):
        raise ConfigError(
            "`--with-generate` compares greedy answers without stop strings and penalties",
            hint="set generation.temperature=0 and drop what else changes the choice of tokens",
        )
    if len({request.sampling.stop_ids for request in requests}) > 1:
        raise ConfigError(
            "`--with-generate` needs rows that all end with the same tokens",
            hint="set ignore_eos for all rows or for none",
        )


def sizes_for(asked: Asked, job: Job, requests: Sequence[Request]) -> Sequence[int]:
    """The batch sizes to try: none is larger than there are rows."""
    sizes = asked.sizes or SIZES[job.device.partition(":")[0]]
    return sorted({min(size, len(requests)) for size in sizes})


def arriving(requests: Sequence[Request], rate_per_s: float, seed: int) -> list[Request]:
    """Let rows arrive at random, in their order, all samples of a row at once."""
    times = poisson_arrivals(rate_per_s, seed)
    arrives = {row: next(times) for row in dict.fromkeys(each.id for each in requests)}
    return [replace(request, arrival_s=arrives[request.id]) for request in requests]


@dataclass(frozen=True, slots=True)
class _Compared:
    """Sweeps and runs all contenders over the same requests."""

    job: Job
    asked: Asked
    bench: Bench
    requests: Sequence[Request]
    sizes: Sequence[int]
    say: Say

    def results(self) -> list[Result]:
        contenders = contenders_of(self.asked)
        self._warm_up(contenders[0])
        swept = {each: self._sweep(each) for each in contenders if each != GENERATE}
        best = {each: size for each, (size, _) in swept.items()}
        limits = {each: self._limits(each, size) for each, size in best.items()}
        rows = self.requests
        if self.asked.rate is not None:
            rows = arriving(rows, self.asked.rate, self.job.settings.job.seed)
        batches: Sequence[Sequence[Request]] = ()

        def serve(contender: Contender) -> Run:
            nonlocal batches
            self.say(f"{contender.name}: {len(rows):,} requests")
            if contender == GENERATE:
                return self.bench.answer(static, batches)
            run = self.bench.serve(contender, limits[contender], rows)
            if contender.policy == "static":
                batches = run.batches
            return run

        static = limits[contenders[0]]
        runs = in_turns(contenders, serve, self.asked.repeats)
        return [
            Result(
                contender,
                limits.get(contender, static),
                swept[contender][1] if contender in swept else (),
                runs[contender],
            )
            for contender in contenders
        ]

    def _warm_up(self, contender: Contender) -> None:
        few = [
            replace(
                request,
                arrival_s=0.0,
                sampling=replace(request.sampling, max_new_tokens=WARM_UP_TOKENS, min_new_tokens=0),
            )
            for request in self.requests[:WARM_UP_ROWS]
        ]
        self.bench.serve(contender, self._limits(contender, self.sizes[0]), few)

    def _sweep(self, contender: Contender) -> tuple[int, Sequence[Tried]]:
        if len(self.sizes) == 1:
            return self.sizes[0], ()
        # evenly out of all rows, all there at once: what is asked is how fast it can be
        step = max(1, len(self.requests) // SWEEP_ROWS)
        rows = [replace(request, arrival_s=0.0) for request in self.requests[::step]][:SWEEP_ROWS]

        def tokens_per_s(size: int) -> float:
            run = self.bench.serve(contender, self._limits(contender, size), rows)
            rate = run.snapshot.output_tokens_per_s
            self.say(f"{contender.name}: batch size {size}: {rate:,.1f} output tokens/s")
            return rate

        return sweep(self.sizes, tokens_per_s)

    def _limits(self, contender: Contender, size: int) -> Limits:
        return limits_of(contender, self.job, size, self.requests)
