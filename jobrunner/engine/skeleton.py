"""Look at a model without its weights: built on the meta device, where nothing is computed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from jobrunner.engine.attention.hook import UnservedError
from jobrunner.engine.attention.probe import record_calls
from jobrunner.engine.kv import AttentionCall
from jobrunner.engine.support import check_calls, refusal

log = logging.getLogger("cbjob")

_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)
# grouped products of experts have a shape for this one alone
_DTYPE = torch.bfloat16
_META = torch.device("meta")


def calls_without_weights(
    config: PretrainedConfig, max_model_len: int
) -> Sequence[AttentionCall] | None:
    """Return the attention calls of a pass; what each one sees is known only with weights.

    None for a model that cannot run on the meta device: some that choose experts cannot. Raises
    ModelError for a model that its structure shows to be none of ours.
    """
    # setting an attention writes into the configuration
    config = copy.deepcopy(config)
    try:
        with _META:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=_DTYPE
            )
    except (ImportError, *_FAILURES) as error:
        raise refusal(config, f"transformers cannot build it: {error}") from error
    _check_no_state(config, model)
    try:
        calls = record_calls(model, _META, max_model_len)
    except UnservedError as error:
        raise refusal(config, str(error)) from error
    except _FAILURES as error:
        log.debug("`%s` does not run without weights: %s", config.model_type, error)
        return None
    check_calls(config, calls)
    return calls


def usual_calls(config: PretrainedConfig) -> list[AttentionCall]:
    """The attention calls that most models of this configuration would make."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return [AttentionCall(kv_heads, width, width)] * config.num_hidden_layers


def _check_no_state(config: PretrainedConfig, model: torch.nn.Module) -> None:
    """Refuse short convolutions over time, which come with state-space and linear attention.

    A packed row would run them over the border between two sequences.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            layer = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise refusal(config, f"its `{layer}` layers keep state from token to token")
