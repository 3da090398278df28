"""A lack of memory is named with what it was wanted for, and with what to lower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobrunner.engine import loading, proof
from jobrunner.engine.lack import memory_for
from jobrunner.errors import HostMemoryError, InfrastructureError
from tests.engine.test_transformers import open_tiny
from tests.tiny import tiny_llama

# more than any machine can address
ENDLESS = 1 << 60


def asks_torch(*_: Any, **__: Any) -> None:
    torch.empty(ENDLESS, dtype=torch.uint8)


def asks_numpy(*_: Any, **__: Any) -> None:
    np.zeros(ENDLESS, dtype=np.uint8)


@pytest.mark.parametrize("asks", [asks_torch, asks_numpy])
@pytest.mark.parametrize(
    ("where", "what", "lower"),
    [
        ((loading.AutoModelForCausalLM, "from_pretrained"), "the weights in", "workers.count"),
        ((proof, "record_calls"), "the first passes of the model", "workers.count"),
        ((loading, "_costs"), "the first swapped blocks", "batching.kv_memory"),
    ],
)
def test_loading_without_memory_says_for_what_and_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: Any, where: Any, what: str, lower: str
) -> None:
    model = tiny_llama(tmp_path)
    monkeypatch.setattr(*where, asks)
    with pytest.raises(HostMemoryError, match=f"this machine has no memory for {what}") as raised:
        open_tiny(model)
    assert lower in raised.value.hint


def test_a_pool_without_memory_is_named_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path)
    made = []

    def zeros(*arguments: Any) -> torch.Tensor:
        made.append(arguments)
        return torch.empty(ENDLESS, dtype=torch.uint8)

    original = loading.prove_model

    def then_nothing_is_left(*arguments: Any, **options: Any) -> Any:
        proven = original(*arguments, **options)
        monkeypatch.setattr("jobrunner.engine.kv.zeros", zeros)
        return proven

    monkeypatch.setattr(loading, "prove_model", then_nothing_is_left)
    with pytest.raises(HostMemoryError, match=r"for [0-9,]+ blocks of KV and .* MiB") as raised:
        open_tiny(model)
    assert made
    assert "batching.kv_memory" in raised.value.hint


def test_a_device_without_memory_is_no_lack_of_the_host() -> None:
    no_memory = pytest.raises(InfrastructureError, match="the device has no memory for it")
    with no_memory as raised, memory_for("it", "that"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert not isinstance(raised.value, HostMemoryError)


def test_any_other_failure_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_for("it", "that"):
        raise RuntimeError("the shapes do not fit")
