"""Build a scheduler from the settings of a job. Knows nothing of tensors, files or clocks."""

from __future__ import annotations

from jobrunner.config import BatchingTable
from jobrunner.engine.admission import Admission, AdmissionAhead, Reserve
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.order import order_named
from jobrunner.engine.pace import Pace
from jobrunner.engine.policies import policy_named
from jobrunner.engine.prediction import LengthPredictor
from jobrunner.engine.preemption import Costs, Preemption
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.engine.stopping import OpenText
from jobrunner.engine.swap import HostBlocks
from jobrunner.engine.waiting import Waiting

# no prompt is as long
_NO_BLOCK = 2**31


def make_scheduler(
    batching: BatchingTable,
    blocks: Blocks,
    limits: Limits,
    open_text: OpenText,
    *,
    host_blocks: int = 0,
    costs: Costs | None = None,
    ahead: bool = True,
) -> Scheduler:
    """Build the scheduler that `[batching]` names, with the numbers that were chosen for it.

    `host_blocks` take what is swapped out, `costs` are those of a preemption. Without `ahead` a
    sequence is admitted if it fits now, whatever comes.
    """
    predictor = LengthPredictor()
    waiting = Waiting(
        order_named(
            batching.order,
            # where nothing is shared, equal prefixes need not stand together
            block_size=blocks.block_size if blocks.prefix_cache else _NO_BLOCK,
            chunk_size=limits.chunk_size,
            predictor=predictor,
        ),
        starvation_limit_s=batching.starvation_limit,
    )
    admission = Admission()
    if ahead:
        admission = AdmissionAhead(
            predictor,
            blocks.block_size,
            Reserve(batching.reserve),
            Pace(blocks.capacity, limits.max_batch_size, lambda: waiting.new),
        )
    return Scheduler(
        blocks,
        limits,
        open_text,
        policy=policy_named(
            batching.policy,
            preferred_batch_size=batching.preferred_batch_size,
            max_queue_delay_s=batching.max_queue_delay,
        ),
        waiting=waiting,
        admission=admission,
        preemption=Preemption(
            batching.preemption,
            HostBlocks(host_blocks),
            costs=costs,
            predictor=predictor,
            protected=batching.not_preemptible,
            lifted=waiting.lifted,
        ),
    )
