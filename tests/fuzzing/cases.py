"""Run one drawn job through its lives and check what came of it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from jobrunner import job as jobs
from jobrunner.commands.verify import find_problems
from jobrunner.config import Settings
from jobrunner.data.layout import RunDirectory
from jobrunner.data.openai.reading import ERRORS_SUFFIX, RESPONSES_SUFFIX
from jobrunner.data.results.result_files import result_suffix
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.engine import Engine
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.errors import ExitCode, JobError
from jobrunner.jobfile import load_settings
from jobrunner.opening import Job, load_engine
from jobrunner.records import ErrorKind, FinishReason, Step
from jobrunner.stop import Stop
from tests.fakes import FakeRunner
from tests.fuzzing.corpus import Corpus
from tests.fuzzing.jobs import DrawnJob, EngineLimits, Life, draw_job
from tests.fuzzing.reference import BROKEN, UNKNOWN, read_input, read_result, read_strict_lines

REFUSALS = (ExitCode.USAGE, ExitCode.TOO_MANY_ERRORS, ExitCode.INFRASTRUCTURE)
# an unreadable record is one of these
_UNREADABLE = ("bad_text", "bad_type")
_OUTCOME = "row status text finish_reason error_kind error prompt_tokens output_tokens".split()
_COMPARED = [*_OUTCOME, "id", "truncated_tokens", "token_ids", "logprobs", "samples"]
_END_TOKEN = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A tiny model that is fine to run and to pretend: its folder and the ids it may answer."""

    folder: Path
    vocabulary: int


@dataclass(slots=True)
class Report:
    """What a case did: rows that were answered or explained, starts that ended early, faults."""

    number: int
    kind: str = ""
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.ok + sum(self.errors.values())


def run_case(
    number: int,
    seed: int,
    folder: Path,
    corpus: Corpus,
    model: Model,
    *,
    tiny: bool = False,
    most_rows: int = 2500,
) -> Report:
    """Draw case `number` of a campaign into an empty folder, run it and check it.

    With `tiny` the model computes; else a fake one answers. Whatever is wrong is a problem of
    the report; nothing is raised.
    """
    report = Report(number)
    try:
        rng = random.Random(f"{seed} {number} {tiny}")
        drawn = draw_job(folder, rng, corpus, model.folder, model.vocabulary, most_rows)
        report.kind = drawn.kind
        _Case(drawn, report, model, tiny=tiny).run()
    except Exception:  # noqa: BLE001 - this is what the campaign looks for
        report.problems.append(traceback.format_exc())
    return report


class _Case:
    def __init__(self, drawn: DrawnJob, report: Report, model: Model, *, tiny: bool) -> None:
        self._drawn = drawn
        self._report = report
        self._model = model
        self._tiny = tiny
        self._overrides: list[str] = []
        self._ran = False

    def run(self) -> None:
        code = ExitCode.RUN_AGAIN
        for life in self._drawn.lives:
            ended = self._live(life)
            if ended is None:
                return
            code = ended
        if not self._ended_well(code):
            return
        self._check(code)
        if self._drawn.retry and not self._report.problems:
            self._retry()
        if len(self._drawn.lives) > 1 and not self._tiny and not self._report.problems:
            self._compare_with_peace()

    # ---- lives

    def _live(self, life: Life) -> ExitCode | None:
        """Start the job once; None where it is refused."""
        self._report.ends[life.end] += 1
        if life.end == "kill":
            return self._in_child(life)
        return self._start(life)

    def _start(self, life: Life, *, retry: bool = False) -> ExitCode | None:
        try:
            return self._run_job(life, retry=retry)
        except JobError as error:
            return self._refused(error, life)

    def _refused(self, error: JobError, life: Life) -> ExitCode | None:
        if not str(error).strip() or error.exit_code not in REFUSALS:
            self._fault(f"ends with {error.exit_code!r}: {str(error)!r}")
        if error.exit_code == ExitCode.TOO_MANY_ERRORS and not self._overrides:
            self._report.ends["too many errors"] += 1
            self._overrides = ["errors.max_rate=1.0", "errors.max_count=2147483647"]
            return self._start(life)
        if error.exit_code == ExitCode.USAGE and self._ran:
            self._fault(f"a job that ran before is refused now: {error}")
        if error.exit_code == ExitCode.INFRASTRUCTURE and not self._drawn.mutated:
            self._fault(f"an infrastructure fault with sound files: {error}")
        self._report.refusals.append(f"{error.exit_code.value}: {shape(str(error))}")
        self._check_remains()
        return None

    def _run_job(self, life: Life, *, retry: bool = False) -> ExitCode:
        stop, steps = Stop(), 0

        def observe(step: Step) -> None:
            nonlocal steps
            self._ran = True
            steps += not step.idle
            if life.end == "stop" and steps >= life.steps:
                stop.request("fuzz")
            if life.end == "kill" and steps >= life.steps:
                os.kill(os.getpid(), signal.SIGKILL)

        summary = jobs.run(
            self._settings(),
            retry_errors=retry,
            open_engine=self._engine(life.limits),
            observe=observe,
            stop=stop,
        )
        return summary.exit_code

    def _in_child(self, life: Life) -> ExitCode | None:
        pid = os.fork()
        if pid == 0:
            try:
                self._run_job(life)
                os._exit(0)
            except JobError as error:
                os._exit(error.exit_code)
            except BaseException:  # noqa: BLE001 - a child must never return into its parent
                (self._drawn.folder / "crash.txt").write_text(traceback.format_exc())
                os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._ran = self._ran or code in (0, -signal.SIGKILL)
        if code not in (0, -signal.SIGKILL, *REFUSALS):
            crash = self._drawn.folder / "crash.txt"
            self._fault(f"a child ended with {code}: {crash.read_text() if crash.exists() else ''}")
        return ExitCode.RUN_AGAIN

    def _engine(self, limits: EngineLimits) -> Callable[[Job], Any]:
        if self._tiny:
            return load_engine
        vocabulary = range(self._model.vocabulary)

        def open_engine(job: Job) -> Engine:
            runner = FakeRunner(
                limits.block_size,
                vocabulary=vocabulary,
                stop_id=_END_TOKEN,
                output_length=lambda prompt: 1 + sum(prompt) % 20,
            )
            count = max(1, limits.capacity_tokens // limits.block_size)
            blocks = Blocks(count, limits.block_size, limits.prefix_cache)
            bounds = Limits(limits.batch, limits.budget, limits.chunk, limits.lookahead)
            return Engine(Scheduler(blocks, bounds, job.prompts.open_text), runner)

        return open_engine

    def _retry(self) -> None:
        """Let the errors run again: the same answers come of it."""
        before = self._results()
        code = self._start(self._drawn.lives[-1], retry=True)
        self._report.ends["retry"] += 1
        if code is not None and self._ended_well(code):
            self._check_problems()
            if self._results() != before:
                self._fault("after --retry-errors the results differ")

    def _compare_with_peace(self) -> None:
        """Run the job again in another folder, in one go: the same answers come of it."""
        before = self._results()
        self._overrides = [*self._overrides, 'output.path="peace"']
        code = self._start(self._drawn.lives[-1])
        self._report.ends["compared"] += 1
        if code is not None and self._results() != before:
            self._fault("the results differ from those of a run in peace")

    # ---- checks

    def _ended_well(self, code: ExitCode) -> bool:
        if code in (ExitCode.OK, ExitCode.ROW_ERRORS):
            return True
        self._fault(f"the last start ended with {code!r}")
        return False

    def _check(self, code: ExitCode) -> None:
        self._check_problems()
        left = self._drawn.limit
        for shard, path in sorted(self._drawn.files.items()):
            if left == 0:
                break
            records = read_input(path)[:left]
            left = None if left is None else left - len(records)
            self._check_shard(shard, records, self._rows_of(shard))
        if (code == ExitCode.ROW_ERRORS) != bool(self._report.errors):
            self._fault(f"ends with {code!r}, errors are {self._report.errors}")

    def _check_problems(self) -> None:
        for problem in find_problems(self._settings(), self._directory()):
            self._fault(f"verify: {problem}")

    def _check_remains(self) -> None:
        """After a refusal nothing is wrong with what is there, but that it is not all."""
        directory = self._directory()
        if not directory.job_file.exists():
            return
        try:
            problems = list(find_problems(self._settings(), directory))
        except JobError:
            # the input that ended the job
            return
        for problem in problems:
            if "not finished" not in problem and "cannot be read" not in problem:
                self._fault(f"verify after a refusal: {problem}")

    def _check_shard(self, shard: str, records: list[Any], rows: list[dict[str, Any]]) -> None:
        numbers = [row["row"] for row in rows]
        if numbers != list(range(len(records))):
            self._fault(f"{shard}: {len(records)} rows became rows {str(numbers)[:500]}")
            return
        for record, row in zip(records, rows, strict=True):
            for problem in _row_problems(record, row):
                self._fault(f"{shard}: row {row['row']}: {problem}: {str(row)[:500]}")
            if row["status"] == "ok":
                self._report.ok += 1
            else:
                self._report.errors[row["error_kind"]] += 1

    def _fault(self, problem: str) -> None:
        self._report.problems.append(problem)

    # ---- where things are

    def _settings(self) -> Settings:
        return load_settings(self._drawn.job_file, self._overrides, self._drawn.limit)

    def _directory(self) -> RunDirectory:
        settings = self._settings()
        return RunDirectory(settings.run_directory, "fuzz", result_suffix(settings))

    def _rows_of(self, shard: str) -> list[dict[str, Any]]:
        directory = self._directory()
        path = directory.result(shard)
        if directory.suffix == RESPONSES_SUFFIX:
            return _answer_rows(path)
        return read_result(path, _COMPARED)

    def _results(self) -> dict[str, list[dict[str, Any]]]:
        found = {}
        for shard in sorted(self._drawn.files):
            if self._directory().result(shard).exists():
                found[shard] = self._rows_of(shard)
        return found


def _row_problems(record: Any, row: dict[str, Any]) -> Iterator[str]:
    """Say why a row is not answered or explained, or not the row of its record."""
    kind, answered = row["error_kind"], row["status"] == "ok"
    if answered and (row["text"] is None or row["finish_reason"] not in get_args(FinishReason)):
        yield "ok without an answer"
    if not answered and (kind not in get_args(ErrorKind) or not row["error"]):
        yield "neither answered nor explained"
    if kind == "internal":
        yield "our own fault"
    if record is BROKEN and kind not in _UNREADABLE:
        yield "a broken record"
    if record in (BROKEN, UNKNOWN):
        return
    for name in {"id", "custom_id"} & row.keys():
        known = record.get(name)
        # a column of several types is kept as JSON
        spellings = (known, json.dumps(known, ensure_ascii=False))
        if isinstance(known, str) and known.isascii() and row[name] not in spellings:
            yield f"its {name} is {known!r} in the input"


def _answer_rows(responses: Path) -> list[dict[str, Any]]:
    """The lines of the two answer files of a shard, in the order of their rows."""
    errors = responses.with_name(responses.name.removesuffix(RESPONSES_SUFFIX) + ERRORS_SUFFIX)
    rows = [_answer_row(line, is_error=False) for line in read_strict_lines(responses)]
    if errors.exists():
        rows += [_answer_row(line, is_error=True) for line in read_strict_lines(errors)]
    return sorted(rows, key=lambda row: row["row"])


def _answer_row(line: dict[str, Any], *, is_error: bool) -> dict[str, Any]:
    body = line["response"]["body"]
    row = {"row": int(line["id"][-12:], 16), "custom_id": line["custom_id"]}
    if is_error:
        code = body["error"]["code"]
        kind = {"context_length_exceeded": "prompt_too_long"}.get(code, code)
        said = {"error_kind": kind, "error": body["error"]["message"]}
        return {**row, "status": "error", "text": None, "finish_reason": None, **said}
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    said = {"text": text, "finish_reason": choice["finish_reason"], "choices": body["choices"]}
    return {**row, "status": "ok", "error_kind": None, "error": None, **said}


def shape(message: str) -> str:
    """A message without what differs from case to case."""
    message = re.sub(r"`[^`]*`", "`…`", message.partition("\n")[0] or message)
    return re.sub(r"\d[\d,]*", "N", message)[:110]
