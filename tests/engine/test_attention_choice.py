"""Which attention backend is taken, and what is said of it."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from jobrunner.engine.attention import choice
from jobrunner.engine.attention.choice import BY_BLOCK, PLAIN, REFERENCE, choose_backend
from jobrunner.engine.attention.numba_paged import NumbaPagedAttention
from jobrunner.engine.kv import AttentionCall, KvPool
from jobrunner.errors import ModelError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CALLS = [AttentionCall(2, 64, 64)]


def chosen(caplog: pytest.LogCaptureFixture, wanted, device=CPU, dtype=torch.float32, calls=CALLS):
    with caplog.at_level(logging.INFO, logger="cbjob"):
        return choose_backend(wanted, device, dtype, calls), caplog.messages[-1]


@pytest.mark.parametrize("wanted", ["auto", "kernels"])
def test_a_cpu_gets_its_kernels(wanted):
    backend = choose_backend(wanted, CPU, torch.float32, CALLS)
    assert backend.make_pool is KvPool
    assert backend.make_attention is NumbaPagedAttention


@pytest.mark.parametrize("wanted", ["auto", "kernels"])
def test_a_gpu_gets_its_kernels(caplog, wanted):
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from jobrunner.engine.attention import triton_launch

    backend, said = chosen(caplog, wanted, GPU, torch.bfloat16)
    assert backend.make_attention.args == (triton_launch,)
    assert said == f"attention by compiled kernels (triton {triton.__version__})"


@pytest.mark.parametrize(("device", "backend"), [(CPU, PLAIN), (GPU, BY_BLOCK)])
def test_torch_is_taken_where_it_is_asked_for(caplog, device, backend):
    taken, said = chosen(caplog, "torch", device)
    assert taken is backend
    assert said == "attention by torch: as model.attention asks"


def test_the_reference_is_the_same_on_every_device(caplog):
    assert chosen(caplog, "reference", CPU)[0] is REFERENCE
    assert chosen(caplog, "reference", GPU)[0] is REFERENCE


def test_a_format_without_kernels_gets_torch_and_the_reason_is_said(caplog):
    backend, said = chosen(caplog, "auto", CPU, torch.float16)
    assert backend is PLAIN
    assert said == "attention by torch: there are no kernels for float16"


def test_heads_too_wide_for_the_kernels_of_a_gpu_get_torch(caplog):
    pytest.importorskip("triton", reason="triton is not installed")
    wide = [*CALLS, AttentionCall(1, 576, 512)]
    backend, said = chosen(caplog, "auto", GPU, torch.bfloat16, wide)
    assert backend is BY_BLOCK
    assert said.endswith("a head of the model is 576 wide, the kernels serve 256")


def test_without_triton_a_gpu_gets_torch(caplog, monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    backend, said = chosen(caplog, "auto", GPU)
    assert backend is BY_BLOCK
    assert said == "attention by torch: the package triton is missing"
    with pytest.raises(ModelError, match='is "kernels", but the package triton is missing'):
        choose_backend("kernels", GPU, torch.bfloat16, CALLS)


def test_triton_kernels_on_a_cpu_are_only_interpreted(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(choice, "_interprets", lambda: False)
    assert "only where TRITON_INTERPRET=1 is set" in choice.why_no_triton(CPU, CALLS)
    monkeypatch.setattr(choice, "_interprets", lambda: True)
    assert choice.why_no_triton(CPU, CALLS) is None


def test_kernels_that_cannot_be_had_are_refused_where_they_are_asked_for():
    with pytest.raises(ModelError, match='is "kernels", but there are no kernels for float16'):
        choose_backend("kernels", CPU, torch.float16, CALLS)


def test_without_numba_there_is_torch(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    backend, said = chosen(caplog, "auto")
    assert backend is PLAIN
    assert said.startswith("attention by torch: numba cannot be imported")
