"""Recorded decode steps: the tokens of `generate`, and nothing of the host baked in.

The recorder here traces a step into a graph of tensor operations, as a GPU would capture it: what
is not a tensor when it is recorded stays as it was, and asking a tensor for a number fails.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from jobrunner.config import BatchingTable
from jobrunner.engine import graphs, loading
from jobrunner.engine.attention.device_paged import DecodeTables
from jobrunner.engine.attention.hook import Singles
from jobrunner.engine.graphs import (
    DecodeGraphs,
    Record,
    Replay,
    Step,
    StepInputs,
    StepOutputs,
    batch_sizes,
)
from jobrunner.engine.runner import TransformersRunner
from jobrunner.records import Request, RowId
from tests.engine.test_transformers import (
    MIXED,
    generate,
    greedy,
    open_tiny,
    random_prompts,
    serve,
)

CPU = torch.device("cpu")


class TracingRecorder:
    """Records by tracing; counts what it recorded and played."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.played = 0

    def __call__(self, step: Step, inputs: StepInputs) -> Replay:
        tables = inputs.tables
        tensors = (
            *(inputs.tokens, inputs.positions, inputs.follows, inputs.logit_rows),
            *(tables.slots, tables.lengths, tables.rows, tables.table),
        )
        self.sizes.append(len(inputs.tokens))

        def on_tensors(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = step(StepInputs(*given[:4], DecodeTables(*given[4:])))
            return outputs.logits, outputs.tokens, outputs.finite

        traced = make_fx(on_tensors)(*tensors)
        outputs = StepOutputs(*(tensor.clone() for tensor in traced(*tensors)))

        def replay() -> None:
            self.played += 1
            for there, new in zip(
                (outputs.logits, outputs.tokens, outputs.finite), traced(*tensors), strict=True
            ):
                there.copy_(new)

        return replay, outputs


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TracingRecorder:
    """Let engines be one step ahead, and record their decode steps."""
    recorder = TracingRecorder()
    monkeypatch.setattr(loading, "TransformersRunner", partial(TransformersRunner, ahead=True))
    monkeypatch.setattr(loading, "_recorder", lambda device: recorder)
    return recorder


def test_recorded_steps_give_the_tokens_of_generate(llama: Path, recorder: TracingRecorder):
    prompts = random_prompts(12)
    expected = generate(llama, prompts)
    steps, done = serve(
        llama,
        [greedy(*row) for row in enumerate(prompts)],
        chunk_size=7,
        kv_memory=36 * 4 * open_tiny(llama).kv_bytes_per_token,
        scheduling=BatchingTable(preemption="swap"),
        ahead=False,
        attention="reference",
    )
    assert [done[index].tokens for index in range(12)] == expected
    assert sum(step.preemptions for step in steps) > 0
    assert len(recorder.sizes) == len(set(recorder.sizes)) > 1, "a size is recorded once"
    assert recorder.played > 10


def test_rows_with_rules_draw_from_the_logits_of_a_recorded_step(
    llama: Path, recorder: TracingRecorder
):
    kinds = [each for each in MIXED if each.repetition_penalty == 1 and not each.frequency_penalty]
    prompts = random_prompts(len(kinds), seed=8)
    rows = [
        Request(RowId("s", index), prompt, kind)
        for index, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    _, recorded = serve(llama, rows, attention="reference", max_batch_size=3)
    assert recorder.played > 5
    _, plain = serve(llama, rows, attention="auto", device="cpu", max_batch_size=1)
    for index in range(len(rows)):
        assert recorded[index].tokens == plain[index].tokens


def test_a_model_that_cannot_be_recorded_computes_all_the_same(
    llama: Path, recorder: TracingRecorder, monkeypatch, caplog
):
    def asks_the_device(step: Step, inputs: StepInputs) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(TracingRecorder, "__call__", lambda self, *given: asks_the_device(*given))
    prompts = random_prompts(3)
    rows = [greedy(*row) for row in enumerate(prompts)]
    with caplog.at_level(logging.WARNING, "cbjob"):
        _, done = serve(llama, rows, attention="reference")
    assert [done[index].tokens for index in range(3)] == generate(llama, prompts)
    assert caplog.messages == [
        "decode steps are launched one operation at a time, slower: "
        "operation not permitted when stream is capturing"
    ]


def test_a_lack_of_memory_when_recording_is_got_over(
    llama: Path, recorder: TracingRecorder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(graphs, "_FIRST_PAUSE", 2)
    record, lacks = TracingRecorder.__call__, [True]

    def first_without_memory(self: TracingRecorder, step: Step, inputs: StepInputs) -> Replay:
        if lacks:
            lacks.pop()
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return record(self, step, inputs)

    monkeypatch.setattr(TracingRecorder, "__call__", first_without_memory)
    prompts = random_prompts(3)
    rows = [greedy(*row) for row in enumerate(prompts)]
    _, done = serve(llama, rows, attention="reference")
    assert [done[index].tokens for index in range(3)] == generate(llama, prompts)
    assert not lacks
    assert recorder.played > 0


class NarrowRecorder:
    """Has memory to record steps of up to `most` rows; keeps which sizes it tried."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []

    def __call__(self, step: Step, inputs: StepInputs) -> Replay:
        size = len(inputs.tokens)
        self.tried.append(size)
        if size > self.most:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        zeros = torch.zeros(size)
        return lambda: None, StepOutputs(zeros.view(size, 1), zeros, zeros)


def small_graphs(record: Record) -> DecodeGraphs:
    return DecodeGraphs(
        lambda inputs: None, record, CPU, most=4, longest=40, block_size=16, trash_block=9
    )


def singles_of(count: int) -> Singles:
    return Singles(np.zeros((4, 3), np.int32), np.arange(count), np.ones(count, np.int64))


def plays(graphs: DecodeGraphs, count: int) -> bool:
    """Whether a step of so many rows is played; if not, it has to be launched."""
    singles = singles_of(count)
    if not graphs.serves(singles):
        return False
    return graphs.run(singles, np.zeros(count), np.arange(count), None) is not None


def test_a_size_without_memory_is_tried_again_after_a_pause_twice_as_long_each_time(caplog):
    record = NarrowRecorder(most=2)
    small = small_graphs(record)
    tried_at = []
    for step in range(1 + 257 + 513 + 1025):
        record.most = 4 if step > 1000 else 2
        tries = len(record.tried)
        played = plays(small, 4)
        if len(record.tried) > tries:
            tried_at.append(step)
    assert played
    assert tried_at == [0, 257, 257 + 513, 257 + 513 + 1025]
    assert caplog.messages == [
        f"no memory to record decode steps of 4 rows: the next {count} are launched one operation"
        " at a time, slower: Tried to allocate 2.00 GiB"
        for count in (256, 512, 1024)
    ]


def test_smaller_sizes_than_one_without_memory_are_recorded_and_larger_ones_are_not_tried():
    record = NarrowRecorder(most=1)
    small = small_graphs(record)
    assert plays(small, 1)
    assert not plays(small, 2)
    assert not plays(small, 3)
    assert plays(small, 1)
    assert record.tried == [1, 2]


def test_what_is_recorded_is_played_though_a_smaller_size_has_no_memory():
    record = NarrowRecorder(most=4)
    small = small_graphs(record)
    assert plays(small, 4)
    record.most = 1
    assert not plays(small, 2)
    assert plays(small, 4)


def test_a_batch_is_filled_up_with_rows_of_the_trash_block():
    seen: list[dict[str, list]] = []

    def record(step: Step, inputs: StepInputs) -> Replay:
        size = len(inputs.tokens)

        def replay() -> None:
            seen.append(
                {
                    "tokens": inputs.tokens.tolist(),
                    "positions": inputs.positions.tolist(),
                    "follows": inputs.follows.tolist(),
                    "logit_rows": inputs.logit_rows.tolist(),
                    "slots": inputs.tables.slots.tolist(),
                    "lengths": inputs.tables.lengths.tolist(),
                    "first_blocks": inputs.tables.table[inputs.tables.rows, 0].tolist(),
                }
            )

        replay()
        zeros = torch.zeros(size)
        return replay, StepOutputs(zeros.view(size, 1), zeros, zeros)

    graphs = DecodeGraphs(
        lambda inputs: None, record, CPU, most=4, longest=40, block_size=16, trash_block=9
    )
    table = np.array([[0, 0, 0], [5, 6, 7], [8, 0, 0], [1, 2, 0]], np.int32)
    singles = Singles(table, np.array([2, 3, 1]), np.array([3, 17, 33]))
    assert graphs.serves(singles)
    out = graphs.run(
        singles,
        np.array([11, 12, 13]),
        np.array([2, 0, 1]),
        (np.array([1]), np.array([0])),
    )
    recording, played = seen
    assert recording["slots"] == [9 * 16] * 4
    assert recording["lengths"] == [1] * 4
    assert recording["first_blocks"] == [9] * 4
    assert played == {
        "tokens": [11, 12, 13, 0],
        "positions": [2, 16, 32, 0],
        "follows": [-1, 0, -1, -1],
        "logit_rows": [2, 0, 1, 3],
        "slots": [8 * 16 + 2, 2 * 16, 7 * 16, 9 * 16],
        "lengths": [3, 17, 33, 1],
        "first_blocks": [8, 1, 5, 9],
    }
    assert len(out.tokens) == 3
    graphs.run(singles, np.array([1, 2, 3]), np.arange(3), None)
    assert seen[2]["follows"] == [-1] * 4


def test_only_what_fits_is_played():
    graphs = DecodeGraphs(
        lambda inputs: None, lambda *_: None, CPU, most=2, longest=20, block_size=16, trash_block=9
    )
    table = np.zeros((3, 4), np.int32)

    def of(*lengths: int) -> Singles:
        return Singles(table, np.arange(len(lengths)), np.array(lengths, np.int64))

    assert [graphs.serves(of(*some)) for some in ((), (5,), (5, 32), (5, 33), (1, 2, 3))] == [
        False,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("most", [1, 2, 3, 64, 100, 256, 1000])
def test_no_batch_is_filled_up_by_much(most: int):
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count < max(8, 0.5 * size)
