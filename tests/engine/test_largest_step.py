"""The largest step, measured on a fake device that counts bytes, decides how much KV gets."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobrunner.config import BatchingTable
from jobrunner.cores import WORKERS_VARIABLE
from jobrunner.engine import loading
from jobrunner.engine.graphs import batch_sizes
from jobrunner.engine.largest_step import GRAPH_BYTES, SCRATCH_BLOCKS, StepMemory, measure
from jobrunner.engine.loading import (
    PlacedModel,
    ProvenModel,
    build_engine,
    place_model,
    prove_model,
)
from jobrunner.engine.memory import HEADROOM_BYTES, Needs
from jobrunner.engine.plan import Drawn, Plan
from jobrunner.engine.scheduler import Limits
from jobrunner.errors import ModelError
from tests.engine.test_graphs import TracingRecorder
from tests.engine.test_pipeline import completions
from tests.engine.test_transformers import generate, greedy, letters, open_tiny, random_prompts
from tests.fakes import FakeRequests

MIB = 2**20
LIMITS = Limits(max_batch_size=4, token_budget=22, chunk_size=9, lookahead=16)


class FakeMemory:
    """A device that counts what it is told to keep and what it is told to hold for a moment."""

    def __init__(self, total: int, others: int = 0, weights: int = 0) -> None:
        self._total, self._others = total, others
        self._tensors = self._peak = weights
        self._graphs = self._cached = 0

    def moment(self, size: int) -> None:
        """Take memory and let it go; it stays reserved."""
        self._peak = max(self._peak, self._tensors + size)
        self._cached = max(self._cached, size)

    def keep_graph(self, size: int) -> None:
        self._graphs += size

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self._others - self.reserved()

    def reserved(self) -> int:
        return self._tensors + self._graphs + self._cached

    def allocated(self) -> int:
        return self._tensors

    def begin_peak(self) -> None:
        self._peak = self._tensors

    def peak(self) -> int:
        return self._peak

    def give_back(self) -> None:
        self._cached = 0


class FakeSteps:
    """Takes bytes for tokens, drawn rows and contexts; keeps more for recorded steps."""

    def __init__(self, memory: FakeMemory) -> None:
        self.plans: list[Plan] = []
        self._memory = memory

    def run(self, plan: Plan) -> Drawn:
        self.plans.append(plan)
        self._memory.moment(1000 * plan.tokens + 70 * len(plan.sampling()) + plan.context_tokens)
        return Drawn()


class FakeRecorder:
    """Keeps bytes for tokens, and needs more while it records."""

    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory

    def run(self, plan: Plan) -> Drawn:
        self._memory.moment(10**9)
        self._memory.keep_graph(500 * plan.tokens)
        return Drawn()


def test_the_largest_steps_are_run_and_their_peak_is_taken():
    memory = FakeMemory(10**9, weights=12345)
    steps = FakeSteps(memory)
    memory.moment(10**8)
    found = measure(steps, memory, LIMITS, 64, 8, decodes=True)
    prompts, long, decodes = steps.plans
    assert [chunk.stop - chunk.start for chunk in prompts.prefills] == [6, 6, 5, 5]
    assert prompts.prefill_tokens == LIMITS.token_budget
    assert len(prompts.draws()) == LIMITS.max_batch_size
    assert all(draw is not None and draw.sampling.temperature for draw in prompts.draws())
    assert [(chunk.start, chunk.stop) for chunk in long.prefills] == [(55, 64)]
    assert decodes.context_tokens == 4 * 63
    assert all(block < SCRATCH_BLOCKS for block in long.prefills[0].sequence.blocks)
    assert int(np.max(decodes.decodes.table)) < SCRATCH_BLOCKS
    assert found == StepMemory(22 * 1000 + 4 * 70)


def test_recorded_steps_count_with_all_sizes_that_will_be_recorded():
    memory = FakeMemory(10**9)
    found = measure(
        FakeSteps(memory),
        memory,
        LIMITS,
        64,
        8,
        decodes=False,
        recorder=FakeRecorder(memory),
        recorded_rows=12,
        logit_bytes=30,
    )
    smaller = [size for size in batch_sizes(12) if size < 12]
    assert smaller == [1, 2, 4, 8]
    # what was only held for a moment, while it was recorded, is free again
    assert found.graphs == 500 * 12 + 15 * 30 + 4 * GRAPH_BYTES


def test_prompts_are_no_longer_than_the_model_allows():
    memory = FakeMemory(10**9)
    steps = FakeSteps(memory)
    measure(steps, memory, Limits(2, 100, 100, 1), 30, 8, decodes=False)
    assert [chunk.stop for plan in steps.plans for chunk in plan.prefills] == [30, 30, 30]


NEEDS = Needs(
    total=10_000 * MIB,
    others=1_000 * MIB,
    weights=3_000 * MIB,
    step=700 * MIB,
    graphs=44 * MIB,
    said="measured",
)


def test_kv_gets_what_all_others_leave_of_the_share():
    assert HEADROOM_BYTES == 256 * MIB
    assert NEEDS.left(0.9) == 4_000 * MIB
    assert NEEDS.left(1.0) == 5_000 * MIB


def test_kv_that_has_no_room_is_refused_with_all_figures():
    NEEDS.check(0.9, 4_000 * MIB)
    with pytest.raises(ModelError) as raised:
        NEEDS.check(0.5, 1)
    assert str(raised.value) == (
        "KV memory of 1 bytes has no room: 50% of 10,000 MiB - others 1,000 MiB"
        " - weights 3,000 MiB - the largest step 700 MiB - recorded steps 44 MiB"
        " - headroom 256 MiB = 0 MiB, measured"
    )
    assert raised.value.hint


class TinyMemory(FakeMemory):
    """Memory beside a real model: each token of a pass takes a MiB for a moment."""

    def __init__(self, model: Any, total: int, **more: int) -> None:
        super().__init__(total, **more)
        self.passes: list[int] = []
        model.register_forward_hook(self._after, with_kwargs=True)

    def _after(self, model: Any, arguments: Any, given: dict[str, Any], out: Any) -> None:
        self.passes.append(given["input_ids"].shape[1])
        self.moment(self.passes[-1] * MIB)


@pytest.fixture(scope="module")
def proven(llama: Path) -> ProvenModel:
    return prove_model(llama, dtype="float32", device="cpu", attention="reference", block_size=4)


def placed(proven: ProvenModel, memory: FakeMemory, kv_memory: Any) -> PlacedModel:
    return place_model(
        proven, LIMITS, BatchingTable(), block_size=4, kv_memory=kv_memory, memory=memory
    )


def test_a_share_of_the_device_is_filled_to_the_last_block(proven: ProvenModel, caplog):
    total = 1_000 * MIB
    memory = TinyMemory(proven.model, total, others=100 * MIB, weights=50 * MIB)
    with caplog.at_level(logging.INFO, "cbjob"):
        found = placed(proven, memory, 0.5)
    # prompts up to the budget, the end of a long one, a batch of decodes
    assert memory.passes == [22, 9, 4]
    left = (500 - 100 - 50 - 22 - 256) * MIB
    block_bytes = 4 * found.kv_bytes_per_token
    assert found.pool.block_count == left // block_bytes
    said = [line for line in caplog.messages if line.startswith("memory for KV")]
    assert said == [
        "memory for KV: 50% of 1,000 MiB - others 100 MiB - weights 50 MiB - the largest step"
        " 22 MiB - recorded steps 0 MiB - headroom 256 MiB = 72 MiB, measured on cpu"
    ]


def test_recorded_steps_take_their_part_of_it(proven: ProvenModel, monkeypatch, caplog):
    recorder = TracingRecorder()
    memory = TinyMemory(proven.model, 1_000 * MIB)

    def record(step: Any, inputs: Any) -> Any:
        memory.keep_graph(10 * MIB)
        return recorder(step, inputs)

    monkeypatch.setattr(loading, "_recorder", lambda device: record)
    without = placed(proven, FakeMemory(1_000 * MIB), 1000 * MIB // 2).pool.block_count
    with caplog.at_level(logging.INFO, "cbjob"):
        placed(proven, memory, 0.9)
    assert without
    assert recorder.sizes[-1] == LIMITS.max_batch_size
    graphs = 10 + 2 * GRAPH_BYTES // MIB
    assert any(f"recorded steps {graphs} MiB" in line for line in caplog.messages)


def test_a_size_must_fit_beside_the_largest_step(proven: ProvenModel):
    left = (1_000 - 100 - 22 - 256) * MIB
    memory = partial(TinyMemory, proven.model, 1_000 * MIB, others=100 * MIB)
    assert placed(proven, memory(), left).pool.block_count > 0
    with pytest.raises(ModelError, match=re.escape("the largest step 22 MiB")):
        placed(proven, memory(), left + 1)


def test_a_step_that_finds_no_memory_when_measured_is_refused(proven: ProvenModel, monkeypatch):
    def fails(*arguments: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr("jobrunner.engine.runner.TransformersRunner.logits", fails)
    with pytest.raises(ModelError, match=r"a step of 22 tokens and 4 rows .* 2\.00 GiB"):
        placed(proven, FakeMemory(MIB), 0.9)


def test_a_pool_after_the_measurement_computes_what_it_should(proven: ProvenModel, llama: Path):
    found = placed(proven, TinyMemory(proven.model, 1_000 * MIB), 0.5)
    engine = build_engine(found, LIMITS, BatchingTable(), letters)
    prompts = random_prompts(4)
    done = completions(list(engine.run(FakeRequests([greedy(*row) for row in enumerate(prompts)]))))
    assert [list(done[index].tokens) for index in range(4)] == generate(llama, prompts)


def test_a_share_of_a_host_counts_what_is_in_use_and_estimates_the_step(
    llama: Path, monkeypatch, caplog
):
    monkeypatch.setattr(loading, "total_memory", lambda: 1_000 * MIB)
    monkeypatch.setattr(loading, "available_memory", lambda: 900 * MIB)
    with caplog.at_level(logging.INFO, "cbjob"):
        loaded = open_tiny(llama, kv_memory=0.5)
    # 100 are in use, and a tiny model needs next to nothing
    room = loaded.kv_blocks * loaded.block_size * loaded.kv_bytes_per_token
    assert 143 * MIB < room <= 144 * MIB
    assert any(line.endswith("= 144 MiB, the step estimated") for line in caplog.messages)
    monkeypatch.setenv(WORKERS_VARIABLE, "2")
    assert open_tiny(llama, kv_memory=0.5).kv_blocks <= loaded.kv_blocks // 2
