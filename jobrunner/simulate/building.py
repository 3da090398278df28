"""Make rows and machine out of the settings of a simulation. Knows no clock and no screen."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Literal

from jobrunner.config import BatchingTable
from jobrunner.engine.arrivals import poisson_arrivals
from jobrunner.engine.scheduler import Limits
from jobrunner.engine.tuning import Automatic, most_batch_size
from jobrunner.errors import ConfigError
from jobrunner.simulate.cost import PROFILES, Profile, StepCost
from jobrunner.simulate.settings import CostTable, RowsTable, Simulation
from jobrunner.simulate.trace import (
    TraceRow,
    draw_rows,
    parse_lengths,
    read_trace,
)
from jobrunner.simulate.virtual import Machine

# where neither a profile nor the settings say more
_BATCH_SIZE = 256
_TOKEN_BUDGET = 8192


@dataclass(frozen=True, slots=True)
class Basis:
    """What a step costs before the settings change it, and in words where that comes from."""

    cost: StepCost
    words: str
    profile: Profile | None = None


def basis_of(table: CostTable, fitted: StepCost | None, fitted_words: str = "") -> Basis:
    """Choose the profile, what was fitted to `metrics`, or costs of 0 to be set one by one."""
    if table.profile is not None:
        profile = PROFILES[table.profile]
        return Basis(profile.cost, f"{profile.name}: {profile.assumes}", profile)
    if fitted is not None:
        return Basis(fitted, f"fitted to the steps of `{table.metrics}`; {fitted_words}")
    return Basis(StepCost(), "as set")


def rows_of(simulation: Simulation) -> list[TraceRow]:
    """Read or draw the rows, with their arrivals, in the order in which they stand."""
    table, seed = simulation.rows, simulation.simulation.seed
    if simulation.trace.path is not None:
        rows = _trace_rows(simulation, simulation.trace.path)
    else:
        assert table.output is not None
        count = _drawn_count(table, seed)
        rows = draw_rows(count, parse_lengths(table.prompt), parse_lengths(table.output), seed)
    for most in (table.count, simulation.limit):
        rows = rows[:most]
    if table.rate is None:
        return rows
    times = islice(_arrivals(table, table.rate, seed), len(rows))
    return [row._replace(arrival_s=at_s) for row, at_s in zip(rows, times, strict=False)]


def _trace_rows(simulation: Simulation, path: str) -> list[TraceRow]:
    columns = simulation.trace.model_dump(exclude={"path"})
    rows = read_trace(simulation.folder / Path(path).expanduser(), columns)
    if simulation.rows.arrivals != "trace":
        return [row._replace(arrival_s=0.0) for row in rows]
    return sorted(rows, key=lambda row: row.arrival_s)


def _drawn_count(table: RowsTable, seed: int) -> int:
    if table.rate is None or table.arriving_for is None:
        assert table.count is not None
        return table.count
    arrived = sum(1 for _ in islice(_arrivals(table, table.rate, seed), table.count))
    if not arrived:
        raise ConfigError(
            f"no row arrives within {table.arriving_for:g} s",
            hint="raise rows.arriving_for or the rate, or change simulation.seed",
        )
    return arrived


def _arrivals(table: RowsTable, rate: float, seed: int) -> takewhile[float]:
    end_s = float("inf") if table.arriving_for is None else table.arriving_for
    return takewhile(lambda at_s: at_s <= end_s, poisson_arrivals(rate, seed))


def machine_of(simulation: Simulation, basis: Basis, rows: list[TraceRow]) -> Machine:
    """Fill in what the settings leave open. Raises ConfigError."""
    limits = _limits(simulation.batching, basis.profile)
    automatic = _automatic(simulation.batching)
    longest_output = max(row.output for row in rows)
    longest = max(row.prompt + row.output for row in rows)
    # each row begins a block of its own; twice that never keeps anyone out
    together = most_batch_size(limits) if automatic.max_batch_size else limits.max_batch_size
    wanted = 2 * together * (longest + simulation.batching.block_size)
    kv_blocks = _blocks(simulation.batching, simulation.cost, basis.profile, wanted)
    return Machine(
        cost=_changed(basis.cost, simulation.cost),
        limits=limits,
        kv_blocks=kv_blocks,
        host_blocks=_host_blocks(simulation, basis.profile, kv_blocks),
        prediction=simulation.simulation.prediction,
        batching=simulation.batching,
        max_new_tokens=simulation.rows.max_new_tokens or longest_output,
        known_lengths=simulation.rows.known_lengths,
        workers=simulation.simulation.workers,
        shared_prefix=simulation.rows.shared_prefix,
        automatic=automatic,
    )


def _changed(cost: StepCost, table: CostTable) -> StepCost:
    return StepCost(
        **{
            name: getattr(cost, name) if (value := getattr(table, name)) is None else value
            for name in StepCost.__slots__
        }
    )


def _limits(batching: BatchingTable, profile: Profile | None) -> Limits:
    size = _number(batching.max_batch_size, profile.max_batch_size if profile else _BATCH_SIZE)
    most = profile.token_budget if profile else _TOKEN_BUDGET
    budget = _number(batching.token_budget, max(size, most))
    size = min(size, budget)
    return Limits(
        max_batch_size=size,
        token_budget=budget,
        chunk_size=_number(batching.chunk_size, budget),
        lookahead=_number(batching.lookahead, 4 * size),
        schedule_every=batching.schedule_every,
    )


def _automatic(batching: BatchingTable) -> Automatic:
    return Automatic(
        max_batch_size=batching.max_batch_size == "auto",
        token_budget=batching.token_budget == "auto",
        chunk_size=batching.chunk_size == "auto",
        lookahead=batching.lookahead == "auto",
    )


def _number(value: int | Literal["auto"], automatic: int) -> int:
    return automatic if value == "auto" else value


def _blocks(
    batching: BatchingTable, table: CostTable, profile: Profile | None, wanted_tokens: int
) -> int:
    """Blocks of KV memory: `batching.kv_memory`, or what the machine has, or enough."""
    memory = batching.kv_memory
    if memory == "auto":
        most = table.kv_tokens or (
            profile.kv_memory // profile.kv_bytes_per_token if profile else 0
        )
        tokens = most or wanted_tokens
    elif isinstance(memory, float):
        raise ConfigError(
            f"batching.kv_memory is a share, {memory}, of a memory that a simulation does not know",
            hint='set a size, like --set batching.kv_memory="8GiB", or cost.kv_tokens',
        )
    else:
        tokens = memory // _token_bytes(table, profile)
    blocks = tokens // batching.block_size
    if blocks < 1:
        raise ConfigError(
            f"KV memory for {tokens:,} tokens holds no block of {batching.block_size} tokens",
            hint="raise batching.kv_memory or cost.kv_tokens, or lower batching.block_size",
        )
    return blocks


def _host_blocks(simulation: Simulation, profile: Profile | None, kv_blocks: int) -> int:
    """Blocks of host memory: `batching.swap_memory`, or as many as on the device."""
    memory = simulation.batching.swap_memory
    if memory == "auto":
        return kv_blocks
    return memory // _token_bytes(simulation.cost, profile) // simulation.batching.block_size


def _token_bytes(table: CostTable, profile: Profile | None) -> int:
    if table.kv_bytes_per_token is not None:
        return table.kv_bytes_per_token
    if profile is None:
        raise ConfigError(
            "`batching` has sizes in bytes, and nothing says how many bytes a token of KV has",
            hint="set cost.kv_bytes_per_token, or cost.kv_tokens instead of batching.kv_memory",
        )
    return profile.kv_bytes_per_token
