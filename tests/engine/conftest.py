"""Tiny models, saved once for all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_llama, tiny_qwen2


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors this small are slower on many threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("models") / "qwen2")
