"""What would follow a token's place in the packed row is fixed before a model runs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Llama4TextConfig, LlamaConfig

from jobrunner.engine.positions import freeze_positions
from jobrunner.engine.support import resolve_max_model_len
from jobrunner.errors import ModelError
from tests.tiny import shrunk

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def frozen(config, max_model_len: int):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    freeze_positions(model, max_model_len)
    return model


def test_a_rows_frequencies_do_not_follow_its_neighbours():
    rotary = frozen(shrunk(LlamaConfig, rope_parameters=DYNAMIC), 500).model.rotary_emb
    value = torch.zeros(1)
    alone, _ = rotary(value, torch.tensor([[3]]))
    beside, _ = rotary(value, torch.tensor([[3, 400]]))
    again, _ = rotary(value, torch.tensor([[3]]))
    assert torch.equal(alone[0, 0], beside[0, 0])
    assert torch.equal(alone, again)


def test_each_type_of_layer_is_frozen_for_itself():
    default = {"rope_type": "default", "rope_theta": 1e4}
    config = shrunk(
        Gemma3TextConfig,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"full_attention": DYNAMIC, "sliding_attention": default},
    )
    rotary = frozen(config, 256).model.rotary_emb
    # the base grows by (4 * 256 / 128 - 3) ** (8 / 6)
    powers = torch.arange(0, 8, 2) / 8
    grown = (1e4 * 5 ** (8 / 6)) ** -powers
    torch.testing.assert_close(rotary.full_attention_inv_freq, grown)
    torch.testing.assert_close(rotary.sliding_attention_inv_freq, 1e4**-powers)
    assert set(rotary.rope_type.values()) == {"default"}


def test_dynamic_scaling_goes_beyond_what_the_model_was_made_for_by_its_factor():
    config = shrunk(LlamaConfig, rope_parameters=DYNAMIC)
    assert resolve_max_model_len(config, "auto") == 128
    assert resolve_max_model_len(config, 512) == 512
    with pytest.raises(ModelError, match="the model's limit is 512"):
        resolve_max_model_len(config, 513)


def test_a_row_is_never_long_enough_to_be_rescaled_by_position():
    config = shrunk(Llama4TextConfig, floor_scale=32, attention_chunk_size=128)
    assert resolve_max_model_len(config, "auto") == 31
    with pytest.raises(ModelError, match="limit is 31; beyond, its attention is rescaled"):
        resolve_max_model_len(config, 32)
    model = frozen(config, 31)
    ids = torch.randint(90, (1, 40))
    positions = torch.cat([torch.arange(20), torch.arange(20)]).unsqueeze(0)
    tuned = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tuned.load_state_dict(model.state_dict())
    with torch.inference_mode():
        packed = model(ids, position_ids=positions, use_cache=False).logits[0, 20:]
        alone = tuned(ids[:, 20:], use_cache=False).logits[0]
        rescaled = tuned(ids, position_ids=positions, use_cache=False).logits[0, 20:]
    torch.testing.assert_close(packed, alone)
    assert not torch.allclose(rescaled, alone), "nothing would have been rescaled"
