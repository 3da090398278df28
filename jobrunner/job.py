"""Join the parts into one job: rows -> requests -> engine -> completions -> committed results.

The composition root: it knows every part and does no work of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jobrunner.config import Settings
from jobrunner.console.live import Console
from jobrunner.console.stats import Stats, Totals
from jobrunner.console.view import summary
from jobrunner.data.claims import Claims, Identity, device_name, holding_device
from jobrunner.data.feed import Feed
from jobrunner.data.fingerprint import remember
from jobrunner.data.inputs import Input, open_input
from jobrunner.data.layout import RunDirectory
from jobrunner.data.ledger import Ledger
from jobrunner.data.merge import merge_shard
from jobrunner.data.models import model_fingerprint, resolve_model
from jobrunner.data.progress import Progress, clean_up
from jobrunner.data.prompts import Prompts
from jobrunner.data.results import Results, Tally
from jobrunner.data.shards import check_unchanged
from jobrunner.data.sources import Reader, read_columns
from jobrunner.errors import ConfigError, ExitCode, InfrastructureError
from jobrunner.records import Completion, Engine, Request, Step
from jobrunner.stop import Stop

log = logging.getLogger("cbjob")

# tokenised rows that wait between the feed and the engine, beside the engine's own window
WINDOW_ROWS = 256
WINDOW_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """Settings that have met their input and their model. No weights are loaded yet."""

    settings: Settings
    input: Input
    prompts: Prompts
    model_folder: Path
    device: str
    dtype: str
    max_model_len: int

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides what the results say."""
        settings = self.settings
        model = {f"model file `{k}`": v for k, v in model_fingerprint(self.model_folder).items()}
        return {
            **self.input.fingerprint(),
            **model,
            **self.prompts.describe(),
            "input.prompt": settings.input.prompt,
            "input.messages": settings.input.messages,
            "input.keep": list(settings.input.keep),
            "--limit": settings.limit,
            "model.dtype": self.dtype,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended: `tally` sums over all finished rows of the job, whichever run did them."""

    exit_code: ExitCode
    rows: int
    tally: Tally
    results: Path


OpenEngine = Callable[[Job], Engine]
Observe = Callable[[Step], None]


def run(
    settings: Settings,
    *,
    open_engine: OpenEngine | None = None,
    observe: Observe = lambda step: None,
    stop: Stop | None = None,
) -> Summary:
    """Run a job to its end, or until a signal or `stop` asks to leave early.

    Run it again on the same run directory and it goes on. `open_engine` replaces the model,
    `observe` is shown every step; whoever gives a `stop` handles signals itself. Raises
    JobError; what is committed stays committed.
    """
    if stop is None:
        stop = Stop()
        with stop.on_signals(settings.checkpoint.grace):
            return run(settings, open_engine=open_engine, observe=observe, stop=stop)
    job = open_job(settings)
    identity = Identity.of_this_process(device_name(job.device))
    directory = RunDirectory(settings.run_directory, identity.worker)
    _create(directory)
    remember(directory, job.fingerprint())
    claims = Claims(directory.claims, directory.temporary, identity)
    shown = settings.progress
    metrics = directory.root / "metrics.jsonl" if shown.metrics else None
    with (
        holding_device(claims, identity),
        _log_file(directory.root / "log.txt"),
        Console(shown.style, shown.every, metrics) as console,
    ):
        claims.sweep()
        clean_up(directory, job.input.shards, claims.is_dead)
        progress = Progress(directory, {s.name: s.rows for s in job.input.shards.values()})
        if progress.complete:
            log.info("every row is done: %s", progress.tally)
            log.info("results are in %s", directory.results)
        elif stop.requested:
            log.info("%s: stopped before the first step", stop.reason)
        else:
            ledger = Ledger(
                directory,
                claims,
                progress,
                Results(directory, settings.checkpoint.part_rows),
                job.input.spans,
                merge=partial(_merge, job, directory),
                check_input=partial(_check_input, job),
            )
            _work(job, ledger, progress, console, stop, open_engine or load_engine, observe)
        if progress.complete:
            # what another worker wrote while this one merged
            clean_up(directory, job.input.shards, claims.is_dead)
        return _sum_up(progress, directory)


def open_job(settings: Settings) -> Job:
    """Bring settings, input and model together. Everything but the weights is checked here."""
    from jobrunner.engine.loading import read_model_info

    generation = settings.generation
    job_input = open_input(settings)
    folder = resolve_model(settings.model.name, settings.folder)
    info = read_model_info(
        folder,
        device=settings.model.device,
        dtype=settings.model.dtype,
        max_model_len=settings.model.max_model_len,
    )
    prompts = Prompts(
        folder,
        kind="prompt" if settings.input.prompt is not None else "messages",
        system=settings.input.system,
        chat=settings.input.chat,
        max_model_len=info.max_model_len,
        job_seed=settings.job.seed,
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        stop=generation.stop,
        stop_token_ids=generation.stop_token_ids,
        ignore_eos=generation.ignore_eos,
        seed=generation.seed,
    )
    return Job(settings, job_input, prompts, folder, info.device, info.dtype, info.max_model_len)


def load_engine(job: Job) -> Engine:
    """Load the model and build the engine that the settings ask for."""
    from jobrunner.engine.loading import open_engine

    model, batching = job.settings.model, job.settings.batching
    # what the settings leave open is resolved again, as for the job, and logged this time
    loaded = open_engine(
        job.model_folder,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        max_model_len=model.max_model_len,
        max_batch_size=batching.max_batch_size,
        token_budget=batching.token_budget,
        chunk_size=batching.chunk_size,
        block_size=batching.block_size,
        kv_memory=batching.kv_memory,
        prefix_cache=batching.prefix_cache,
        lookahead=batching.lookahead,
        open_text=job.prompts.open_text,
    )
    return loaded.engine


def _work(
    job: Job,
    ledger: Ledger,
    progress: Progress,
    console: Console,
    stop: Stop,
    open_engine: OpenEngine,
    observe: Observe,
) -> None:
    """Claim, read, generate and commit until nothing is left or a stop is asked for."""
    settings = job.settings
    shards = list(job.input.shards.values())
    with ledger, Reader(shards, settings.input.column) as reader:
        _announce(job, ledger, progress)
        engine = open_engine(job)
        stats = Stats(_totals(progress, job), slots=_slots(job), started_s=time.monotonic())
        due = _Every(settings.checkpoint.every)
        requests = _requests(job, ledger, reader, stats, stop)
        with Feed(requests, max_rows=WINDOW_ROWS, max_tokens=WINDOW_TOKENS) as feed:
            for step in engine.run(feed):
                _finish(step.completions, job, ledger)
                _fail(feed.errors(), ledger, stats)
                stats.observe(step, time.monotonic())
                observe(step)
                if stop.requested:
                    break
                # what an idle worker holds back may be what the others wait for
                if ledger.full or due() or (step.idle and not ledger.empty):
                    ledger.checkpoint(engine.partials())
                    _count_others(stats, progress)
                _tell_merged(ledger.tick())
                console.update(stats)
            _fail(feed.errors(), ledger, stats)
        in_flight = engine.partials()
        ledger.checkpoint(in_flight)
        if stop.requested:
            tokens = sum(len(saved.tokens) for saved in in_flight)
            log.info(
                "%s: saved; %s rows are done, %s more have %s tokens",
                stop.reason,
                f"{progress.rows_done:,}",
                f"{len(in_flight):,}",
                f"{tokens:,}",
            )
        else:
            for merged in ledger.settle(stop.wait):
                _tell_merged(merged)
                _count_others(stats, progress)
                console.update(stats)
        _count_others(stats, progress)
        results = settings.run_directory / "results"
        console.finish(stats, summary(stats.snapshot(time.monotonic()), results))


def _announce(job: Job, ledger: Ledger, progress: Progress) -> None:
    """Say what is about to be done, and what will surprise."""
    settings = job.settings
    rows, tokens = ledger.saved()
    log.info(
        "%s: %s of %s rows are done, %s more have %s tokens saved",
        settings.job.name,
        f"{progress.rows_done:,}",
        f"{progress.rows:,}",
        f"{rows:,}",
        f"{tokens:,}",
    )
    wanted = settings.generation.max_new_tokens
    if wanted >= job.max_model_len:
        log.warning(
            "max_new_tokens is %s, the model's context %s: texts end there",
            f"{wanted:,}",
            f"{job.max_model_len:,}",
        )
    if job.input.strange_column:
        log.warning("%s: such rows become bad_type errors", job.input.strange_column)
    log.info("loading the model from %s", job.model_folder)


def _requests(
    job: Job, ledger: Ledger, reader: Reader, stats: Stats, stop: Stop
) -> Iterator[list[Request | Completion]]:
    """Claim spans and turn their rows into requests; pulled by the feed's thread."""
    for assignment in ledger.assignments(stop.wait):
        if assignment is None:
            # a chance for the feed to end while other workers hold what is left
            yield []
            continue
        stats.shard_started(assignment.span.shard)
        for rows in reader.read(assignment.span, skip=assignment.done):
            yield job.prompts.encode(rows, assignment.partials)


def _finish(completions: Iterable[Completion], job: Job, ledger: Ledger) -> None:
    for completion in completions:
        ledger.finish(completion, None if completion.error else job.prompts.text(completion))


def _fail(failed: Iterable[Completion], ledger: Ledger, stats: Stats) -> None:
    """Book rows that failed before they became a request."""
    for completion in failed:
        ledger.finish(completion, None)
        if completion.error is not None:
            stats.row_failed(completion.error)


def _tell_merged(shards: Iterable[str]) -> None:
    for shard in shards:
        log.info("finished shard %s", shard)


def _count_others(stats: Stats, progress: Progress) -> None:
    """Count what other workers have done, as far as this one has read it."""
    stats.known(progress.rows_done, progress.shards_merged)


def _check_input(job: Job, shard: str) -> None:
    check_unchanged(job.input.shards[shard], job.input.fingerprints[shard])


def _merge(job: Job, directory: RunDirectory, name: str) -> Tally:
    shard = job.input.shards[name]
    _check_input(job, name)
    kept = partial(read_columns, shard, list(job.settings.input.keep))
    return merge_shard(directory, name, shard.rows, kept, job.input.kept_schema)


def _create(directory: RunDirectory) -> None:
    try:
        directory.create()
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"`output.path` cannot be a folder: `{error.filename}` is a file",
            hint="choose another output.path",
        ) from error
    except OSError as error:
        raise InfrastructureError(
            f"cannot make the run directory `{directory.root}`: {error.strerror}",
            hint="check the path and its permissions, or choose another output.path",
        ) from error


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = _LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


class _LogFile(logging.FileHandler):
    """Fails as any other file does: logging would print a traceback and go on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        raise


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


def _totals(progress: Progress, job: Job) -> Totals:
    return Totals(
        rows=progress.rows,
        rows_done_before=progress.rows_done,
        errors_before=progress.tally.error_rows,
        shards=len(job.input.shards),
        shards_done_before=progress.shards_merged,
    )


def _slots(job: Job) -> int | None:
    size = job.settings.batching.max_batch_size
    return size if isinstance(size, int) else None


def _sum_up(progress: Progress, directory: RunDirectory) -> Summary:
    tally = progress.tally
    exit_code = ExitCode.RUN_AGAIN
    if progress.complete:
        exit_code = ExitCode.ROW_ERRORS if tally.error_rows else ExitCode.OK
    return Summary(exit_code, progress.rows, tally, directory.results)
