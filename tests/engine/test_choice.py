"""Who attends: what is asked for, what the device has, and what the log says of it."""

from __future__ import annotations

import logging

import pytest
import torch

from jobrunner.engine.attention import choice
from jobrunner.engine.attention.choice import BY_BLOCK, PLAIN, REFERENCE, choose_backend
from jobrunner.engine.kv import AttentionCall
from jobrunner.errors import ModelError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CALLS = [AttentionCall(2, 64, 64)]


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)


def test_a_cpu_takes_plain_torch_unless_told_otherwise():
    assert choose_backend("auto", CPU, CALLS) is PLAIN
    assert choose_backend("torch", CPU, CALLS) is BY_BLOCK
    assert choose_backend("reference", CPU, CALLS) is REFERENCE


def test_a_gpu_takes_the_kernels():
    pytest.importorskip("triton", reason="triton is not installed")
    from jobrunner.engine.attention import triton_launch

    assert choose_backend("auto", GPU, CALLS).make_attention.args == (triton_launch,)
    assert choose_backend("torch", GPU, CALLS) is BY_BLOCK


@pytest.mark.usefixtures("no_triton")
def test_without_triton_a_gpu_takes_plain_torch_and_the_log_says_so(caplog):
    with caplog.at_level(logging.INFO, "cbjob"):
        assert choose_backend("auto", GPU, CALLS) is BY_BLOCK
    assert caplog.messages == ["attention torch, which is slower: the package triton is missing"]


@pytest.mark.usefixtures("no_triton")
def test_kernels_that_are_asked_for_and_absent_are_an_error():
    with pytest.raises(ModelError, match="`triton`, but the package triton is missing"):
        choose_backend("triton", GPU, CALLS)


def test_heads_too_wide_for_the_kernels_take_plain_torch(caplog):
    pytest.importorskip("triton", reason="triton is not installed")
    wide = [*CALLS, AttentionCall(1, 576, 512)]
    with caplog.at_level(logging.INFO, "cbjob"):
        assert choose_backend("auto", GPU, wide) is BY_BLOCK
    assert "a head of the model is 576 wide, the kernels serve 256" in caplog.text


def test_kernels_on_a_cpu_are_only_interpreted(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(choice, "_interprets", lambda: False)
    with pytest.raises(ModelError, match="run on a CPU only where TRITON_INTERPRET=1 is set"):
        choose_backend("triton", CPU, CALLS)
