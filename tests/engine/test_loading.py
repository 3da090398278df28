"""Opening models: choices that are left to the machine, refusals, the proof at load."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    FalconConfig,
    LlamaConfig,
    MambaConfig,
    PhimoeConfig,
    Qwen3NextConfig,
    T5Config,
)

from jobrunner.engine.attention.torch_paged import TorchPagedAttention
from jobrunner.engine.devices import cpu_has_bfloat16, resolve_device, resolve_dtype
from jobrunner.engine.loading import load_model, open_engine, read_model_info, resolve_limits
from jobrunner.engine.proof import prove
from jobrunner.engine.scheduler import Limits
from jobrunner.engine.support import read_config, resolve_max_model_len
from jobrunner.errors import ModelError
from tests.fakes import LetterText
from tests.tiny import save_model, tiny_llama

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def info(folder: Path, **settings):
    return read_model_info(
        folder, **{"device": "cpu", "dtype": "float32", "max_model_len": "auto", **settings}
    )


def open_tiny(folder: Path, **settings):
    return open_engine(
        folder,
        open_text=lambda: LetterText(str),
        dtype="float32",
        device="cpu",
        **{"kv_memory": 2**20, **settings},
    )


def test_an_engine_says_what_was_chosen_for_it(llama: Path):
    loaded = open_tiny(llama, max_batch_size=4, token_budget=32, block_size=8)
    # 3 layers of 2 kv heads of width 8, keys and values, 4 bytes each
    assert loaded.kv_bytes_per_token == 3 * 2 * 8 * 2 * 4
    assert loaded.kv_blocks == 2**20 // (8 * loaded.kv_bytes_per_token)
    assert (loaded.dtype, loaded.device, loaded.max_model_len) == ("float32", "cpu", 256)
    assert loaded.limits == Limits(4, 32, 32, 16)


def test_kv_memory_auto_holds_the_longest_rows(llama: Path):
    loaded = open_tiny(llama, kv_memory="auto", max_batch_size=4, block_size=16)
    assert loaded.kv_blocks * 16 == 4 * 256


def test_limits_that_are_left_open_fit_together():
    assert resolve_limits("cpu", "auto", 8, "auto", "auto") == Limits(8, 8, 8, 32)
    assert resolve_limits("cpu", 1000, "auto", "auto", 5).token_budget == 1000


def test_max_model_len_is_the_models_own_by_default(llama: Path):
    assert info(llama).max_model_len == 256
    assert info(llama, max_model_len=100).max_model_len == 100


def test_max_model_len_over_the_models_own_is_refused(llama: Path):
    with pytest.raises(ModelError, match=r"max_model_len is 257, the model's limit is 256"):
        info(llama, max_model_len=257)


def test_a_model_that_says_no_length_needs_one():
    with pytest.raises(ModelError, match="does not say how many tokens"):
        resolve_max_model_len(BloomConfig(), "auto")
    assert resolve_max_model_len(BloomConfig(), 64) == 64


def test_dtype_auto_on_a_cpu_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "cbjob")
    expected = "bfloat16" if cpu_has_bfloat16() else "float32"
    assert resolve_dtype("auto", "cpu", LlamaConfig()) == expected
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"dtype {expected}: the processor has ")


def test_dtype_auto_on_a_gpu_is_the_checkpoints():
    assert resolve_dtype("auto", "cuda", LlamaConfig(dtype="float16")) == "float16"
    assert resolve_dtype("auto", "cuda", LlamaConfig()) == "bfloat16"


def test_a_dtype_that_is_given_is_taken():
    assert resolve_dtype("float16", "cpu", LlamaConfig()) == "float16"


def test_a_processor_without_the_flag_has_no_bfloat16(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t: avx2 avx512f\n")
    assert not cpu_has_bfloat16(cpuinfo)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_asked_for_and_absent_is_refused():
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ModelError, match="finds no GPU"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "it is an encoder-decoder"),
        (BloomConfig(), "its attention cannot be replaced"),
        (FalconConfig(), "its attention cannot be replaced"),
        (Qwen3NextConfig(), "layers of type linear_attention"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope scaling `dynamic` is not supported yet",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_that_cannot_run_is_refused_before_its_weights_are_read(
    tmp_path: Path, config, reason: str
):
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as refusal:
        info(tmp_path)
    assert refusal.value.hint


def test_a_state_space_model_is_refused(tmp_path: Path):
    config = MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its forward pass takes no `position_ids`"):
        info(tmp_path, max_model_len=64)


def test_a_window_that_only_the_mask_knows_is_refused(tmp_path: Path):
    config = PhimoeConfig(
        **SMALL, sliding_window=32, max_position_embeddings=64, num_local_experts=2
    )
    save_model(tmp_path, config)
    with pytest.raises(ModelError, match="window is known to its mask only"):
        open_tiny(tmp_path)


def test_a_window_no_row_can_reach_is_no_obstacle(tmp_path: Path):
    config = PhimoeConfig(
        **SMALL, sliding_window=64, max_position_embeddings=64, num_local_experts=2
    )
    assert open_tiny(save_model(tmp_path, config)).max_model_len == 64


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="no model configuration"):
        read_config(tmp_path)


def test_weights_that_could_run_code_are_not_loaded(tmp_path: Path):
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds no safetensors weights"):
        load_model(tmp_path, "float32", "cpu")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path):
    path = tiny_llama(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors of the model, `model.layers.1.mlp"):
        load_model(tmp_path, "float32", "cpu")


def test_damaged_weights_are_refused(tmp_path: Path):
    path = tiny_llama(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path, "float32", "cpu")


def test_weights_of_another_shape_are_refused(tmp_path: Path):
    tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vocab_size"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        load_model(tmp_path, "float32", "cpu")


class ForgetsTheContext(TorchPagedAttention):
    """An attention that works for the first chunk and sees only itself later."""

    def _chunk(self, piece, first):
        chunk = super()._chunk(piece, first)
        return (
            chunk
            if chunk.blocks is None
            else super()._chunk(
                type(piece)(piece.start, piece.stop, [piece.blocks[-1]] * len(piece.blocks)), first
            )
        )


class DecodesTooFar(TorchPagedAttention):
    """An attention whose single tokens see one slot too many."""

    def _decode_group(self, group, first):
        longer = [type(piece)(piece.start, piece.stop + 1, piece.blocks) for piece in group]
        return super()._decode_group(longer, first)


@pytest.mark.parametrize("broken", [ForgetsTheContext, DecodesTooFar])
def test_the_proof_at_load_catches_a_broken_attention(llama: Path, broken):
    model = load_model(llama, "float32", "cpu")
    with pytest.raises(ModelError, match="computes other logits with paged attention"):
        prove(model, broken, block_size=4)


def test_the_proof_names_what_an_attention_cannot_do(llama: Path):
    class Refuses(TorchPagedAttention):
        def attend(self, *arguments):
            raise NotImplementedError("no such thing")

    model = load_model(llama, "float32", "cpu")
    with pytest.raises(ModelError, match="does not run with paged attention: no such thing"):
        prove(model, Refuses, block_size=4)


def test_logits_that_are_not_finite_are_refused(tmp_path: Path):
    path = tiny_llama(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][:] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="logits that are not finite"):
        open_tiny(tmp_path)
