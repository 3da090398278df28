"""Small jobs that commit and save all the time, one for each way that files come to be."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobrunner import job as jobs
from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import RunDirectory
from jobrunner.data.openai.reading import RESPONSES_SUFFIX
from jobrunner.data.progress import Progress
from jobrunner.errors import ExitCode
from jobrunner.stop import Stop
from tests.fake_cbjob import read_fake_model
from tests.world import World, fake_engine

# in a memory of so many blocks the longest prompt cannot fit; in the usual one it can
FEW_BLOCKS = 14
# what only costs time where no power is lost
CALM = ("checkpoint.every=1h", "checkpoint.part_rows=100")


def prompts_of(shard: str, rows: int) -> list[str]:
    """Prompts of many lengths, the longest one last."""
    return [*(f"{shard} {n} " + "x" * (7 * n % 50) for n in range(rows - 1)), "y" * 120]


class SmallWorld(World):
    """A job with Parquet results; `shards` are the rows of each, `part_rows` those of a part."""

    suffix = ".parquet"
    expected_exit = ExitCode.OK
    # rows that are errors however much memory there is
    impossible: frozenset[int] = frozenset()

    def __init__(
        self, folder: Path, model: Path, shards: Mapping[str, int], part_rows: int
    ) -> None:
        folder.mkdir()
        super().__init__(folder, model)
        self.shards = dict(shards)
        job = self.job_file.read_text().replace("part_rows = 10", f"part_rows = {part_rows}")
        self.job_file.write_text(self.changed(job.replace('every = "1h"', 'every = "1ms"')))
        self.make_input()

    def changed(self, job: str) -> str:
        """The job file as this job has it."""
        job = job.replace("max_new_tokens = 12", "max_new_tokens = 4")
        return job.replace('"prompt"\n', '"prompt"\nchat = false\n', 1)

    def make_input(self) -> None:
        for shard, rows in self.shards.items():
            self.add_shard(shard, prompts_of(shard, rows))

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.folder / "run", "looks-0-0", self.suffix)

    def clear(self) -> None:
        """Let there be no run directory."""
        shutil.rmtree(self.directory.root, ignore_errors=True)

    def live(
        self,
        *overrides: str,
        steps: float = math.inf,
        shards: float = math.inf,
        blocks: int = 64,
        retry_errors: bool = False,
    ) -> ExitCode:
        """Run the job, or some steps of it, or until some shards are finished."""
        stop, seen = Stop(), itertools.count(1)

        def observe(step: Any) -> None:
            enough = not step.idle and next(seen) >= steps
            if enough or self.shards_finished() >= shards:
                stop.request("test")

        return jobs.run(
            self.settings(*overrides),
            open_engine=fake_engine(batch=6, blocks=blocks),
            read_model=read_fake_model,
            observe=observe,
            retry_errors=retry_errors,
            stop=stop,
        ).exit_code

    def shards_finished(self) -> int:
        return sum(path.name.endswith(self.suffix) for path in self._result_files())

    def answered(self) -> dict[str, Intervals]:
        """The rows that are done and not errors, where the longest prompts did not fit."""
        progress = Progress(self.directory, self.shards)
        return {
            shard: Intervals.of(
                row
                for start, stop in progress[shard].done
                for row in range(start, stop)
                if row not in self.impossible and row != rows - 1
            )
            for shard, rows in self.shards.items()
        }

    def outcomes(self) -> dict[str, Any]:
        """The content of every result file."""
        return self.results()

    def _result_files(self) -> list[Path]:
        return sorted(path for path in self.directory.results.rglob("*") if path.is_file())


class JsonLinesWorld(SmallWorld):
    """The same with compressed JSON lines."""

    suffix = ".jsonl.gz"

    def changed(self, job: str) -> str:
        return (
            super()
            .changed(job)
            .replace("[output]\n", '[output]\nformat = "jsonl"\ncompression = "gzip"\n')
        )

    def outcomes(self) -> dict[str, Any]:
        return {path.name: gzip.decompress(path.read_bytes()) for path in self._result_files()}


class BatchWorld(SmallWorld):
    """A job over OpenAI batch files: each shard has a file of answers and one of errors."""

    suffix = RESPONSES_SUFFIX
    expected_exit = ExitCode.ROW_ERRORS
    impossible = frozenset([1])

    def changed(self, job: str) -> str:
        return (
            super()
            .changed(job)
            .replace('prompt = "prompt"\nchat = false\nkeep = ["id"]\n', 'format = "openai"\n')
        )

    def make_input(self) -> None:
        for shard, rows in self.shards.items():
            path = self.folder / "input" / shard
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = enumerate(prompts_of(shard, rows))
            lines = [json.dumps(self._request(shard, number, text)) for number, text in texts]
            path.write_text("".join(f"{line}\n" for line in lines))

    def outcomes(self) -> dict[str, Any]:
        return {path.name: list(_lines(path)) for path in self._result_files()}

    def _request(self, shard: str, number: int, prompt: str) -> dict[str, Any]:
        body = {"prompt": prompt, **({"top_p": 7} if number in self.impossible else {})}
        return {
            "custom_id": f"{shard}-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": body,
        }


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Answers without the time when the job was begun: what was left says that it was long ago."""
    for text in path.read_text().splitlines():
        line = json.loads(text)
        line["response"]["body"].pop("created", None)
        yield line


class StreamedWorld(SmallWorld):
    """A job over a streamed dataset, which may say something else when it is fetched again."""

    def changed(self, job: str) -> str:
        return (
            super()
            .changed(job)
            .replace('path = "input"', 'dataset = "some/rows"\nstreaming = true')
        )

    def make_input(self) -> None:
        """Nothing is there before the stream is copied."""

    def leftovers(self) -> list[str]:
        # the copy stays, and nothing else of it
        copies = {f"input/{shard}" for shard in self.shards}
        found = [name.split("/") for name in super().leftovers()]
        return ["/".join(path) for path in found if f"{path[0]}/{path[-1]}" not in copies]

    def stream(self, *_: object) -> Iterator[pa.Table]:
        """The rows, two at a time; in place of what asks the hub."""
        # from here on the rows of the job are settled
        assert not self.directory.job_file.exists(), "fetched again after the job was begun"
        for shard, rows in self.shards.items():
            prompts = prompts_of(shard, rows)
            table = pa.table({"id": [f"{shard}-{n}" for n in range(rows)], "prompt": prompts})
            yield from (table.slice(start, 2) for start in range(0, rows, 2))
