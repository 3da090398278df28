"""How the tokens of a request are drawn: parameters to `Sampling`. Knows nothing of prompts."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

from jobrunner.config import GenerationTable
from jobrunner.records import RowId, Sampling


class Samplings:
    """Makes the sampling of requests.

    `job_seed` keys the random draws by row; a seed among the parameters keys them instead, and
    for every row alike. `end_ids` end a text unless it ignores them.
    """

    def __init__(self, job: GenerationTable, job_seed: int, end_ids: frozenset[int]) -> None:
        self._job = job
        self._job_seed = job_seed
        self._end_ids = end_ids
        self._job_stop_ids = self._stop_ids(job)

    def of(
        self, table: GenerationTable, row: RowId, *, room: int, logprobs: int | None
    ) -> list[Sampling]:
        """The sampling of each of a row's samples, with at most `room` new tokens."""
        stop_ids = self._job_stop_ids if table is self._job else self._stop_ids(table)
        most = min(table.max_new_tokens, room)
        return [
            # all by name: `replace` takes twice the time, and this is done for every row
            Sampling(
                max_new_tokens=most,
                temperature=table.temperature,
                top_p=table.top_p,
                stop=table.stop,
                stop_ids=stop_ids,
                draw_key=self._draw_key(row, table.seed, sample),
                min_new_tokens=min(table.min_new_tokens, most),
                top_k=table.top_k,
                min_p=table.min_p,
                repetition_penalty=table.repetition_penalty,
                presence_penalty=table.presence_penalty,
                frequency_penalty=table.frequency_penalty,
                stop_on_repetition=table.stop_on_repetition,
                logprobs=logprobs,
            )
            for sample in range(table.n)
        ]

    def _stop_ids(self, table: GenerationTable) -> frozenset[int]:
        ends = frozenset() if table.ignore_eos else self._end_ids
        return ends | frozenset(table.stop_token_ids)

    def _draw_key(self, row: RowId, seed: int | None, sample: int) -> bytes:
        # a JSON list keeps the parts apart: no two lists give the same bytes
        if seed is not None:
            parts = f"[{seed}, {sample}]"
        else:
            parts = f"[{self._job_seed}, {_quoted(row.shard)}, {row.index}, {sample}]"
        return hashlib.blake2b(parts.encode(), digest_size=16).digest()


@lru_cache(maxsize=64)
def _quoted(text: str) -> str:
    return json.dumps(text)
