"""Models that cannot run here are refused with the reason, most before weights are loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig

from jobrunner.engine.loading import open_engine, read_model_info
from jobrunner.engine.support import read_config
from jobrunner.errors import ModelError
from tests.fakes import LetterText
from tests.tiny import save_model, shrunk, tiny_llama


def info(folder: Path) -> None:
    read_model_info(folder, device="cpu", dtype="float32", max_model_len=64)


def refusal_of(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        info(folder)
    assert caught.value.hint
    return caught.value


STATE = "it has layers of type"
FIXED = "its attention cannot be replaced"
NO_POSITIONS = "its forward pass takes no `position_ids`"
MORE = "it takes more than text; multimodal models are not supported yet"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", NO_POSITIONS),
        ("mamba2", NO_POSITIONS),
        ("falcon_mamba", NO_POSITIONS),
        ("xlstm", NO_POSITIONS),
        ("jamba", f"{STATE} linear_attention"),
        ("bamba", f"{STATE} linear_attention"),
        ("granitemoehybrid", f"{STATE} linear_attention"),
        ("minimax", f"{STATE} linear_attention"),
        ("qwen3_next", f"{STATE} linear_attention"),
        # transformers 5.17 has another name, or none, for the layers of these
        ("recurrent_gemma", f"{STATE} linear_attention|layers keep state from token to token"),
        ("falcon_h1", f"{STATE} hybrid"),
        ("zamba", f"{STATE} hybrid, linear_attention"),
        ("zamba2", f"{STATE} hybrid, linear_attention"),
        ("nemotron_h", f"{STATE} linear_attention, mlp, moe"),
        ("lfm2", f"{STATE} conv"),
        ("deepseek_v32", f"{STATE} (indexed|deepseek_sparse)_attention"),
        ("deepseek_v4", f"{STATE} compressed_sparse_attention, heavily_compressed_attention"),
        ("glm_moe_dsa", f"{STATE} (indexed|deepseek_sparse)_attention"),
        ("t5", "it is an encoder-decoder"),
        ("bart", "it is an encoder-decoder"),
        ("llava", MORE),
        ("qwen2_vl", MORE),
        ("gemma3", MORE),
        ("bloom", FIXED),
        ("falcon", FIXED),
        ("mpt", FIXED),
        ("gpt_neo", FIXED),
        ("xglm", FIXED),
        ("rwkv", FIXED),
        ("doge", "the model brings an attention mask of its own"),
        ("vit", "transformers has no causal language model for it"),
        ("blt", "it is not one stack of layers"),
    ],
)
def test_a_model_that_cannot_run_is_refused_before_its_weights_are_read(
    tmp_path: Path, kind: str, reason: str
):
    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    shrunk(CONFIG_MAPPING[kind]).save_pretrained(tmp_path)
    # there are no weights: that is only noticed later
    message = str(refusal_of(tmp_path))
    assert re.fullmatch(f"model type `{kind}` cannot run here: .*({reason})", message), message


def test_prompts_that_look_forward_are_refused(tmp_path: Path):
    shrunk(LlamaConfig, prefix_lm=True).save_pretrained(tmp_path)
    assert "the tokens of its prompts look forward too" in str(refusal_of(tmp_path))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bert", "its mask is neither causal nor a window nor chunks"),
        ("moshi", "its mask does not know of its window of 9 tokens"),
    ],
)
def test_a_mask_that_we_do_not_have_is_refused_at_loading(tmp_path: Path, kind: str, reason: str):
    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    save_model(tmp_path, shrunk(CONFIG_MAPPING[kind]))
    with pytest.raises(ModelError, match=reason):
        open_engine(tmp_path, open_text=lambda: LetterText(str), device="cpu", dtype="float32")


def with_configuration(folder: Path, **changes: Any) -> Path:
    """Change the configuration of a tiny model in ways that its class would not."""
    tiny_llama(folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **changes}))
    return folder


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path):
    (tmp_path / "modeling_new.py").write_text("raise SystemExit('this was run')")
    auto_map = {"AutoConfig": "modeling_new.C", "AutoModelForCausalLM": "modeling_new.M"}
    folder = with_configuration(tmp_path, model_type="new", auto_map=auto_map)
    assert "trust_remote_code stays off" in str(refusal_of(folder))


def test_a_model_with_code_that_transformers_knows_too_runs_on_the_latter(tmp_path: Path):
    info(with_configuration(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_new.M"}))


def test_an_unknown_model_type_is_named(tmp_path: Path):
    folder = with_configuration(tmp_path, model_type="new")
    assert "model type `new` is unknown to transformers" in str(refusal_of(folder))


def test_a_configuration_that_its_class_refuses_is_refused(tmp_path: Path):
    folder = with_configuration(tmp_path, hidden_size="wide")
    assert "no model configuration that transformers can read" in str(refusal_of(folder))


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="no model configuration"):
        read_config(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "made_up"])
def test_a_quantised_checkpoint_that_does_not_load_here_is_refused_by_its_method(
    tmp_path: Path, method: str
):
    settings = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    refusal = refusal_of(with_configuration(tmp_path, quantization_config=settings))
    assert str(refusal).startswith(f"the checkpoint is quantised by `{method}`, which does not")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_not_loaded(tmp_path: Path, name: str):
    LlamaConfig().save_pretrained(tmp_path)
    torch.save({}, tmp_path / name)
    refusal = refusal_of(tmp_path)
    assert str(refusal).endswith(f"holds no safetensors weights, only pickled ones (`{name}`)")
    assert "can run code" in refusal.hint


def test_gguf_weights_are_refused(tmp_path: Path):
    LlamaConfig().save_pretrained(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert str(refusal_of(tmp_path)).endswith("holds no safetensors weights, only GGUF")


def test_a_checkpoint_in_several_files_counts_all_that_its_index_names(tmp_path: Path):
    model = save_in_two_files(tmp_path)
    whole = read_model_info(
        tiny_llama(tmp_path / "whole"), device="cpu", dtype="float32", max_model_len=64
    )
    parts = read_model_info(model, device="cpu", dtype="float32", max_model_len=64)
    assert parts.parameters == whole.parameters
    assert parts.weight_bytes == whole.weight_bytes


def test_a_checkpoint_that_lacks_one_of_its_files_is_refused(tmp_path: Path):
    folder = save_in_two_files(tmp_path)
    file = sorted(folder.glob("*.safetensors"))[0]
    file.unlink()
    assert f"lacks 1 of 2 files of weights, `{file.name}` among them" in str(refusal_of(folder))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0{nojs"])
def test_a_damaged_header_is_refused_with_the_file(tmp_path: Path, damage: bytes):
    path = tiny_llama(tmp_path) / "model.safetensors"
    path.write_bytes(damage)
    assert str(refusal_of(tmp_path)).startswith(f"the weights `{path}` cannot be read: ")


def save_in_two_files(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(tiny_llama(folder / "once"))
    size = sum(tensor.nbytes for tensor in whole.parameters())
    whole.save_pretrained(folder / "twice", max_shard_size=int(size * 0.7))
    assert len(list((folder / "twice").glob("*.safetensors"))) == 2
    return folder / "twice"
