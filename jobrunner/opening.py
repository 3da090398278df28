"""Bring settings, input, model and prompts together into a job that can run.

Everything but the weights is checked on the way; `load` brings those in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobrunner.config import Settings
from jobrunner.data.input.inputs import Input, open_input
from jobrunner.data.models import model_fingerprint, resolve_model
from jobrunner.data.prompts.prompts import Prompts
from jobrunner.data.results.outcomes import extras_of
from jobrunner.data.results.result_files import result_suffix
from jobrunner.records import Engine

if TYPE_CHECKING:
    from jobrunner.engine.loading import LoadedEngine, ModelInfo


ReadModel = Callable[[Settings, Path], "ModelInfo"]


@dataclass(frozen=True, slots=True)
class Job:
    """Settings that have met their input and their model. No weights are loaded yet."""

    settings: Settings
    input: Input
    prompts: Prompts
    model_folder: Path
    model: ModelInfo

    @property
    def device(self) -> str:
        return self.model.device

    @property
    def dtype(self) -> str:
        return self.model.dtype

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len

    def warnings(self) -> list[str]:
        """What lets the job run, but hardly as it was meant."""
        found = []
        if self.input.strange_column:
            found.append(f"{self.input.strange_column}: such rows become bad_type errors")
        wanted = self.settings.generation.max_new_tokens
        if wanted >= self.max_model_len:
            found.append(
                f"max_new_tokens is {wanted:,}, the model's context {self.max_model_len:,}:"
                " texts end there"
            )
        if self.prompts.tells_the_time:
            found.append(
                "the chat template writes today's date into prompts: rows that run another day get"
                " another prompt, unless `input.chat_template_kwargs` sets it"
            )
        return found

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
            "output.columns": list(extras_of(settings)),
            "output.logprobs": settings.output.logprobs,
            "result files": result_suffix(settings),
            "output.compression": settings.output.compression,
            "--limit": settings.limit,
            "model.dtype": self.dtype,
        }


def read_model(settings: Settings, folder: Path) -> ModelInfo:
    """Read what is known of the model in a folder before its weights are."""
    from jobrunner.engine.loading import read_model_info

    return read_model_info(
        folder,
        device=settings.model.device,
        dtype=settings.model.dtype,
        max_model_len=settings.model.max_model_len,
        block_size=settings.batching.block_size,
    )


def open_job(settings: Settings, read_model: ReadModel = read_model) -> Job:
    """Bring settings, input and model together. Everything but the weights is checked here.

    `read_model` replaces what reads the model's configuration, and loads torch for it.
    """
    job_input = open_input(settings)
    folder = resolve_model(settings.model.name, settings.folder, settings.model.revision)
    info = read_model(settings, folder)
    prompts = Prompts(
        folder,
        input=settings.input,
        generation=settings.generation,
        job_seed=settings.job.seed,
        max_model_len=info.max_model_len,
        base=settings.folder,
        logprobs=settings.output.logprobs,
    )
    return Job(settings, job_input, prompts, folder, info)


def load_engine(job: Job) -> Engine:
    """Load the model and build the engine that the settings ask for."""
    return load(job).engine


def load(job: Job) -> LoadedEngine:
    """Load the model, prove it, and build the engine; tell what was chosen for it."""
    from jobrunner.engine.loading import open_engine

    model, batching = job.settings.model, job.settings.batching
    # what the settings leave open is resolved again, as for the job, and logged this time
    return open_engine(
        job.model_folder,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        max_model_len=model.max_model_len,
        attention=model.attention,
        max_batch_size=batching.max_batch_size,
        token_budget=batching.token_budget,
        chunk_size=batching.chunk_size,
        block_size=batching.block_size,
        kv_memory=batching.kv_memory,
        prefix_cache=batching.prefix_cache,
        lookahead=batching.lookahead,
        scheduling=batching,
        open_text=job.prompts.open_text,
    )
