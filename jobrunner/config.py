"""The tables of job.toml as frozen types, and what each key may be. Read from no file here."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SIZE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40} | {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
SHARE = re.compile(r"\s*-?\d*\.?\d+\s*")
QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def _quantity(value: object, units: Mapping[str, float], example: str) -> float:
    match = QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"must be a number with a unit out of {', '.join(units)}, like {example}")
    amount = float(match[1]) * units[match[2]]
    if math.isinf(amount):
        raise ValueError("is beyond all bounds")
    return amount


def _duration(value: object) -> float:
    """Seconds from `"30s"`."""
    return _quantity(value, DURATION_UNITS, '"30s"')


def _auto_or_duration(value: object) -> object:
    return value if value == "auto" else _duration(value)


def _size(value: object) -> object:
    """Bytes from `"8GiB"`; a number of bytes from Python and "auto" pass through."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return int(_quantity(value, SIZE_UNITS, '"8GiB"'))


def _memory(value: object) -> object:
    """Bytes from `"8GiB"`, a share from `0.9` or `"0.9"`."""
    if isinstance(value, str) and SHARE.fullmatch(value):
        value = float(value)
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError('must be a share over 0 and up to 1, or a size like "8GiB"')
    if isinstance(value, float):
        return value
    return _size(value)


def _tuple(value: object) -> object:
    """TOML has lists; a single value may stand for a list of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _text(value: str) -> str:
    """Text that can be written to a file and named to the system."""
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must be Unicode text without NUL")
    return value


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) < len(values):
        raise ValueError("must not name a column twice")
    return values


def _off_or_three(value: int) -> int:
    """A block of tokens repeats itself once it stands there three times."""
    if value in (1, 2):
        raise ValueError("must be 0 (off) or at least 3")
    return value


# what no clock, index or tensor goes beyond
TEN_YEARS_S = 10 * 365 * 86400.0
MOST = 2**31 - 1

# what a file may say where a validator makes something else of it: for the schema of job files
DurationText = Annotated[str, Field(pattern=QUANTITY.pattern, examples=["30s"])]
SizeText = Annotated[str, Field(pattern=QUANTITY.pattern, examples=["8GiB"])]
SizeInput = Annotated[int, Field(ge=1)] | Literal["auto"] | SizeText
OneOrMore = BeforeValidator(_tuple, json_schema_input_type=str | tuple[str, ...])

Duration = Annotated[
    float,
    BeforeValidator(_duration, json_schema_input_type=DurationText),
    Field(gt=0, le=TEN_YEARS_S),
]
Delay = Annotated[
    float,
    BeforeValidator(_duration, json_schema_input_type=DurationText),
    Field(ge=0, le=TEN_YEARS_S),
]
AutoDuration = Annotated[
    Literal["auto"] | Annotated[float, Field(gt=0, le=TEN_YEARS_S)],
    BeforeValidator(_auto_or_duration, json_schema_input_type=Literal["auto"] | DurationText),
]
Size = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    BeforeValidator(_size, json_schema_input_type=SizeInput),
]
Memory = Annotated[
    Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] | Literal["auto"],
    BeforeValidator(
        _memory, json_schema_input_type=SizeInput | Annotated[float, Field(gt=0, le=1)]
    ),
]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], OneOrMore]
Column = Annotated[str, Field(min_length=1)]
Columns = Annotated[Strings, AfterValidator(_distinct)]
Text = Annotated[str, AfterValidator(_text)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(_text)]
TokenIds = Annotated[
    tuple[Annotated[int, Field(ge=0, le=MOST)], ...],
    BeforeValidator(_tuple, json_schema_input_type=int | tuple[int, ...]),
]
Positive = Annotated[int, Field(ge=1, le=MOST)]


class Table(BaseModel):
    """One table of job.toml. `NOT_YET` names keys of the design whose feature is not built."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class JobTable(Table):
    name: str = "job"
    seed: int = 0
    price_per_gpu_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


# what has no place in an OpenAI batch file and its answers
OPENAI_UNUSED = ("tools", "prefill", "params", "keep", "id", "priority", "arrival")
# what only a chat template can do something with
NEEDS_CHAT = ("system", "chat_template", "chat_template_kwargs", "tools", "prefill")
# what makes the prompt of a row, one of them
SOURCES = ("prompt", "messages", "template", "token_ids")


class InputTable(Table):
    """`prompt`, `messages`, `token_ids`, `tools`, `id` name columns; `template` and `prefill` are
    templates over columns; `params` names one struct column or a column per parameter."""

    path: PathText | None = None
    dataset: PathText | None = None
    split: str = "train"
    streaming: bool = False
    format: Literal["auto", "parquet", "jsonl", "csv", "openai"] = "auto"
    prompt: Column | None = None
    messages: Column | None = None
    template: Text | None = None
    token_ids: Column | None = None
    system: Text | None = None
    chat: Literal["auto"] | bool = "auto"
    chat_template: PathText | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: Column | None = None
    prefill: Text | None = None
    id: Column | None = None
    keep: Columns = ()
    params: Columns = ()
    priority: Column | None = None
    arrival: Column | None = None
    too_long: Literal["error", "truncate_left", "truncate_right", "truncate_middle"] = "error"

    @model_validator(mode="after")
    def _one_place_of_rows(self) -> InputTable:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("must name the rows, as `path` or as `dataset`, not both")
        if self.dataset is not None and self.format != "auto":
            raise ValueError("`format` is for files: a `dataset` has its own")
        if self.dataset is None and (self.streaming or "split" in self.model_fields_set):
            raise ValueError("`split` and `streaming` belong to `dataset`")
        return self

    @model_validator(mode="after")
    def _one_source_of_prompts(self) -> InputTable:
        named = [name for name in SOURCES if getattr(self, name) is not None]
        if self.format == "openai":
            unused = [*named, *(key for key in OPENAI_UNUSED if getattr(self, key))]
            if unused:
                raise ValueError(f"an OpenAI batch file says all by itself: drop `{unused[0]}`")
        elif len(named) != 1:
            raise ValueError(f"must name one of {', '.join(f'`{name}`' for name in SOURCES)}")
        if self.messages is not None and self.chat is False:
            raise ValueError("`messages` needs the chat template: `chat` cannot be false")
        wrong = [name for name in NEEDS_CHAT if getattr(self, name)]
        if self.token_ids is not None and wrong:
            raise ValueError(f"`token_ids` are used as they are: drop `{wrong[0]}`")
        return self

    @property
    def column(self) -> str | None:
        """The column that prompts come from; None where a template or the format makes them."""
        return self.prompt or self.messages or self.token_ids


Extra = Literal["prompt_text", "token_ids", "chunks"]


class OutputTable(Table):
    """`columns` are results beyond those that every job has; `logprobs` how many of the likeliest
    tokens are given beside the chosen one."""

    path: PathText
    format: Literal["auto", "parquet", "jsonl", "openai"] = "auto"
    columns: Annotated[
        tuple[Extra, ...], BeforeValidator(_tuple, json_schema_input_type=Extra | tuple[Extra, ...])
    ] = ()
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    compression: Literal["zstd", "snappy", "gzip", "none"] = "zstd"

    @model_validator(mode="after")
    def _lines_are_not_snappy(self) -> OutputTable:
        if self.format == "jsonl" and self.compression == "snappy":
            raise ValueError('`compression` "snappy" is for Parquet: take "zstd", "gzip" or "none"')
        return self


class ModelTable(Table):
    name: PathText
    revision: PathText | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    attention: Literal["auto", "kernels", "torch", "reference"] = "auto"
    max_model_len: Literal["auto"] | Annotated[int, Field(ge=2, le=MOST)] = "auto"


class GenerationTable(Table):
    max_new_tokens: Positive = 256
    min_new_tokens: Annotated[int, Field(ge=0, le=MOST)] = 0
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Annotated[int, Field(ge=0, le=MOST)] = 0
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    presence_penalty: float = Field(default=0.0, ge=-100, le=100)
    frequency_penalty: float = Field(default=0.0, ge=-100, le=100)
    stop: Strings = ()
    stop_token_ids: TokenIds = ()
    stop_on_repetition: Annotated[int, Field(ge=0, le=MOST), AfterValidator(_off_or_three)] = 0
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    seed: int | None = None
    use_model_defaults: bool = False

    @model_validator(mode="after")
    def _least_is_not_over_most(self) -> GenerationTable:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"`min_new_tokens` {self.min_new_tokens} is over"
                f" `max_new_tokens` {self.max_new_tokens}"
            )
        return self


class BatchingTable(Table):
    max_batch_size: Literal["auto"] | Positive = "auto"
    token_budget: Literal["auto"] | Positive = "auto"
    chunk_size: Literal["auto"] | Positive = "auto"
    block_size: Annotated[int, Field(ge=1, le=4096)] = 16
    kv_memory: Memory = "auto"
    prefix_cache: bool = True
    lookahead: Literal["auto"] | Positive = "auto"
    policy: Literal["continuous", "static", "dynamic"] = "continuous"
    order: Literal["auto", "input", "longest", "shortest", "prefix"] = "auto"
    reserve: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = "auto"
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    swap_memory: Size = "auto"
    not_preemptible: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MOST)], ...], BeforeValidator(_tuple)
    ] = ()
    starvation_limit: Duration = 600.0
    preferred_batch_size: Positive | None = None
    max_queue_delay: Delay = 0.0
    schedule_every: Positive = 1
    max_step: AutoDuration = "auto"

    @model_validator(mode="after")
    def _every_sequence_gets_a_token(self) -> BatchingTable:
        batch, budget = self.max_batch_size, self.token_budget
        if isinstance(batch, int) and isinstance(budget, int) and batch > budget:
            raise ValueError(
                f"`max_batch_size` {batch} is over `token_budget` {budget}:"
                " every sequence needs a token a step"
            )
        return self

    @model_validator(mode="after")
    def _who_is_gathered_may_wait(self) -> BatchingTable:
        if self.preferred_batch_size is not None and self.max_queue_delay == 0:
            raise ValueError(
                f"`preferred_batch_size` {self.preferred_batch_size} gathers nobody while"
                ' `max_queue_delay` is "0s": say how long rows may wait for each other, like "3s"'
            )
        return self


class CheckpointTable(Table):
    every: Duration = 30.0
    grace: Duration = 30.0
    part_rows: Positive = 2000


class ErrorsTable(Table):
    """When a job stops because of its error rows: a rate holds once 1,000 rows are finished."""

    max_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    max_count: Annotated[int, Field(ge=0, le=MOST)] | None = None


class ProgressTable(Table):
    every: Duration = 10.0
    style: Literal["auto", "rich", "tqdm", "json", "plain", "off"] = "auto"
    metrics: bool = False


class WorkersTable(Table):
    """`devices` are GPUs, as `CUDA_VISIBLE_DEVICES` names them, or sets of cores ("0-3")."""

    engine: Literal["local", "ray"] = "local"
    count: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    devices: Strings = ()

    @model_validator(mode="after")
    def _a_device_for_each(self) -> WorkersTable:
        if self.devices and self.count not in ("auto", len(self.devices)):
            raise ValueError(f"`count` is {self.count}, but `devices` has {len(self.devices)}")
        if len(set(self.devices)) < len(self.devices):
            raise ValueError("`devices` names one twice")
        if self.devices and self.engine != "local":
            raise ValueError("`devices` are those of this machine: `engine` must be local")
        return self


# sbatch options that the script sets itself, or that would make it run something else
SLURM_OWN = (
    *("array", "cpus-per-task", "error", "job-name", "no-requeue", "ntasks", "open-mode", "output"),
    *("requeue", "signal", "time", "chdir", "export", "export-file", "get-user-env", "wrap"),
)
SLURM_WORD = re.compile(r"[A-Za-z0-9_.,:=+-]+")
SLURM_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?")


def can_quote_for_sbatch(text: str) -> bool:
    """Whether a text can be one word of an #SBATCH line, between one kind of quotes.

    sbatch drops backslashes, inside quotes too, and knows no other way to spell a quote.
    """
    return text.isprintable() and "\\" not in text and not ("'" in text and '"' in text)


def _slurm_word(value: str) -> str:
    if not SLURM_WORD.fullmatch(value):
        raise ValueError("must be of letters, digits and _ . , : = + -")
    return value


def _slurm_line(value: str) -> str:
    """One option of sbatch, none of those that decide what runs and where its log goes."""
    option = SLURM_OPTION.fullmatch(value)
    if option is None or not can_quote_for_sbatch(value):
        raise ValueError(
            'must be one option of sbatch, such as "--constraint=a100", without backslashes,'
            " control characters, or both kinds of quotes"
        )
    # sbatch takes a beginning of a name for the name
    own = next((name for name in SLURM_OWN if name.startswith(option[1])), None)
    if own is not None:
        raise ValueError(f"`--{own}` is not for `lines`: `cbjob submit` decides it")
    return value


SlurmWord = Annotated[str, AfterValidator(_slurm_word)]
SlurmLine = Annotated[str, AfterValidator(_slurm_line)]


class SlurmTable(Table):
    """What `cbjob submit` asks of Slurm. `array` jobs, each of `tasks` workers, share the rows;
    with `requeue` a job that leaves early puts itself into the queue again."""

    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    gres: SlurmWord | None = None
    time: Duration | None = None
    cpus: Positive | None = None
    array: Positive = 1
    tasks: Positive = 1
    requeue: bool = True
    lines: Annotated[
        tuple[SlurmLine, ...], BeforeValidator(_tuple, json_schema_input_type=str | tuple[str, ...])
    ] = ()


# Slurm looks at times about twice a minute, and a start takes its time
SLURM_LEAST_S = 120.0


NOT_YET: dict[str, frozenset[str]] = {
    "model": frozenset({"allow_unsafe_weights"}),
}


class Settings(Table):
    """A whole job. `folder` is the job file's: relative paths start there."""

    job: JobTable = JobTable()
    input: InputTable
    output: OutputTable
    model: ModelTable
    generation: GenerationTable = GenerationTable()
    batching: BatchingTable = BatchingTable()
    checkpoint: CheckpointTable = CheckpointTable()
    errors: ErrorsTable = ErrorsTable()
    progress: ProgressTable = ProgressTable()
    workers: WorkersTable = WorkersTable()
    slurm: SlurmTable = SlurmTable()
    folder: Path = Field(default_factory=Path.cwd)
    limit: Positive | None = None

    @model_validator(mode="after")
    def _openai_in_and_out(self) -> Settings:
        output = self.output
        if self.input.format != "openai":
            if output.format == "openai":
                raise ValueError('`output.format` "openai" needs `input.format` "openai"')
            return self
        if output.format not in ("auto", "openai"):
            raise ValueError("the answers to an OpenAI batch are OpenAI's: drop `output.format`")
        unused = ("columns", "logprobs", "compression")
        if wrong := [key for key in unused if key in output.model_fields_set]:
            raise ValueError(
                f"the answers to an OpenAI batch have a form of their own: drop `output.{wrong[0]}`"
            )
        return self

    @model_validator(mode="after")
    def _slurm_leaves_time_to_work(self) -> Settings:
        time_s, grace_s = self.slurm.time, self.checkpoint.grace
        if time_s is not None and time_s < grace_s + SLURM_LEAST_S:
            raise ValueError(
                f"`slurm.time` of {time_s:g} s leaves no time to work: it must be at least"
                f" {SLURM_LEAST_S:g} s over `checkpoint.grace` of {grace_s:g} s"
            )
        return self

    @property
    def run_directory(self) -> Path:
        return (self.folder / os.path.expanduser(self.output.path)).resolve()


TABLES = [name for name in Settings.model_fields if name not in ("folder", "limit")]


def table_model(table: str) -> type[Table]:
    """The type of one table of a job file."""
    model = Settings.model_fields[table].annotation
    assert isinstance(model, type)
    assert issubclass(model, Table)
    return model
