"""Wire the commands to the command line; what they do is in `commands`.

Nothing that takes time is imported here: `cbjob --help` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from jobrunner.console.printable import printable
from jobrunner.errors import ExitCode, HostMemoryError, HungError, JobError, lacks_host_memory
from jobrunner.leaving import leave_at_once

Command = TypeVar("Command", bound=Callable[..., int])

LIMIT_HELP = "The first N rows are the whole input; give it to every command alike."
SET_HELP = "Change a key, may be given again. Paths are relative to JOB, as in the file."


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jobrunner")
def cli() -> None:
    """Run batch inference jobs that survive being killed.

    Write a job file, run it, look at the results; when it dies, run it again.
    """


def _job(command: Command) -> Command:
    """Give a command the argument and the options that say which job it is about."""
    for decorate in (
        click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help=SET_HELP),
        click.option("--limit", type=click.IntRange(min=1), help=LIMIT_HELP),
        click.argument("job", type=click.Path(path_type=Path)),
    ):
        command = decorate(command)
    return command


@cli.command(short_help="Write a job file to begin with.")
@click.argument("file", type=click.Path(path_type=Path), default="job.toml")
@click.option("--schema", is_flag=True, help="Print the JSON schema of job files, for editors.")
def init(file: Path, schema: bool) -> int:
    """Write FILE, by default job.toml, with every key, its default and what it means.

    `-` prints it. A file that is there is never overwritten.
    """
    from jobrunner.commands.init import init_command

    return init_command(file, schema=schema)


@cli.command(short_help="Check JOB before it runs.")
@_job
@click.option("--rows", is_flag=True, help="Read and tokenise every row; load no weights.")
@click.option("--no-load", is_flag=True, help="Load no weights.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def check(
    job: Path,
    limit: int | None,
    overrides: tuple[str, ...],
    rows: bool,
    no_load: bool,
    as_json: bool,
) -> int:
    """Check JOB's settings, its input, its model, and how much fits into memory.

    Loads the model and proves that it computes the same here as by itself, as every run does
    at its start. With --rows it tells what every row would become instead, without the model.

    Exit codes: 0 fine, 2 the job cannot run like this, 3 some rows would be errors, 74 disk or
    device fault.
    """
    from jobrunner.commands.check import check_command

    return check_command(
        job, limit=limit, overrides=overrides, rows=rows, load=not (rows or no_load), json=as_json
    )


@cli.command(short_help="Run JOB, or go on with it where it was stopped.")
@_job
@click.option(
    "--progress",
    type=click.Choice(["auto", "rich", "tqdm", "json", "plain", "off"]),
    help="How to show progress; overrides `progress.style`.",
)
@click.option("--retry-errors", is_flag=True, help="Do the rows again that ended in an error.")
def run(
    job: Path,
    limit: int | None,
    overrides: tuple[str, ...],
    progress: str | None,
    retry_errors: bool,
) -> int:
    """Run JOB, or go on with it where it was stopped.

    Exit codes: 0 all rows ok, 1 unexpected failure, 2 wrong settings or another job's run
    directory, 3 finished with row errors, 4 too many row errors (mend it and run it again),
    74 disk or device fault, 75 stopped early (run it again), 130 interrupted.
    """
    from jobrunner.commands.run import run_command

    return run_command(
        job, limit=limit, overrides=overrides, style=progress, retry_errors=retry_errors
    )


@cli.command(short_help="Give JOB to Slurm.")
@_job
@click.option("--print", "only_print", is_flag=True, help="Print the script and do nothing.")
def submit(job: Path, limit: int | None, overrides: tuple[str, ...], only_print: bool) -> int:
    """Write an sbatch script for JOB into its run directory, submit it, and print the job's id.

    `[slurm]` says what to ask for. The job saves and leaves before its time is up or when it is
    preempted, and goes on when it starts again.

    Exit codes: 0, or 2 for wrong settings or without Slurm, 74 where sbatch fails.
    """
    from jobrunner.commands.submit import submit_command

    return submit_command(job, limit=limit, overrides=overrides, only_print=only_print)


@cli.command(short_help="Tell how far JOB is.")
@_job
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--watch", is_flag=True, help="Look again every 2 seconds until it is finished.")
def status(
    job: Path, limit: int | None, overrides: tuple[str, ...], as_json: bool, watch: bool
) -> int:
    """Tell how far JOB is, who works on it, and how to read the rows that are done.

    Reads the run directory alone, before, while and after the job runs, and after a crash.

    Exit codes: 0, or 2 for wrong settings, 74 for a damaged file.
    """
    from jobrunner.commands.status import status_command

    return status_command(job, limit=limit, overrides=overrides, json=as_json, watch=watch)


@cli.command(short_help="Check that JOB's results are whole and right.")
@_job
def verify(job: Path, limit: int | None, overrides: tuple[str, ...]) -> int:
    """Check that JOB's results hold every input row once, in order, unchanged.

    Exit codes: 0 they do, 1 they do not, or not all are there yet, 2 wrong settings.
    """
    from jobrunner.commands.verify import verify_command

    return verify_command(job, limit=limit, overrides=overrides)


@cli.command(short_help="Tell what this machine can do, and a model on it.")
@click.option("--model", metavar="NAME", help="A folder, a hub id or demo, in the place of JOB.")
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help=SET_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.argument("job", required=False, type=click.Path(path_type=Path))
def doctor(job: Path | None, model: str | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Measure this machine, try every kernel on it, and bound what a model can do here.

    Which device, how many cores and threads; how fast each number format is; which kernels are
    usable, why others are not, and whether they compute what a plain reference does; for JOB's
    model, or the one named, what fits and the tokens/s that no engine can pass. No weights are
    loaded.

    Exit codes: 0 fine, 1 a kernel computes something else, 2 wrong settings or a model that
    cannot run here.
    """
    from jobrunner.commands.doctor import doctor_command

    return doctor_command(job, model=model, overrides=overrides, json=as_json)


@cli.command(short_help="Measure JOB's rows with each policy on the real model.")
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help=SET_HELP)
@click.option(
    "--limit", type=click.IntRange(min=1), default=96, show_default=True, help="The first N rows."
)
@click.option("--arrivals", metavar="poisson:RATE", help="Rows come at random, RATE a second.")
@click.option(
    "--policies",
    default="static,dynamic,continuous",
    show_default=True,
    help="What is compared; continuous with whole prompts and in chunks.",
)
@click.option(
    "--batch-sizes",
    "sizes",
    default="",
    metavar="A,B,C",
    help="What max_batch_size may be; each policy takes what suits it best.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Run all so often, in turns; the middle run counts.",
)
@click.option(
    "--with-generate",
    "generate",
    is_flag=True,
    help="Let transformers' generate answer the batches of static, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but one JSON object.")
@click.argument("job", type=click.Path(path_type=Path))
def compare(
    job: Path,
    limit: int | None,
    overrides: tuple[str, ...],
    arrivals: str | None,
    policies: str,
    sizes: str,
    repeats: int,
    generate: bool,
    as_json: bool,
) -> int:
    """Serve the first rows of JOB with each policy on the real model, and compare the numbers.

    Every policy first looks for its best max_batch_size. Nothing is written: the answers are
    only compared with each other. Prints a table and one JSON line.

    Exit codes: 0, or 2 for wrong settings, 74 for a device fault.
    """
    from jobrunner.commands.compare import compare_command

    return compare_command(
        job,
        limit=limit,
        overrides=overrides,
        policies=policies,
        sizes=sizes,
        arrivals=arrivals,
        repeats=repeats,
        generate=generate,
        json=as_json,
    )


@cli.command(short_help="Try schedules in virtual time, without a model.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help=SET_HELP)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N rows.")
@click.option("--trace", metavar="PATH", help="CSV or Parquet with prompt and output lengths.")
@click.option("--profile", help="What a step costs, by name: h200-8b.")
@click.option("--metrics", metavar="PATH", help="Fit what a step costs to a run's metrics.jsonl.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="'KEY=VALUE ...'",
    help="What is compared, by default the three policies; may be given again.",
)
@click.option("--arrivals", help="none, trace, or poisson:RATE with rows a second.")
@click.option("--workers", type=int, help="So many workers share the rows.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="KEY=A,B,C",
    help="Simulate each value of a [batching] key (or TABLE.KEY) and name the best.",
)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    metavar="FILE.svg",
    help="Draw slots and steps, here and as an image.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def simulate(
    file: Path | None,
    overrides: tuple[str, ...],
    limit: int | None,
    trace: str | None,
    metrics: str | None,
    variants: tuple[str, ...],
    sweeps: tuple[str, ...],
    timeline: Path | None,
    as_json: bool,
    **named: str | int | None,
) -> int:
    """Run the scheduler in virtual time on rows of known lengths: each policy, or other variants.

    FILE has the tables [rows], [trace], [cost], [batching] and [simulation], and any of them may
    come from options instead. jobs/TUNING.md has examples.

    Exit codes: 0, or 2 for wrong settings.
    """
    from jobrunner.commands.simulate import simulate_command

    values = {
        "trace.path": ("--trace", trace and str(Path(trace).absolute())),
        "cost.metrics": ("--metrics", metrics and str(Path(metrics).absolute())),
        "cost.profile": ("--profile", named["profile"]),
        "simulation.variants": ("--variant", list(variants)),
        "rows.arrivals": ("--arrivals", named["arrivals"]),
        "simulation.workers": ("--workers", named["workers"]),
    }
    return simulate_command(
        file,
        limit=limit,
        overrides=overrides,
        options={key: (value, option) for key, (option, value) in values.items() if value},
        sweeps=sweeps,
        timeline=timeline,
        json=as_json,
    )


_MENDS = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "remove files or get a higher quota there",
    errno.EROFS: "make that disk writable again",
    errno.EACCES: "give yourself access to it",
}


def main() -> None:
    """Run the command line; every error that has a cause the user can mend is said in words."""
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = ExitCode.USAGE
    except JobError as error:
        _say(str(error), error.hint)
        code = error.exit_code
        if isinstance(error, HostMemoryError) or getattr(error, "on_host", False):
            code = _lacking_memory()
        if isinstance(error, HungError):
            # exit handlers would wait for the device
            leave_at_once(code)
    except OSError as error:
        mend = _MENDS.get(error.errno or 0, "mend it")
        _say(str(error), f"{mend}, then run the same command again: nothing committed is lost")
        code = ExitCode.INFRASTRUCTURE
    except (MemoryError, RuntimeError) as error:
        if not lacks_host_memory(error):
            raise
        _say(
            f"this machine has no more memory: {error}"
            if str(error)
            else "this machine has no more memory",
            "close other programs or lower `batching.kv_memory`, `batching.max_batch_size` or"
            " `workers.count`, then run the same command again: nothing committed is lost",
        )
        code = _lacking_memory()
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted: what was committed is kept", "the same command goes on from there")
        code = ExitCode.INTERRUPTED
    sys.exit(code or 0)


def _lacking_memory() -> int:
    """The exit code: a worker of several is started again, for rows may be to blame."""
    from jobrunner.cluster.local import HOST_MEMORY_CODE, SUPERVISED

    return HOST_MEMORY_CODE if SUPERVISED in os.environ else ExitCode.INFRASTRUCTURE


def _say(message: str, hint: str) -> None:
    for words, text in (("error", message), ("hint", hint)):
        if text:
            lines = "\n".join(map(printable, text.split("\n")))
            click.echo(f"{words}: {lines}", err=True)


if __name__ == "__main__":
    main()
