"""Which models can run on our attention, decided without weights. Knows nothing of devices."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, DynamicCache, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers import AutoHfQuantizer

from jobrunner.engine.kv import EVERYTHING, AttentionCall
from jobrunner.engine.positions import untuned_length
from jobrunner.errors import ModelError

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_HINT = "use a decoder-only model with full or sliding-window attention, such as Llama or Qwen"


def read_config(folder: Path) -> PretrainedConfig:
    """Read the configuration of a local model folder; ModelError where it is unusable."""
    try:
        _check_known(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        StrictDataclassError,
    ) as error:
        raise ModelError(
            f"`{folder}` has no model configuration that transformers can read: {error}",
            hint="model.name must lead to a folder with config.json and safetensors weights",
        ) from error


def resolve_max_model_len(config: PretrainedConfig, requested: int | Literal["auto"] | None) -> int:
    """Return the most tokens of prompt and output a row may have.

    `auto` is what the model was made for; more than that is a ModelError.
    """
    made_for: int | None = getattr(config, "max_position_embeddings", None)
    untuned = untuned_length(config)
    known = [length for length in (made_for, untuned) if length is not None]
    if requested is None or requested == "auto":
        if not known:
            raise ModelError(
                f"`{config.model_type}` does not say how many tokens it takes",
                hint="set model.max_model_len",
            )
        return min(known)
    limit = min(known, default=requested)
    if limit == made_for:
        limit = int(limit * _stretch(config))
    if requested > limit:
        why = "; beyond, its attention is rescaled by position" if limit == untuned else ""
        raise ModelError(
            f"model.max_model_len is {requested:,}, the model's limit is {limit:,}{why}",
            hint=f"set model.max_model_len to at most {limit}",
        )
    return requested


def _stretch(config: PretrainedConfig) -> float:
    """How much longer than made for a text may be: dynamic scaling is there to go beyond."""
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope["factor"]) if rope.get("rope_type") == "dynamic" else 1.0


def check_supported(config: PretrainedConfig) -> None:
    """Raise ModelError, with the reason, for a model that our attention cannot serve."""
    reason = _kind_problem(config) or _class_problem(config) or _layer_problem(config)
    if reason is not None:
        raise refusal(config, reason)
    _check_quantization(config)


def check_calls(config: PretrainedConfig, calls: Sequence[AttentionCall]) -> None:
    """Raise ModelError unless every layer of the model has called our attention in a pass.

    A layer that never calls keeps what it knows of earlier tokens elsewhere.
    """
    layers = config.num_hidden_layers
    if len(calls) < layers:
        raise refusal(config, f"{len(calls)} of {layers} layers use a replaceable attention")


def check_reach(
    config: PretrainedConfig, calls: Sequence[AttentionCall], max_model_len: int
) -> None:
    """Raise ModelError for a model that forgets tokens in its cache, but not in its mask.

    Then its own answers depend on whether it uses a cache.
    """
    windows = [
        layer.sliding_window
        for layer in DynamicCache(config=config).layers
        if getattr(layer, "is_sliding", False)
    ]
    seen = all(call.reach == EVERYTHING for call in calls)
    if seen and windows and min(windows) < max_model_len:
        raise refusal(config, f"its mask does not know of its window of {min(windows):,} tokens")


def refusal(config: PretrainedConfig, reason: str) -> ModelError:
    """Say why a model of this configuration cannot run here."""
    return ModelError(f"model type `{config.model_type}` cannot run here: {reason}", hint=_HINT)


def _check_known(document: dict[str, Any]) -> None:
    kind = document.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if "auto_map" in document:
        raise ModelError(
            f"model type `{kind}` needs code that comes with the model; trust_remote_code stays off"
            ": such code is never run",
            hint=_HINT,
        )
    raise ModelError(
        f"model type `{kind}` is unknown to transformers {transformers.__version__}",
        hint="a newer transformers may know it",
    )


def _kind_problem(config: PretrainedConfig) -> str | None:
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        return "it takes more than text; multimodal models are not supported yet"
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if config.get_text_config() is not config:
        return "it takes more than text; multimodal models are not supported yet"
    return None


def _class_problem(config: PretrainedConfig) -> str | None:
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


def _layer_problem(config: PretrainedConfig) -> str | None:
    if not hasattr(config, "num_hidden_layers"):
        return "it is not one stack of layers"
    foreign = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if foreign:
        return f"it has layers of type {', '.join(sorted(foreign))}"
    if getattr(config, "prefix_lm", False):
        return "the tokens of its prompts look forward too"
    return None


def _check_quantization(config: PretrainedConfig) -> None:
    """Raise ModelError where what a quantised checkpoint needs is not here."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    method = dict(quantization).get("quant_method")
    try:
        AutoHfQuantizer.from_config(quantization).validate_environment(device_map=None)
    except (ImportError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"the checkpoint is quantised by `{method}`, which does not load here: {error}",
            hint="install what the method needs, or use the checkpoint before quantisation",
        ) from error
