"""Wire the commands to the command line; what they do is in `commands`.

Nothing that takes time is imported here: `cbjob --help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from jobrunner.errors import ExitCode, JobError

SET_HELP = "Change a key, may be given again. Paths are relative to JOB, as in the file."


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jobrunner")
def cli() -> None:
    """Run batch inference jobs that survive being killed.

    Write a job file, run it, look at the results; when it dies, run it again.
    """


@cli.command()
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), help="Take the first N rows as the input.")
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help=SET_HELP)
@click.option(
    "--progress",
    type=click.Choice(["auto", "rich", "plain", "none"]),
    help="How to show progress; overrides `progress.style`.",
)
def run(job: Path, limit: int | None, overrides: tuple[str, ...], progress: str | None) -> int:
    """Run JOB, or go on with it where it was stopped.

    Exit codes: 0 all rows ok, 1 unexpected failure, 2 wrong settings or another job's run
    directory, 3 finished with row errors, 74 disk or device fault, 75 stopped early (run it
    again), 130 interrupted.
    """
    from jobrunner.commands.run import run_command

    return run_command(job, limit=limit, overrides=overrides, style=progress)


@cli.command(short_help="Check that JOB's results are whole and right.")
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), help="The limit that the job was run with.")
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help=SET_HELP)
def verify(job: Path, limit: int | None, overrides: tuple[str, ...]) -> int:
    """Check that JOB's results hold every input row once, in order, unchanged.

    Exit codes: 0 they do, 1 they do not, or not all are there yet, 2 wrong settings.
    """
    from jobrunner.commands.verify import verify_command

    return verify_command(job, limit=limit, overrides=overrides)


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
    except OSError as error:
        _say(str(error), "mend it, then run the same command again: nothing committed is lost")
        code = ExitCode.INFRASTRUCTURE
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted: what was committed is kept", "the same command goes on from there")
        code = ExitCode.INTERRUPTED
    sys.exit(code or 0)


def _say(message: str, hint: str) -> None:
    printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in message)
    click.echo(f"error: {printable}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)


if __name__ == "__main__":
    main()
