"""Join the parts into one job: rows -> requests -> engine -> completions -> committed results.

The composition root: it knows every part and does no work of its own.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jobrunner.config import Settings
from jobrunner.console.live import Console
from jobrunner.console.stats import Stats
from jobrunner.console.view import summary
from jobrunner.data.claims import (
    Claims,
    Identity,
    device_name,
    holding_device,
    likely_device,
    refuse_busy_device,
)
from jobrunner.data.feed import Feed
from jobrunner.data.fingerprint import remember
from jobrunner.data.input.sources import Reader
from jobrunner.data.layout import RunDirectory
from jobrunner.data.ledger import Ledger
from jobrunner.data.progress import Progress, clean_up
from jobrunner.data.results.outcomes import extras_of
from jobrunner.data.results.parts import Results, Tally
from jobrunner.data.results.result_files import result_suffix
from jobrunner.data.results.retry import mark_retries
from jobrunner.data.suspects import Flight, Suspects, discard_dead_flights
from jobrunner.deadline import Deadline
from jobrunner.engine.arrivals import Arrivals
from jobrunner.error_limits import ErrorLimits
from jobrunner.errors import ExitCode, HungError
from jobrunner.finished import finished_progress, remember_finished
from jobrunner.guard import Guard
from jobrunner.log_file import log_file
from jobrunner.measuring import measure, stats_of
from jobrunner.merging import check_input, merge, provenance
from jobrunner.opening import Job, ReadModel, load_engine, open_job, read_model
from jobrunner.records import Completion, Engine, Partial, Request, Requests, Step
from jobrunner.run_directory import create, telling_if_gone
from jobrunner.stop import Stop

log = logging.getLogger("cbjob")

# tokenised rows that wait between the feed and the engine, beside the engine's own window
WINDOW_ROWS = 256
WINDOW_TOKENS = 1_000_000
# how long a turn may last when there is nothing to do
IDLE_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended: `tally` sums over all finished rows of the job, whichever run did them."""

    exit_code: ExitCode
    rows: int
    tally: Tally
    results: Path


# why a worker leaves that would not end more rows in the time it has
TIME_IS_UP = "the time that this worker has is nearly up"
OpenEngine = Callable[[Job], Engine]
Observe = Callable[[Step], None]


def run(
    settings: Settings,
    *,
    retry_errors: bool = False,
    open_engine: OpenEngine = load_engine,
    read_model: ReadModel = read_model,
    observe: Observe = lambda step: None,
    stop: Stop | None = None,
) -> Summary:
    """Run a job to its end, or until a signal or `stop` asks to leave early.

    Run it again on the same run directory and it goes on; with `retry_errors` the rows that
    became errors run again too. `open_engine` and `read_model` replace the model, `observe` is
    shown every step; whoever gives a `stop` handles signals itself. Raises JobError; what is
    committed stays committed.
    """
    if stop is None:
        stop = Stop()
        with stop.on_signals(settings.checkpoint.grace):
            return run(
                settings,
                retry_errors=retry_errors,
                open_engine=open_engine,
                read_model=read_model,
                observe=observe,
                stop=stop,
            )
    directory = RunDirectory(settings.run_directory, "finished", result_suffix(settings))
    likely = Identity.of_this_process(device_name(likely_device(settings.model.device)))
    finished = finished_progress(directory, settings)
    if finished is not None and not (retry_errors and finished.tally.error_rows):
        # cron may start a finished job again and again: nothing that takes time is loaded
        with Console(settings.progress.style, settings.progress.every):
            _tell_finished(finished, directory)
        # what a worker left that died while another one finished the job
        claims = Claims(directory.claims, directory.temporary, likely)
        clean_up(directory, finished.shards, claims.abandoned, keep_status=True)
        discard_dead_flights(directory, claims.abandoned)
        claims.sweep()
        return _sum_up(finished, directory)
    refuse_busy_device(directory.claims, likely)
    job = open_job(settings, read_model)
    identity = Identity.of_this_process(device_name(job.device))
    directory = RunDirectory(settings.run_directory, identity.worker, result_suffix(settings))
    create(directory)
    fingerprint = job.fingerprint()
    remember(directory, fingerprint)
    claims = Claims(directory.claims, directory.temporary, identity)
    with (
        telling_if_gone(directory),
        holding_device(claims, identity),
        log_file(directory.root / "log.txt"),
        _console(settings, directory, identity) as console,
    ):
        claims.sweep()
        clean_up(directory, job.input.shards, claims.abandoned)
        suspects = Suspects(directory, identity)
        if retry_errors:
            suspects.look()
            suspects.forget()
            log.info("error rows that run again: %s", f"{_retry(directory, job, claims):,}")
        progress = Progress(directory, {s.name: s.rows for s in job.input.shards.values()})
        if progress.complete:
            _tell_finished(progress, directory)
        elif stop.requested:
            log.info("%s: stopped before the first step", stop.reason)
        else:
            ledger = Ledger(
                directory,
                claims,
                progress,
                Results(directory, settings.checkpoint.part_rows, extras_of(settings)),
                job.input.spans,
                merge=partial(merge, job, directory, provenance(job, fingerprint)),
                check_input=partial(check_input, job),
            )
            flight = Flight(directory, identity)
            _work(job, ledger, progress, console, stop, open_engine, observe, flight, suspects)
        if progress.complete:
            # what another worker wrote while this one merged
            clean_up(directory, job.input.shards, claims.abandoned)
            discard_dead_flights(directory, claims.abandoned)
            suspects.forget()
            remember_finished(directory, settings)
        return _sum_up(progress, directory)


def _tell_finished(progress: Progress, directory: RunDirectory) -> None:
    log.info("every row is done: %s", progress.tally)
    log.info("results are in %s", directory.results)


def _work(
    job: Job,
    ledger: Ledger,
    progress: Progress,
    console: Console,
    stop: Stop,
    open_engine: OpenEngine,
    observe: Observe,
    flight: Flight,
    suspects: Suspects,
) -> None:
    """Claim, read, generate and commit until nothing is left or a stop is asked for."""
    settings = job.settings
    shards = list(job.input.shards.values())
    tally = progress.tally
    limits = ErrorLimits(settings.errors, tally.rows, tally.error_rows)
    limits.raise_if_passed()
    deadline = Deadline(settings.checkpoint.grace)
    with ledger, Reader(shards, settings.input.column, job.input.needed) as reader:
        _announce(job, ledger, progress)
        limits_of_machine = measure(job)
        if limits_of_machine is not None:
            console.measured(limits_of_machine)
        engine = open_engine(job)
        stats = stats_of(job, progress, limits_of_machine)
        due = _Every(settings.checkpoint.every)
        requests = _requests(job, ledger, suspects, reader, stats, stop)
        feed = Feed(requests, WINDOW_ROWS, WINDOW_TOKENS, ledger.wanted)
        with _frozen(), feed, flight, _saving_what_was_there(engine, ledger):
            guard = Guard(feed, ledger, flight, suspects)

            def take_back() -> None:
                guard.take_back(engine.withdraw())

            for step in _turns(engine, guard, _replayed(guard, job)):
                guard.finish(step.completions)
                _finish(step.completions, job, ledger, limits)
                _fail(guard.errors(), ledger, limits, stats)
                stats.observe(step, time.monotonic())
                observe(step)
                deadline.observe(step.completions)
                if deadline.too_late(stop.left_s):
                    guard.stop_admitting()
                    take_back()
                if stop.requested or limits.passed:
                    break
                # what an idle worker holds back may be what the others wait for
                if ledger.full or due() or (step.idle and not ledger.empty):
                    ledger.checkpoint(engine.partials())
                    _count_others(stats, progress)
                _tell_merged(ledger.tick())
                idle = guard.wants_more and step.waiting == 0
                if ledger.share(idle=idle, take_back=take_back):
                    feed.drop_unwanted()
                console.update(stats)
            _fail(guard.errors(), ledger, limits, stats)
            in_flight = engine.partials()
            ledger.checkpoint(in_flight)
            # the feed may not have heard yet that these rows were the last
            if guard.left_over and progress.rows_done < progress.rows:
                stop.request(TIME_IS_UP)
        if stop.requested:
            _tell_stopped(stop, progress, in_flight)
        elif not limits.passed:
            for merged in ledger.settle(stop.wait):
                _tell_merged(merged)
                _count_others(stats, progress)
                console.update(stats)
        _count_others(stats, progress)
        results = settings.run_directory / "results"
        parquet = result_suffix(settings) == ".parquet"
        said = summary(stats.snapshot(time.monotonic()), results, parquet=parquet)
        console.finish(stats, said)
    limits.raise_if_passed()


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep what is imported and loaded out of garbage collections: each walks over it for 0.4 s."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _saving_what_was_there(engine: Engine, ledger: Ledger) -> Iterator[None]:
    """Save what a device gave before it hung."""
    try:
        yield
    except HungError:
        ledger.checkpoint(engine.partials())
        raise


def _turns(engine: Engine, guard: Guard, requests: Requests) -> Iterator[Step]:
    """Let the engine go on until nothing can come any more, not only until nothing is there.

    While other workers hold what is left, it need not wait for them to fill a batch.
    """
    while True:
        yield from engine.run(requests)
        if guard.ended:
            return
        # the caller commits what is finished, which may be the last that is left
        yield Step()
        guard.wait(IDLE_WAIT_S)


def _replayed(requests: Requests, job: Job) -> Requests:
    """Hold rows back until they arrive, where the input says when that is."""
    return requests if job.settings.input.arrival is None else Arrivals(requests)


def _retry(directory: RunDirectory, job: Job, claims: Claims) -> int:
    return mark_retries(directory, job.input.shards, claims)


def _console(settings: Settings, directory: RunDirectory, identity: Identity) -> Console:
    shown = settings.progress
    return Console(
        shown.style,
        shown.every,
        directory.root / "metrics.jsonl" if shown.metrics else None,
        status_path=directory.status / f"{identity.worker}.json",
        identity={"worker": identity.worker, "host": identity.host, "pid": identity.pid},
    )


def _tell_stopped(stop: Stop, progress: Progress, in_flight: Sequence[Partial]) -> None:
    rows = {saved.id for saved in in_flight}
    log.info(
        "%s: saved; %s rows are done, %s more have %s tokens",
        stop.reason,
        f"{progress.rows_done:,}",
        f"{len(rows):,}",
        f"{sum(len(saved.tokens) for saved in in_flight):,}",
    )


def _announce(job: Job, ledger: Ledger, progress: Progress) -> None:
    """Say what is about to be done, and what will surprise."""
    rows, tokens = ledger.saved()
    log.info(
        "%s: %s of %s rows are done, %s more have %s tokens saved",
        job.settings.job.name,
        f"{progress.rows_done:,}",
        f"{progress.rows:,}",
        f"{rows:,}",
        f"{tokens:,}",
    )
    log.info("generation: %s", _spelled(job.prompts.effective))
    for warning in job.warnings():
        log.warning("%s", warning)
    log.info("loading the model from %s", job.model_folder)


def _spelled(values: Mapping[str, object]) -> str:
    """Parameters as they would stand in a job file, without those that are not set."""
    return ", ".join(
        f"{key} {json.dumps(value, ensure_ascii=False)}"
        for key, value in values.items()
        if value is not None
    )


def _requests(
    job: Job, ledger: Ledger, suspects: Suspects, reader: Reader, stats: Stats, stop: Stop
) -> Iterator[list[Request | Completion]]:
    """Claim spans and turn their rows into requests; pulled by the feed's thread."""
    for assignment in ledger.assignments(stop.wait):
        if assignment is None:
            # a chance for the feed to end while other workers hold what is left
            yield []
            continue
        # what is taken over from a worker that died may be what it died of
        suspects.look()
        stats.shard_started(assignment.span.shard)
        for rows in reader.read(assignment.span, skip=assignment.done):
            mine = [row for row in rows if ledger.wanted(row.id)]
            if not mine:
                # the rest of the span was given away
                break
            yield job.prompts.encode(mine, assignment.partials)


def _finish(
    completions: Iterable[Completion], job: Job, ledger: Ledger, limits: ErrorLimits
) -> None:
    for completion in completions:
        text = None if completion.error else job.prompts.text(completion)
        limits.count(ledger.finish(completion, text, _prompt_text(completion, job)))


def _prompt_text(completion: Completion, job: Job) -> str | None:
    if completion.request is None or "prompt_text" not in job.settings.output.columns:
        return None
    return job.prompts.prompt_text(completion.request)


def _fail(failed: Iterable[Completion], ledger: Ledger, limits: ErrorLimits, stats: Stats) -> None:
    """Book rows that failed before they became a request."""
    for completion in failed:
        limits.count(ledger.finish(completion, None))
        if completion.error is not None:
            stats.row_failed(completion.error, completion.id)


def _tell_merged(shards: Iterable[str]) -> None:
    for shard in shards:
        log.info("finished shard %s", shard)


def _count_others(stats: Stats, progress: Progress) -> None:
    """Count what other workers have done, as far as this one has read it."""
    stats.known(progress.rows_done, progress.shards_merged)


class _Every:
    """Tells, when called, whether so many seconds have passed since it last said yes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last_s = time.monotonic()

    def __call__(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._last_s < self._seconds:
            return False
        self._last_s = now_s
        return True


def _sum_up(progress: Progress, directory: RunDirectory) -> Summary:
    tally = progress.tally
    exit_code = ExitCode.RUN_AGAIN
    if progress.complete:
        exit_code = ExitCode.ROW_ERRORS if tally.error_rows else ExitCode.OK
    return Summary(exit_code, progress.rows, tally, directory.results)
