"""Run a plan through a transformers model. Knows nothing of queues, blocks' owners or text.

Shapes: T tokens of the packed row, F those of them that only the device knows, B rows of
logits, V vocabulary.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from jobrunner.engine.attention.device_paged import DevicePagedAttention
from jobrunner.engine.attention.hook import Attention, Piece, Singles
from jobrunner.engine.block_pool import BlockPool
from jobrunner.engine.copies import Copied, Copies
from jobrunner.engine.devices import device_state
from jobrunner.engine.graphs import DecodeGraphs, Record, StepInputs, StepOutputs
from jobrunner.engine.inputs import InputSets, TakesInputs
from jobrunner.engine.kv import KvPool
from jobrunner.engine.lack import lacks_memory
from jobrunner.engine.logprobs import Looked, look, read
from jobrunner.engine.plan import Drawn, OutOfMemoryError, Plan
from jobrunner.engine.sampler import likeliest, sample_on_device
from jobrunner.engine.streams import Lane, Mark, Streams, streams_of, wait_for
from jobrunner.engine.swap import Copy
from jobrunner.engine.watchdog import STEP_HINT, Patience, StepLimit, words_of
from jobrunner.errors import HungError, InfrastructureError, lacks_host_memory

Numbers = np.ndarray


# more than any batch has
_MOST_DRAWN = 1 << 16
_UNLIMITED = StepLimit(math.inf)


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """How to record decode steps: of so many sequences at most, none longer than `longest`."""

    record: Record
    most: int
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One row of tokens for one forward pass, and the rows of which logits are wanted.

    `follows` are the places of tokens that are only known on the device: in this row, and among
    the tokens that the pass before drew.
    """

    tokens: Numbers
    positions: Numbers
    singles: Singles
    pieces: Sequence[Piece]
    logit_rows: Numbers
    follows: tuple[Numbers, Numbers] | None = None


def pack(plan: Plan) -> Packed:
    """Lay a plan into one row: single tokens first, by context length, then pieces of prompts.

    `logit_rows` are in the order of the plan, one for each chunk that samples. What pads a batch is
    the token with the longest context once more: it writes what that one writes.
    """
    decodes = plan.decodes
    own = np.argsort(decodes.starts, kind="stable")
    order = np.concatenate([own, np.repeat(own[-1:], plan.padding)])
    starts = decodes.starts[order]
    tokens, positions = [decodes.tokens[order]], [starts]
    pieces: list[Piece] = []
    last_rows: list[int] = []
    row = len(order)
    for chunk in plan.prefills:
        sequence = chunk.sequence
        tokens.append(np.array(sequence.tokens[chunk.start : chunk.stop], np.int64))
        positions.append(np.arange(chunk.start, chunk.stop))
        pieces.append(Piece(chunk.start, chunk.stop, sequence.blocks))
        row += chunk.stop - chunk.start
        if chunk.samples:
            last_rows.append(row - 1)
    # where each decode came to stand
    places = np.empty_like(own)
    places[own] = np.arange(len(own))
    drawn_at = decodes.follows[order]
    follows = np.flatnonzero(drawn_at >= 0)
    return Packed(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        singles=Singles(decodes.table, decodes.slots[order], starts + 1),
        pieces=pieces,
        logit_rows=np.concatenate([places, np.array(last_rows, np.int64)]),
        follows=(follows, drawn_at[follows]) if len(follows) else None,
    )


def used_blocks(packed: Packed | None, block_size: int) -> Numbers:
    """The blocks that a forward pass reads or writes, in no order."""
    if packed is None:
        return np.zeros(0, np.int64)
    singles = packed.singles
    table = singles.table[singles.rows]
    held = np.arange(table.shape[1]) * block_size < singles.lengths[:, None]
    return np.concatenate([table[held], *(np.array(piece.blocks) for piece in packed.pieces)])


class TransformersRunner:
    """Runs plans on a model to which `attention` is attached; copies within `pool`.

    `ahead` where the device computes beside the host: then a plan may be launched that goes on
    with tokens which are still on the device. Where a step takes longer than `limit`, HungError
    is raised.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        attention: Attention,
        device: torch.device,
        pool: KvPool | None = None,
        *,
        ahead: bool | None = None,
        graphs: GraphSettings | None = None,
        limit: StepLimit = _UNLIMITED,
        streams: Streams | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._device = device
        self._limit = limit
        self._streams = streams or streams_of(device)
        self._copies = None if pool is None else Copies(pool, self._streams)
        self._inputs = InputSets(device, self._streams)
        if isinstance(attention, TakesInputs):
            attention.take_inputs(self._inputs.put)
        self.ahead = device.type == "cuda" if ahead is None else ahead
        # by the launch before; stays where it is, because graphs read it
        self._drawn_B = torch.zeros(_MOST_DRAWN, dtype=torch.int64, device=device)
        self._graphs = None if graphs is None else self._decode_graphs(graphs)
        self._ran_out = False

    def run(self, plan: Plan) -> Drawn:
        """Return one sampled token per sampling chunk, in the order of the plan."""
        return self.launch(plan).collect()

    def launch(self, plan: Plan) -> Launched:
        """Begin with a plan; the tokens that it draws stay on the device for the next one.

        Waits for nothing that the device does.
        """
        draws = plan.draws()
        wanted = [draw.sampling.logprobs if draw else None for draw in draws]
        packed = pack(plan) if len(plan) else None
        # a device tells of its failures when it is next waited for, here or there
        with _device_failures(), self._memory_for_a_plan(), self._inputs.launch():
            free = self._streams.mark(Lane.COMPUTE)
            copied, begun = self._copy(plan.copies, packed, free)
            if packed is None:
                return Launched(plan, self._device, self._await, free, begun, begun, copied)
            out = self._compute(packed).first(len(draws))
            # logits that are not finite may lead past the vocabulary, and stop all before they tell
            most = out.logits.shape[1] - 1
            tokens_B = sample_on_device(out.logits, draws, out.tokens).clamp(max=most)
            self._remember(tokens_B)
            return Launched(
                plan,
                self._device,
                self._await,
                free,
                begun,
                copied=copied,
                # the next step of this size writes to the same tensors
                tokens=tokens_B.to("cpu", non_blocking=True, copy=True),
                finite=out.finite.to("cpu", non_blocking=True, copy=True),
                looked=[some.to_host() for some in look(out.logits, tokens_B, wanted)],
                done=self._streams.mark(Lane.COMPUTE),
            )

    def _compute(self, packed: Packed) -> StepOutputs:
        """Compute a packed row, by a recorded step where it holds nothing but single tokens."""
        graphs, singles = self._graphs, packed.singles
        # what pads a batch has no logits; nobody has to be quick there
        alike = not packed.pieces and len(packed.logit_rows) == len(singles)
        if graphs is not None and alike and graphs.serves(singles):
            with torch.inference_mode():
                played = graphs.run(singles, packed.tokens, packed.logit_rows, packed.follows)
            if played is not None:
                return played
        return _outputs(self.logits(packed))

    def _decode_graphs(self, settings: GraphSettings) -> DecodeGraphs:
        assert isinstance(self._attention, DevicePagedAttention), "graphs need kernels"
        assert isinstance(self._pool, BlockPool), "graphs need a trash block"
        return DecodeGraphs(
            partial(self._step, self._attention),
            settings.record,
            self._device,
            most=settings.most,
            longest=settings.longest,
            block_size=self._pool.block_size,
            trash_block=self._pool.trash_block,
            streams=self._streams,
        )

    def _step(self, attention: DevicePagedAttention, inputs: StepInputs) -> StepOutputs:
        """One decode step over tensors alone: what happens here is recorded, not repeated."""
        followed_B = self._drawn_B[inputs.follows.clamp(min=0)]
        tokens_B = torch.where(inputs.follows < 0, inputs.tokens, followed_B)
        attention.begin_tables(inputs.tables)
        logits_1BV = self._model(
            input_ids=tokens_B.unsqueeze(0),
            position_ids=inputs.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=inputs.logit_rows,
        ).logits
        return _outputs(logits_1BV[0])

    def _remember(self, tokens_B: torch.Tensor) -> None:
        self._drawn_B[: len(tokens_B)].copy_(tokens_B)

    def logits(self, packed: Packed) -> torch.Tensor:
        """Compute a packed row; return the logits of its `logit_rows`, `[B, V]`, in its own dtype.

        Where none are wanted there is one row all the same, of the first token.
        """
        self._attention.begin(packed.singles, packed.pieces)
        rows = self._numbers(packed.logit_rows if len(packed.logit_rows) else np.zeros(1, np.int64))
        with torch.inference_mode():
            logits_1BV = self._model(
                input_ids=self._tokens(packed),
                position_ids=self._numbers(packed.positions).unsqueeze(0),
                use_cache=False,
                logits_to_keep=rows,
            ).logits
            return logits_1BV[0]

    def _copy(
        self, copies: Sequence[Copy], packed: Packed | None, free: Mark
    ) -> tuple[Copied | None, Mark]:
        """Begin to swap blocks, and let what is computed next wait for those that it uses.

        Return also where the computing begins: at `free` if no block is under way.
        """
        if self._copies is None:
            assert not copies, "a plan has copies, the runner has no pool to copy in"
            return None, free
        if not copies and self._copies.idle:
            return None, free
        used = used_blocks(packed, self._copies.block_size)
        copied = self._copies.begin(copies, used) if copies else None
        self._copies.hold_for(used)
        return copied, self._streams.mark(Lane.COMPUTE)

    @contextmanager
    def _memory_for_a_plan(self) -> Iterator[None]:
        """Tell a lack of memory from what cannot be mended, and go on from one with all there is.

        What the failed plan held is only free when nobody looks at its error any more.
        """
        if self._copies is not None:
            self._copies.carried_out = 0
        if self._ran_out:
            # the part of it that was launched may still write
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._ran_out = False
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            self._ran_out = True
            copied = 0 if self._copies is None else self._copies.carried_out
            on_host = lacks_host_memory(error)
            raise OutOfMemoryError(str(error), copied=copied, on_host=on_host) from error

    def _await(self, mark: Mark, plan: Plan) -> None:
        """Wait until the device has passed a mark in the work on a plan, but not for ever."""
        patience = Patience(self._limit.of(plan))
        if not wait_for(mark, patience):
            raise HungError(
                f"{words_of(plan)} is not done after {patience.waited_s:,.1f} s, more than"
                f" batching.max_step; {device_state(self._device)}",
                hint=STEP_HINT,
            )

    def _tokens(self, packed: Packed) -> torch.Tensor:
        tokens_1T = self._numbers(packed.tokens).unsqueeze(0)
        if packed.follows is None:
            return tokens_1T
        places_F, drawn_at_F = map(self._numbers, packed.follows)
        return tokens_1T.index_copy(1, places_F, self._drawn_B[drawn_at_F].unsqueeze(0))

    def _numbers(self, numbers: Numbers) -> torch.Tensor:
        return self._inputs.put(numbers)


@dataclass(frozen=True, slots=True)
class Launched:
    """What a device is computing, and where on the host it will be: `tokens`, `finite`, `[B]`.

    `wait` waits for a mark in its work on the plan. It was `free` for the plan when it had computed
    the one before, has `begun` to compute when no copy holds it up, and is `done`.
    """

    plan: Plan
    device: torch.device
    wait: Callable[[Mark, Plan], None]
    free: Mark
    begun: Mark
    done: Mark
    copied: Copied | None = None
    tokens: torch.Tensor | None = None
    finite: torch.Tensor | None = None
    looked: Sequence[Looked] = ()

    def collect(self) -> Drawn:
        """Wait for it; return one sampled token per sampling chunk, in the order of the plan."""
        with _device_failures():
            copy_s = 0.0
            if self.copied is not None:
                self.wait(self.copied.done, self.plan)
                copy_s = self.copied.seconds
            self.wait(self.done, self.plan)
            held_s = self.begun.since(self.free)
            if self.tokens is None:
                return Drawn(copy_s=copy_s, held_s=held_s)
            assert self.finite is not None, "a step that draws tells whether it may"
            _check_finite(self.finite, self.plan, self.device)
            logprobs = read(self.looked, len(self.tokens))
            compute_s = self.done.since(self.begun)
            return Drawn(self.tokens.tolist(), logprobs, copy_s, held_s, compute_s)


@contextmanager
def _device_failures() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        raise InfrastructureError(
            f"the device failed: {error}",
            hint="run again; out of memory: lower batching.kv_memory or token_budget",
        ) from error


def _outputs(logits_BV: torch.Tensor) -> StepOutputs:
    likeliest_B = likeliest(logits_BV)
    return StepOutputs(logits_BV, likeliest_B, finite(logits_BV, likeliest_B))


def finite(logits_BV: torch.Tensor, likeliest_B: torch.Tensor) -> torch.Tensor:
    """Whether each row has no NaN and no +inf: one would be the likeliest."""
    return logits_BV.gather(1, likeliest_B.unsqueeze(1)).squeeze(1).isfinite()


def _check_finite(finite_B: torch.Tensor, plan: Plan, device: torch.device) -> None:
    """Stop before a token from nothing is booked: what is not finite spreads in the KV pool."""
    if bool(finite_B.all()):
        return
    broken = (~finite_B).nonzero().flatten().tolist()
    sampling = plan.sampling()
    rows = [sampling[place].request.id for place in broken]
    raise InfrastructureError(
        f"the model gives logits that are not finite for {rows[0]} and {len(rows) - 1} more,"
        f" in {words_of(plan)}; {device_state(device)}",
        hint='a wider `model.dtype` may help: "bfloat16" or "float32"; else the weights are broken',
    )
