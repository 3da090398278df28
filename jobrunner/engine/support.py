"""Which models can run on our attention, decided without weights. Knows nothing of devices."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from jobrunner.engine.kv import AttentionCall
from jobrunner.errors import ModelError

_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# their frequencies follow the longest position of a whole packed row
_ROW_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_HINT = "use a decoder-only model with full or sliding-window attention, such as Llama or Qwen"


def read_config(folder: Path) -> PretrainedConfig:
    """Read the configuration of a local model folder; ModelError where it is unusable."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"`{folder}` has no model configuration that transformers can read: {error}",
            hint="model.name must lead to a folder with config.json and safetensors weights",
        ) from error


def resolve_max_model_len(config: PretrainedConfig, requested: int | Literal["auto"] | None) -> int:
    """Return the most tokens of prompt and output a row may have.

    `auto` is what the model was made for; more than that is a ModelError.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if requested is None or requested == "auto":
        if limit is None:
            raise ModelError(
                f"`{config.model_type}` does not say how many tokens it takes",
                hint="set model.max_model_len",
            )
        return limit
    if limit is not None and requested > limit:
        raise ModelError(
            f"model.max_model_len is {requested:,}, the model's limit is {limit:,}",
            hint=f"set model.max_model_len to at most {limit}",
        )
    return requested


def check_supported(config: PretrainedConfig) -> None:
    """Raise ModelError, with the reason, for a model that our attention cannot serve."""
    reason = _class_problem(config) or _config_problem(config)
    if reason is not None:
        raise ModelError(f"model type `{config.model_type}` cannot run here: {reason}", hint=_HINT)


def check_calls(
    config: PretrainedConfig, calls: Sequence[AttentionCall], max_model_len: int
) -> None:
    """Raise ModelError unless the attention calls of a pass are all that the model attends with.

    A layer that never calls keeps its state elsewhere; a window that no call mentions would be
    ignored.
    """
    if len(calls) < config.num_hidden_layers:
        reason = f"{len(calls)} of {config.num_hidden_layers} layers use a replaceable attention"
    elif _silent_windows(config, calls, max_model_len):
        reason = "its attention window is known to its mask only; this is not supported yet"
    else:
        return
    raise ModelError(f"model type `{config.model_type}` cannot run here: {reason}", hint=_HINT)


def _class_problem(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model for it"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not model_class._can_set_attn_implementation():
        return "its attention cannot be replaced"
    parameters = inspect.signature(model_class.forward).parameters
    for name in ("position_ids", "logits_to_keep"):
        if name not in parameters:
            return f"its forward pass takes no `{name}`"
    return None


def _config_problem(config: PretrainedConfig) -> str | None:
    if hasattr(config, "text_config"):
        return "it takes more than text; multimodal models are not supported yet"
    foreign = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if foreign:
        return f"it has layers of type {', '.join(sorted(foreign))}"
    rope = _rope_types(getattr(config, "rope_parameters", None)) & _ROW_DEPENDENT_ROPE
    if rope:
        return f"rope scaling `{min(rope)}` is not supported yet"
    if getattr(config, "attn_temperature_tuning", False):
        return "attention temperature tuning is not supported yet"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """The rope types of a model, which has one set of parameters or one per layer type."""
    if not isinstance(parameters, dict):
        return set()
    own = {parameters["rope_type"]} if "rope_type" in parameters else set()
    return own.union(*map(_rope_types, parameters.values()))


def _silent_windows(
    config: PretrainedConfig, calls: Sequence[AttentionCall], max_model_len: int
) -> bool:
    layer_types: Sequence[str] = getattr(config, "layer_types", None) or ()
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    if "chunked_attention" in layer_types and chunk is not None and chunk < max_model_len:
        return True
    window: int | None = getattr(config, "sliding_window", None)
    if window is None or window >= max_model_len or not getattr(config, "use_sliding_window", True):
        return False
    expected = layer_types.count("sliding_attention") if layer_types else 1
    return sum(call.window is not None for call in calls) < expected
