"""Opening models: choices that are left to the machine, refusals, the proof at load."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, BloomConfig, DeepseekV3Config, LlamaConfig, PhimoeConfig

from jobrunner.engine import loading
from jobrunner.engine.attention.choice import Backend
from jobrunner.engine.attention.hook import UnservedError
from jobrunner.engine.attention.torch_paged import TorchPagedAttention
from jobrunner.engine.devices import (
    cpu_has_bfloat16,
    cpu_has_float16,
    cpu_multiplies_tiles,
    is_native,
    resolve_device,
    resolve_dtype,
)
from jobrunner.engine.kv import KvPool
from jobrunner.engine.loading import load_model, open_engine, read_model_info, resolve_limits
from jobrunner.engine.proof import prove
from jobrunner.engine.scheduler import Limits
from jobrunner.engine.support import resolve_max_model_len
from jobrunner.errors import ModelError
from jobrunner.records import Request, RowId, Sampling
from tests.equality import compare_with_generate
from tests.fakes import FakeRequests, LetterText
from tests.tiny import save_model, shrunk, tiny_llama

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


def test_a_processor_without_the_flags_only_emulates_16_bit_numbers(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t: avx2 avx512f\n")
    assert not cpu_has_bfloat16(cpuinfo)
    assert not cpu_has_float16(cpuinfo)


def test_tiles_are_told_by_their_flag(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t: avx512_bf16 amx_bf16 amx_tile\n")
    assert cpu_multiplies_tiles(cpuinfo)
    cpuinfo.write_text("flags\t: avx512_bf16\n")
    assert not cpu_multiplies_tiles(cpuinfo)


def test_every_processor_computes_in_float32():
    assert is_native("float32", "cpu")
    assert is_native("bfloat16", "cpu") == cpu_has_bfloat16()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_asked_for_and_absent_is_refused():
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ModelError, match="finds no GPU"):
        resolve_device("cuda")


def test_a_window_no_row_can_reach_is_no_obstacle(tmp_path: Path):
    config = PhimoeConfig(
        **SMALL, sliding_window=64, max_position_embeddings=64, num_local_experts=2
    )
    assert open_tiny(save_model(tmp_path, config)).max_model_len == 64


def test_what_is_known_without_weights_is_what_an_engine_has(llama: Path):
    before, loaded = info(llama), open_tiny(llama)
    assert before.kv_bytes_per_token == loaded.kv_bytes_per_token
    assert (before.architecture, before.layers) == ("LlamaForCausalLM", 3)
    model = load_model(llama, "float32", "cpu")
    assert before.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert before.weight_bytes == 4 * before.parameters
    assert info(llama, dtype="bfloat16").weight_bytes == 2 * before.parameters
    assert info(llama, dtype="float16").kv_bytes_per_token == loaded.kv_bytes_per_token // 2


def test_kv_of_keys_wider_than_values_is_known_without_weights(tmp_path: Path):
    save_model(tmp_path, shrunk(DeepseekV3Config))
    # 4 layers of 4 heads: keys of 8 + 4, values of 6 numbers of 4 bytes
    assert info(tmp_path).kv_bytes_per_token == 4 * 4 * (12 + 6) * 4
    assert open_tiny(tmp_path).kv_bytes_per_token == 4 * 4 * (12 + 6) * 4


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "gemma3_text", "jetmoe"])
def test_kv_without_weights_is_right_or_said_to_be_a_guess(tmp_path: Path, kind: str):
    save_model(tmp_path, shrunk(CONFIG_MAPPING[kind]))
    before, loaded = info(tmp_path), open_tiny(tmp_path)
    assert before.kv_is_a_guess or before.kv_bytes_per_token == loaded.kv_bytes_per_token
    assert before.kv_is_a_guess == (kind in ("gpt2", "jetmoe"))


def test_a_model_bigger_than_memory_is_refused_before_loading_with_both_figures(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    needed = info(llama).weight_bytes + 16 * info(llama).kv_bytes_per_token
    monkeypatch.setattr(loading, "available_memory", lambda: needed - 1)
    with pytest.raises(ModelError, match=rf"needs {needed:,} bytes .* free are {needed - 1:,}"):
        info(llama)
    monkeypatch.setattr(loading, "available_memory", lambda: needed)
    info(llama)


def test_float16_works_on_a_cpu(tmp_path: Path):
    folder = tiny_llama(tmp_path, initializer_range=0.05)
    loaded = open_engine(
        folder,
        open_text=lambda: LetterText(str),
        dtype="float16",
        device="cpu",
        kv_memory=2**20,
        max_batch_size=4,
    )
    rows = [Request(RowId("s", n), [n + 1] * (3 * n + 1), Sampling(5)) for n in range(4)]
    done = [c for step in loaded.engine.run(FakeRequests(rows)) for c in step.completions]
    assert [len(completion.tokens) for completion in done] == [5] * 4


def test_a_checkpoint_in_fp8_answers_as_it_does_dequantised(tmp_path: Path):
    folder = tiny_llama(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 16), -(-columns // 16))
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    verdict = compare_with_generate(folder)
    assert verdict.equal, verdict.difference


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

    def _decode_group(self, singles, first, last):
        return super()._decode_group(replace(singles, lengths=singles.lengths + 1), first, last)


@pytest.mark.parametrize("broken", [ForgetsTheContext, DecodesTooFar])
def test_the_proof_at_load_catches_a_broken_attention(llama: Path, broken):
    model = load_model(llama, "float32", "cpu")
    with pytest.raises(ModelError, match="computes other logits with paged attention"):
        prove(model, lambda *_: Backend(KvPool, broken), block_size=4, max_model_len=64)


def test_the_proof_names_what_an_attention_cannot_do(llama: Path):
    class Refuses(TorchPagedAttention):
        def attend(self, *arguments):
            raise UnservedError("no such thing")

    model = load_model(llama, "float32", "cpu")
    with pytest.raises(ModelError, match="with paged attention it fails: no such thing"):
        prove(model, lambda *_: Backend(KvPool, Refuses), block_size=4, max_model_len=64)


def test_logits_that_are_not_finite_are_refused(tmp_path: Path):
    path = tiny_llama(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][:] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="logits that are not finite"):
        open_tiny(tmp_path)


def test_what_a_token_costs_is_known_before_the_weights(tmp_path):
    dense = tiny_llama(tmp_path / "dense")
    info = read_model_info(dense, device="cpu", dtype="float32", max_model_len="auto")
    output = 96 * 32
    assert info.flops_per_output_token == 2 * output
    assert info.flops_per_token == 2 * (info.parameters - 2 * output)
    config = json.loads((dense / "config.json").read_text())
    # a product with K and one with V, as wide as the hidden state over all heads
    assert info.attention_flops == 2 * 2 * config["hidden_size"] * config["num_hidden_layers"]
