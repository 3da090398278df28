"""Load a model and build the engine around it. Knows nothing of rows, files of rows or text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from jobrunner.engine.attention.hook import attach
from jobrunner.engine.attention.torch_paged import TorchPagedAttention
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.devices import DTYPES, resolve_device, resolve_dtype
from jobrunner.engine.engine import Engine
from jobrunner.engine.kv import AttentionCall, KvPool, bytes_per_token
from jobrunner.engine.memory import KvMemory, available_memory, check_fits, kv_block_count
from jobrunner.engine.positions import freeze_positions
from jobrunner.engine.proof import prove
from jobrunner.engine.runner import TransformersRunner
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.engine.skeleton import calls_without_weights, usual_calls
from jobrunner.engine.stopping import OpenText
from jobrunner.engine.support import (
    check_supported,
    read_config,
    resolve_max_model_len,
)
from jobrunner.engine.weights import Weights, read_weights
from jobrunner.errors import ModelError

log = logging.getLogger("cbjob")

AutoInt = int | Literal["auto"]

# of the memory that is free once the weights are loaded; the rest is for activations and others
_KV_SHARE = {"cpu": 0.3, "cuda": 0.85}
_BATCH_SIZE = {"cpu": 64, "cuda": 256}
_TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model before its weights are read.

    `weight_bytes` is the memory of the weights in `dtype`, at least; `kv_bytes_per_token` that of
    K and V of one token over all layers, a guess for the few models that show it only when
    they are loaded. `flops_per_token` is 2 for each parameter that every token passes,
    `flops_per_output_token` for each of the output projection.
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


@dataclass(frozen=True, slots=True)
class ProvenModel:
    """A model whose weights are loaded, and the attention calls of each of its passes."""

    info: ModelInfo
    model: torch.nn.Module
    calls: Sequence[AttentionCall]


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
    calls = calls_without_weights(config, length)
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
        kv_bytes_per_token=bytes_per_token(calls or usual_calls(config), element),
        kv_is_a_guess=calls is None,
        flops_per_token=2.0 * _passed_by_a_token(config, weights, output),
        flops_per_output_token=2.0 * output,
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


def load_model(folder: Path, dtype: str, device: str) -> torch.nn.Module:
    """Load a local safetensors checkpoint with eager attention, ready for inference.

    Raises ModelError where weights are missing, damaged or of another kind.
    """
    read_weights(folder)
    try:
        with _no_progress_bars():
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
    return model.eval().requires_grad_(False).to(device)


def prove_model(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: AutoInt | None = "auto",
    block_size: int = 16,
) -> ProvenModel:
    """Load the model and show that it computes on our attention what it does on its own.

    Raises ModelError where the model cannot run here.
    """
    info = read_model_info(
        folder, device=device, dtype=dtype, max_model_len=max_model_len, block_size=block_size
    )
    model = load_model(folder, info.dtype, info.device)
    freeze_positions(model, info.max_model_len)
    calls = prove(model, TorchPagedAttention, block_size, info.max_model_len)
    return ProvenModel(info, model, calls)


def open_engine(
    folder: Path,
    *,
    open_text: OpenText,
    dtype: str = "auto",
    device: str = "auto",
    threads: AutoInt = "auto",
    max_model_len: AutoInt | None = "auto",
    max_batch_size: AutoInt = "auto",
    token_budget: AutoInt = "auto",
    chunk_size: AutoInt = "auto",
    block_size: int = 16,
    kv_memory: KvMemory = "auto",
    prefix_cache: bool = True,
    lookahead: AutoInt = "auto",
) -> LoadedEngine:
    """Load and prove the model, size the KV memory, and join the parts.

    Raises ModelError where the model cannot run here.
    """
    if threads != "auto":
        torch.set_num_threads(threads)
    proven = prove_model(
        folder, dtype=dtype, device=device, max_model_len=max_model_len, block_size=block_size
    )
    info, model, calls = proven.info, proven.model, proven.calls
    limits = resolve_limits(info.device, max_batch_size, token_budget, chunk_size, lookahead)
    token_bytes = bytes_per_token(calls, model.dtype)
    block_count = _block_count(
        info, limits, kv_memory, block_size, token_bytes, free_bytes=_free_bytes(info.device)
    )
    pool = KvPool(calls, block_count, block_size, model.dtype, model.device)
    attention = TorchPagedAttention(pool, model.device)
    attach(model, attention)
    scheduler = Scheduler(Blocks(block_count, block_size, prefix_cache), limits, open_text)
    tokens = block_count * block_size
    log.info(
        "KV memory: %.1f MiB, room for %s tokens of %s bytes",
        tokens * token_bytes / 2**20,
        f"{tokens:,}",
        f"{token_bytes:,}",
    )
    return LoadedEngine(
        engine=Engine(scheduler, TransformersRunner(model, attention, model.device)),
        dtype=info.dtype,
        device=info.device,
        limits=limits,
        max_model_len=info.max_model_len,
        block_size=block_size,
        kv_blocks=block_count,
        kv_bytes_per_token=token_bytes,
    )


def estimate_kv_blocks(
    info: ModelInfo, limits: Limits, *, kv_memory: KvMemory, block_size: int
) -> int:
    """Tell how many blocks the KV pool would get if the weights were loaded now.

    Raises ModelError where not even one fits.
    """
    free_bytes = max(0, _free_bytes(info.device) - info.weight_bytes)
    return _block_count(
        info, limits, kv_memory, block_size, info.kv_bytes_per_token, free_bytes=free_bytes
    )


def _block_count(
    info: ModelInfo,
    limits: Limits,
    kv_memory: KvMemory,
    block_size: int,
    token_bytes: int,
    *,
    free_bytes: int,
) -> int:
    return kv_block_count(
        kv_memory,
        bytes_per_token=token_bytes,
        block_size=block_size,
        wanted_tokens=limits.max_batch_size * info.max_model_len,
        spare_bytes=int(_KV_SHARE[info.device.partition(":")[0]] * free_bytes),
        free_bytes=free_bytes,
    )


def resolve_limits(
    device: str,
    max_batch_size: AutoInt,
    token_budget: AutoInt,
    chunk_size: AutoInt,
    lookahead: AutoInt,
) -> Limits:
    """Fill in the bounds of a step that the settings leave to the machine."""
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
    )


def _free_bytes(device: str) -> int:
    return available_memory() if device == "cpu" else int(torch.cuda.mem_get_info()[0])


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
