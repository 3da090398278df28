"""Load a model and build the engine around it. Knows nothing of rows, files of rows or text."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from jobrunner.cores import allowed_cores, workers_here
from jobrunner.engine.attention.choice import Backend, Wanted, choose_backend
from jobrunner.engine.attention.device_paged import DevicePagedAttention
from jobrunner.engine.attention.hook import Attention, attach
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.device_memory import CudaMemory, DeviceMemory
from jobrunner.engine.devices import DTYPES, resolve_device, resolve_dtype
from jobrunner.engine.duplicates import Duplicates
from jobrunner.engine.engine import Engine
from jobrunner.engine.fused import make_fast
from jobrunner.engine.graphs import CudaRecorder, Record
from jobrunner.engine.kv import AttentionCall, KvPool, attention_flops, bytes_per_token
from jobrunner.engine.lack import memory_for
from jobrunner.engine.largest_step import SCRATCH_BLOCKS, StepMemory, measure, smaller_graphs
from jobrunner.engine.memory import (
    KvMemory,
    Needs,
    available_memory,
    check_fits,
    kv_block_count,
    swap_block_count,
    total_memory,
)
from jobrunner.engine.plan import OutOfMemoryError
from jobrunner.engine.positions import freeze_positions
from jobrunner.engine.preemption import Costs
from jobrunner.engine.proof import leave, prove
from jobrunner.engine.runner import GraphSettings, TransformersRunner
from jobrunner.engine.scheduler import Limits
from jobrunner.engine.skeleton import calls_without_weights, usual_calls
from jobrunner.engine.stopping import OpenText
from jobrunner.engine.strategies import make_scheduler
from jobrunner.engine.streams import Lane, streams_of, wait_for
from jobrunner.engine.support import (
    check_supported,
    read_config,
    resolve_max_model_len,
)
from jobrunner.engine.tuning import Automatic, Tuning, largest
from jobrunner.engine.watchdog import step_limit, watchdog
from jobrunner.engine.weights import Weights, read_weights
from jobrunner.errors import ModelError

# only its type: an engine runs where settings cannot be read
if TYPE_CHECKING:
    from jobrunner.config import BatchingTable

log = logging.getLogger("cbjob")

AutoInt = int | Literal["auto"]

# of the memory of a GPU, all that is on it included; the largest step is measured
_SHARE = 0.9
# of the memory of a host that is free once the weights are loaded, where nothing is measured
_KV_SHARE = 0.3
# of the memory of the host that is free then; much of it would take long to lock into place
_SWAP_SHARE = {"cpu": 0.1, "cuda": 0.25}
_SWAP_BYTES = 8 << 30
# copied back and forth once, to learn how long a copy takes
_TRIED_BLOCKS = 16
_BATCH_SIZE = {"cpu": 64, "cuda": 256}
_TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model before its weights are read.

    `weight_bytes` is the memory of the weights in `dtype`, at least; `kv_bytes_per_token` that of
    K and V of one token over all layers, a guess for the few models that show it only when
    they are loaded. `flops_per_token` is 2 for each parameter that every token passes,
    `flops_per_output_token` for each of the output projection; `attention_flops` are those of a
    token that attends to one token, over all layers. A guess at what a step takes beside weights
    and KV: `step_bytes_per_token` for each, and `logit_bytes` for each row of logits.
    """

    device: str
    dtype: str
    max_model_len: int
    architecture: str
    layers: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_is_a_guess: bool
    flops_per_token: float
    flops_per_output_token: float
    attention_flops: float
    step_bytes_per_token: int = 0
    logit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ProvenModel:
    """A model whose weights are loaded, the attention calls of its passes, and who serves them."""

    info: ModelInfo
    model: torch.nn.Module
    calls: Sequence[AttentionCall]
    backend: Backend


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A proven model that computes on a KV pool. Engines may use it one after the other."""

    info: ModelInfo
    model: torch.nn.Module
    attention: Attention
    pool: KvPool
    host_blocks: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready, and what was chosen for it."""

    engine: Engine
    dtype: str
    device: str
    limits: Limits
    max_model_len: int
    block_size: int
    kv_blocks: int
    kv_bytes_per_token: int


def read_model_info(
    folder: Path,
    *,
    device: str,
    dtype: str,
    max_model_len: AutoInt | None,
    block_size: int = 16,
) -> ModelInfo:
    """Resolve what the settings leave to the machine; log each choice and its reason.

    Raises ModelError for a model that cannot run here, as far as its configuration, its
    structure and the headers of its weights tell.
    """
    config = read_config(folder)
    check_supported(config)
    length = resolve_max_model_len(config, max_model_len)
    known_calls = calls_without_weights(config, length)
    calls = known_calls or usual_calls(config)
    weights = read_weights(folder)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device, config)
    element = DTYPES[dtype]
    quantised = getattr(config, "quantization_config", None) is not None
    output = config.vocab_size * config.hidden_size
    info = ModelInfo(
        device=device,
        dtype=dtype,
        max_model_len=length,
        architecture=MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__,
        layers=config.num_hidden_layers,
        parameters=weights.parameters,
        weight_bytes=weights.file_bytes if quantised else weights.bytes_as(element.itemsize),
        kv_bytes_per_token=bytes_per_token(calls, element),
        kv_is_a_guess=known_calls is None,
        flops_per_token=2.0 * _passed_by_a_token(config, weights, output),
        flops_per_output_token=2.0 * output,
        attention_flops=attention_flops(calls, config.num_attention_heads),
        step_bytes_per_token=_step_bytes_per_token(config, element),
        logit_bytes=config.vocab_size * element.itemsize,
    )
    check_fits(info.weight_bytes, info.kv_bytes_per_token * block_size, _free_bytes(device))
    return info


def _passed_by_a_token(config: PretrainedConfig, weights: Weights, output: int) -> float:
    """Count the parameters in front of the output projection that one token is multiplied with."""
    embeddings = output if config.tie_word_embeddings else 2 * output
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(config, name, None))), 1)
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    idle = weights.experts * (1 - min(1.0, chosen / experts))
    return max(0.0, weights.parameters - embeddings - idle)


def _step_bytes_per_token(config: PretrainedConfig, element: torch.dtype) -> int:
    """Guess what lives at the widest place of a layer: the residual, what is normed, q, k and v,
    what attention gives, the gate, what it gates, and their product."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int((8 * config.hidden_size + 3 * width) * element.itemsize)


def load_model(folder: Path, dtype: str, device: str) -> torch.nn.Module:
    """Load a local safetensors checkpoint with eager attention, ready for inference.

    Raises ModelError where weights are missing, damaged or of another kind.
    """
    read_weights(folder)
    room = partial(
        memory_for, f"the weights in `{folder}`", "`workers.count`, or use a smaller model"
    )
    try:
        with _no_progress_bars(), room():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"the weights in `{folder}` cannot be loaded: {error}",
            hint="check that the folder is complete",
        ) from error
    # transformers makes up what a checkpoint lacks
    absent = sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]}))
    if absent:
        raise ModelError(
            f"the weights in `{folder}` lack {len(absent)} tensors of the model, "
            f"`{absent[0]}` among them",
            hint="check that the folder is complete and that config.json belongs to it",
        )
    with room():
        return model.eval().requires_grad_(False).to(device)


def use_threads(threads: AutoInt) -> None:
    """Compute on so many threads of the CPU, by default on the cores that this process may use."""
    if threads == "auto":
        # torch knows of the cores it is bound to, not of quotas and Slurm
        threads = min(torch.get_num_threads(), allowed_cores())
    torch.set_num_threads(threads)


def prove_model(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: AutoInt | None = "auto",
    attention: Wanted = "auto",
    block_size: int = 16,
    fast: bool = True,
) -> ProvenModel:
    """Load the model and show that it computes on our attention what it does on its own.

    `fast` replaces what there are faster parts for on this device; else only attention is ours.
    Raises ModelError where the model cannot run here.
    """
    info = read_model_info(
        folder, device=device, dtype=dtype, max_model_len=max_model_len, block_size=block_size
    )
    model = load_model(folder, info.dtype, info.device)
    freeze_positions(model, info.max_model_len)
    choose = partial(choose_backend, attention)
    improve = make_fast if fast else leave
    with memory_for("the first passes of the model", "`workers.count`, or use a smaller model"):
        calls, backend = prove(model, choose, block_size, info.max_model_len, improve)
    return ProvenModel(info, model, calls, backend)


def open_engine(
    folder: Path,
    *,
    open_text: OpenText,
    dtype: str = "auto",
    device: str = "auto",
    threads: AutoInt = "auto",
    max_model_len: AutoInt | None = "auto",
    attention: Wanted = "auto",
    max_batch_size: AutoInt = "auto",
    token_budget: AutoInt = "auto",
    chunk_size: AutoInt = "auto",
    block_size: int = 16,
    kv_memory: KvMemory = "auto",
    prefix_cache: bool = True,
    lookahead: AutoInt = "auto",
    scheduling: BatchingTable | None = None,
    ahead: bool = True,
) -> LoadedEngine:
    """Load and prove the model, size the KV memory, and join the parts.

    `scheduling` gives the rules by which rows are scheduled; its numbers are those given here.
    Without `ahead` a row is admitted if it fits now, whatever comes.
    Raises ModelError where the model cannot run here.
    """
    use_threads(threads)
    proven = prove_model(
        folder,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        attention=attention,
        block_size=block_size,
    )
    info = proven.info
    rules = scheduling or _default_rules()
    limits = resolve_limits(
        info.device, max_batch_size, token_budget, chunk_size, lookahead, rules.schedule_every
    )
    automatic = Automatic(
        max_batch_size=max_batch_size == "auto",
        token_budget=token_budget == "auto",
        chunk_size=chunk_size == "auto",
        lookahead=lookahead == "auto",
    )
    placed = place_model(
        proven,
        limits,
        rules,
        block_size=block_size,
        kv_memory=kv_memory,
        most=largest(limits, automatic),
    )
    return LoadedEngine(
        engine=build_engine(
            placed,
            limits,
            rules,
            open_text,
            prefix_cache=prefix_cache,
            ahead=ahead,
            duplicates=Duplicates(),
            tuning=Tuning(limits, automatic),
        ),
        dtype=info.dtype,
        device=info.device,
        limits=limits,
        max_model_len=info.max_model_len,
        block_size=block_size,
        kv_blocks=placed.pool.block_count,
        kv_bytes_per_token=placed.kv_bytes_per_token,
    )


def _default_rules() -> BatchingTable:
    from jobrunner.config import BatchingTable

    return BatchingTable()


def place_model(
    proven: ProvenModel,
    limits: Limits,
    rules: BatchingTable,
    *,
    block_size: int = 16,
    kv_memory: KvMemory = "auto",
    most: Limits | None = None,
    memory: DeviceMemory | None = None,
) -> PlacedModel:
    """Size the KV memory for batches of these limits and let the model compute on it.

    `memory` is that of the device, `most` what the limits may become. On a GPU it is measured what
    the largest step needs, elsewhere only where a `memory` is given. Raises ModelError where KV
    has no place.
    """
    info, model = proven.info, proven.model
    token_bytes = bytes_per_token(proven.calls, model.dtype)
    if memory is None and model.device.type == "cuda":
        memory = CudaMemory(model.device)
    if memory is None:
        needs = _guessed_needs(info, most or limits, loaded=True)
    else:
        needs = _measured_needs(proven, limits, most or limits, block_size, memory)
    block_count = _block_count(info, limits, kv_memory, block_size, token_bytes, needs)
    host_blocks = _host_block_count(rules, info.device, token_bytes * block_size, block_count)
    backend = proven.backend
    blocks = f"{block_count:,} blocks of KV and {host_blocks:,} of swapped KV"
    size = f"{(block_count + host_blocks) * block_size * token_bytes / 2**20:,.1f} MiB"
    with memory_for(f"{blocks}, {size}", "`batching.kv_memory` or `batching.swap_memory`"):
        pool = backend.make_pool(
            proven.calls, block_count, block_size, model.dtype, model.device, host_blocks
        )
    attention = backend.make_attention(pool, model.device)
    attach(model, attention)
    tokens = block_count * block_size
    log.info(
        "KV memory: %.1f MiB, room for %s tokens of %s bytes",
        tokens * token_bytes / 2**20,
        f"{tokens:,}",
        f"{token_bytes:,}",
    )
    return PlacedModel(info, model, attention, pool, host_blocks, token_bytes)


def build_engine(
    placed: PlacedModel,
    limits: Limits,
    rules: BatchingTable,
    open_text: OpenText,
    *,
    prefix_cache: bool = True,
    ahead: bool = True,
    duplicates: Duplicates | None = None,
    tuning: Tuning | None = None,
    graphs: bool = True,
) -> Engine:
    """Build an engine that begins with an empty KV memory; whoever used it before is done.

    Without `graphs` decode steps are launched one operation at a time, also on a GPU.
    """
    pool, model = placed.pool, placed.model
    with memory_for("the first swapped blocks", "`batching.kv_memory` or `batching.swap_memory`"):
        costs = _costs(pool, placed.host_blocks)
    scheduler = make_scheduler(
        rules,
        Blocks(pool.block_count, pool.block_size, prefix_cache),
        limits,
        open_text,
        host_blocks=placed.host_blocks,
        costs=costs,
        ahead=ahead,
    )
    most, longest = limits.max_batch_size, placed.info.max_model_len
    recorded = _graph_settings(placed.attention, model.device, most, longest) if graphs else None
    limit = step_limit(rules.max_step, model.device.type)
    runner = TransformersRunner(
        model, placed.attention, model.device, pool, graphs=recorded, limit=limit
    )
    dog = watchdog(limit, ahead=runner.ahead)
    return Engine(scheduler, runner, duplicates=duplicates, tuning=tuning, watchdog=dog)


def _graph_settings(
    attention: Attention, device: torch.device, most: int, longest: int
) -> GraphSettings | None:
    record = _recorder(device)
    if record is None or not isinstance(attention, DevicePagedAttention):
        return None
    return GraphSettings(record, most, longest)


def _recorder(device: torch.device) -> Record | None:
    return CudaRecorder(device) if device.type == "cuda" else None


def _host_block_count(rules: BatchingTable, device: str, block_bytes: int, block_count: int) -> int:
    if rules.preemption == "recompute":
        return 0
    free_bytes = available_memory()
    # workers that start together must not count on the same memory
    spare_bytes = int(_SWAP_SHARE[device.partition(":")[0]] * free_bytes) // workers_here()
    count = swap_block_count(
        rules.swap_memory,
        block_bytes=block_bytes,
        kv_blocks=block_count,
        spare_bytes=min(spare_bytes, _SWAP_BYTES),
        free_bytes=free_bytes,
    )
    log.info(
        "swap memory: %.1f MiB of the host, room for %s of %s blocks",
        count * block_bytes / 2**20,
        f"{count:,}",
        f"{block_count:,}",
    )
    return count


def _costs(pool: KvPool, host_blocks: int) -> Costs:
    """Start with the measured cost of a copy; that of computing is learnt with the first rows."""
    count = min(host_blocks, pool.block_count, _TRIED_BLOCKS)
    if count == 0:
        return Costs()
    places = list(range(count))
    # the first time also pays for memory that was never touched
    pool.swap_out(places, places)
    streams = streams_of(pool.keys[0].device)
    begun = streams.mark(Lane.COMPUTE)
    pool.swap_out(places, places)
    pool.swap_in(places, places)
    done = streams.mark(Lane.COMPUTE)
    wait_for(done)
    return Costs(done.since(begun) / (2 * count))


def estimate_kv_blocks(
    info: ModelInfo, limits: Limits, *, kv_memory: KvMemory, block_size: int
) -> int:
    """Tell how many blocks the KV pool would get if the weights were loaded now.

    Raises ModelError where not even one fits.
    """
    needs = _guessed_needs(info, limits, loaded=False)
    return _block_count(info, limits, kv_memory, block_size, info.kv_bytes_per_token, needs)


def _block_count(
    info: ModelInfo,
    limits: Limits,
    kv_memory: KvMemory,
    block_size: int,
    token_bytes: int,
    needs: Needs,
) -> int:
    on_cpu = info.device == "cpu"
    # a GPU has one worker; those on a CPU, started together, must not count on the same memory
    sharing = workers_here() if on_cpu else 1
    free_bytes = max(0, needs.total - needs.others - needs.weights)
    if on_cpu and not needs.measured and not isinstance(kv_memory, float):
        spare_bytes = int(_KV_SHARE * free_bytes) // sharing
    else:
        share = _SHARE if kv_memory == "auto" else 1.0
        share = kv_memory if isinstance(kv_memory, float) else share
        log.info("memory for KV: %s", needs.figures(share))
        least = sharing * token_bytes * block_size
        needs.check(share, kv_memory if isinstance(kv_memory, int) else least)
        spare_bytes = needs.left(share) // sharing
    return kv_block_count(
        spare_bytes if isinstance(kv_memory, float) else kv_memory,
        bytes_per_token=token_bytes,
        block_size=block_size,
        wanted_tokens=limits.max_batch_size * info.max_model_len,
        spare_bytes=spare_bytes,
        free_bytes=free_bytes,
    )


def _measured_needs(
    proven: ProvenModel, limits: Limits, most: Limits, block_size: int, memory: DeviceMemory
) -> Needs:
    """Run the largest steps on a small pool; the device is then as it was before.

    Raises ModelError where there is no memory for them.
    """
    model, longest = proven.model, proven.info.max_model_len
    started = time.perf_counter()
    try:
        found = _largest_step(proven, limits, most, block_size, memory)
    except OutOfMemoryError as error:
        raise ModelError(
            f"a step of {most.token_budget:,} tokens and {most.max_batch_size:,} rows of up to"
            f" {longest:,} tokens has no room beside the weights: {error}",
            hint="lower batching.token_budget, max_batch_size or model.max_model_len",
        ) from error
    memory.give_back()
    log.info("measured the largest step in %.1f s", time.perf_counter() - started)
    total, weights = memory.total(), memory.allocated()
    return Needs(
        total=total,
        others=max(0, total - memory.free() - memory.reserved()),
        weights=weights,
        step=found.step,
        graphs=found.graphs,
        said=f"measured on {model.device.type}",
        measured=True,
    )


def _largest_step(
    proven: ProvenModel, limits: Limits, most: Limits, block_size: int, memory: DeviceMemory
) -> StepMemory:
    model, backend, longest = proven.model, proven.backend, proven.info.max_model_len
    pool = backend.make_pool(proven.calls, SCRATCH_BLOCKS, block_size, model.dtype, model.device)
    attention = backend.make_attention(pool, model.device)
    attach(model, attention)
    graphs = _graph_settings(attention, model.device, limits.max_batch_size, longest)
    runner = partial(TransformersRunner, model, attention, model.device, pool)
    return measure(
        runner(),
        memory,
        most,
        longest,
        block_size,
        decodes=isinstance(attention, DevicePagedAttention),
        recorder=None if graphs is None else runner(graphs=graphs),
        recorded_rows=0 if graphs is None else graphs.most,
        logit_bytes=proven.info.logit_bytes,
    )


def _guessed_needs(info: ModelInfo, limits: Limits, *, loaded: bool) -> Needs:
    """What will hold the device's memory, as far as that is known without running anything."""
    total, free = _memory_of(info.device)
    rows = min(limits.max_batch_size, limits.token_budget)
    on_cpu = info.device == "cpu"
    sharing = workers_here() if on_cpu else 1
    step = limits.token_budget * info.step_bytes_per_token + 2 * rows * info.logit_bytes
    return Needs(
        total=total,
        # weights that are loaded are in use by now
        others=max(0, total - free - (info.weight_bytes if loaded else 0)),
        weights=info.weight_bytes * (1 if loaded else sharing),
        step=step * sharing,
        graphs=0 if on_cpu else smaller_graphs(rows, info.logit_bytes),
        said="the step estimated" if loaded else "estimated before anything is loaded",
    )


def _memory_of(device: str) -> tuple[int, int]:
    """All memory that there is, and what is free of it."""
    if device == "cpu":
        return total_memory(), available_memory()
    memory = CudaMemory(torch.device(device))
    return memory.total(), memory.free()


def resolve_limits(
    device: str,
    max_batch_size: AutoInt,
    token_budget: AutoInt,
    chunk_size: AutoInt,
    lookahead: AutoInt,
    schedule_every: int = 1,
) -> Limits:
    """Fill in the bounds of a step that the settings leave to the machine, to start with."""
    kind = device.partition(":")[0]
    batch = _BATCH_SIZE[kind] if max_batch_size == "auto" else max_batch_size
    budget = max(batch, _TOKEN_BUDGET[kind]) if token_budget == "auto" else token_budget
    if max_batch_size == "auto":
        batch = min(batch, budget)
    return Limits(
        max_batch_size=batch,
        token_budget=budget,
        chunk_size=budget if chunk_size == "auto" else chunk_size,
        lookahead=4 * batch if lookahead == "auto" else lookahead,
        schedule_every=schedule_every,
    )


def _free_bytes(device: str) -> int:
    return _memory_of(device)[1]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing on the terminal, which is the console's."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
