"""Tell without model, tokenizer or torch that a job is finished and nothing of it has changed.

What the run directory was begun with cannot be computed again without them, so the settings that
a job was finished with are noted beside it. Where anything differs this knows nothing, and the
whole comparison decides.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from jobrunner import __version__
from jobrunner.config import Settings
from jobrunner.data.fingerprint import read_fingerprint, same
from jobrunner.data.input.inputs import open_input
from jobrunner.data.json_text import read_json_text
from jobrunner.data.layout import RunDirectory
from jobrunner.data.models import model_fingerprint, resolve_model
from jobrunner.data.progress import Progress

# tables that decide nothing of what the results say
_FREE_TABLES = {"batching", "checkpoint", "errors", "progress", "slurm", "workers"}


def finished_progress(run: RunDirectory, settings: Settings) -> Progress | None:
    """The progress of a job that is finished and unchanged; None for any other.

    Raises JobError where input or model are not to be had.
    """
    if not _same_settings(run, settings):
        return None
    recorded = read_fingerprint(run)
    if recorded is None:
        return None
    shards = open_input(settings)
    folder = resolve_model(settings.model.name, settings.folder, settings.model.revision)
    model = {f"model file `{name}`": said for name, said in model_fingerprint(folder).items()}
    now = {**shards.fingerprint(), **model}
    then = {key: value for key, value in recorded.items() if key in now or _is_file(key)}
    if not same(json.loads(json.dumps(now)), then):
        return None
    progress = Progress(run, {shard.name: shard.rows for shard in shards.shards.values()})
    return progress if progress.complete else None


def remember_finished(run: RunDirectory, settings: Settings) -> None:
    """Note the settings that a job was finished with."""
    if _same_settings(run, settings):
        return
    with run.writing(run.finished_file) as temporary:
        temporary.write_text(json.dumps(_described(settings)))


def _same_settings(run: RunDirectory, settings: Settings) -> bool:
    try:
        noted: Any = read_json_text(run.finished_file.read_text())
        return same(noted, _described(settings))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # not finished, a template that is gone, or what a loss of power left
        return False


def _described(settings: Settings) -> dict[str, str]:
    """What decides the results beside the files of input and model."""
    template = settings.input.chat_template
    content = b"" if template is None else (settings.folder / template).read_bytes()
    said = settings.model_dump_json(exclude=_FREE_TABLES)
    return {
        "version": __version__,
        "settings": hashlib.blake2b(said.encode(), digest_size=16).hexdigest(),
        "chat template": hashlib.blake2b(content, digest_size=16).hexdigest(),
    }


def _is_file(key: str) -> bool:
    return key.startswith(("input shard `", "model file `"))
