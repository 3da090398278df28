"""What to do when a device has no memory for a step. Knows no queue, no tensors and no device."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from jobrunner.engine.scheduler import Limits

log = logging.getLogger("cbjob")

_LOWERED = ("token_budget", "chunk_size", "max_batch_size")


@dataclass(frozen=True, slots=True)
class Shortage:
    """A step of so many tokens of so many rows failed for want of memory."""

    tokens: int
    rows: int

    @property
    def final(self) -> bool:
        """Whether no step could be smaller."""
        return self.tokens <= 1

    def lowered(self, limits: Limits) -> Limits:
        """Lower the limits, so that no step has more than half the tokens of the one that failed.

        The memory that a step needs beside weights and KV grows with its tokens. No more rows may
        run than there are tokens.
        """
        # what pads a batch comes on top of the budget
        half = max(1, min(self.tokens, limits.token_budget) // 2)
        lower = {name: min(half, getattr(limits, name)) for name in _LOWERED}
        return replace(limits, **lower)

    def tell(self, before: Limits, after: Limits, gave_way: int) -> None:
        """Log what changes for it, and how many rows have to give way."""
        changes = [(name, getattr(before, name), getattr(after, name)) for name in _LOWERED]
        log.warning(
            "out of memory in a step of %s tokens of %s rows: computed again with %s%s",
            f"{self.tokens:,}",
            f"{self.rows:,}",
            ", ".join(f"{name} {old:,} -> {new:,}" for name, old, new in changes if old != new),
            f"; {gave_way:,} rows give way" if gave_way else "",
        )
