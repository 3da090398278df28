"""Learn what a step costs from the steps that ran. Knows nothing of rows, clocks or the screen."""

from __future__ import annotations

from dataclasses import dataclass

from jobrunner.console.least_squares import LeastSquares
from jobrunner.records import Step


@dataclass(frozen=True, slots=True)
class Cost:
    """A forward pass takes fixed_s + prefill_s · prefill tokens + decode_s · decode tokens."""

    fixed_s: float
    prefill_s: float
    decode_s: float


class CostModel:
    """Splits forward passes into prefill and decode by a linear cost fitted to all of them.

    A pass of one kind is that kind's time, fixed cost included. The passes that carried both
    are split together, in proportion prefill_s · Σ prefill tokens : decode_s · Σ decode tokens.
    """

    def __init__(self) -> None:
        self._fit = LeastSquares(3)
        self._prefill_only_s = 0.0
        self._decode_only_s = 0.0
        self._both_s = 0.0
        self._both_prefill_tokens = 0
        self._both_decode_tokens = 0

    def add(self, step: Step) -> None:
        """Take in one step that computed something."""
        self._fit.add((1.0, step.prefill_tokens, step.decode_tokens), step.forward_s)
        if not step.decode_tokens:
            self._prefill_only_s += step.forward_s
        elif not step.prefill_tokens:
            self._decode_only_s += step.forward_s
        else:
            self._both_s += step.forward_s
            self._both_prefill_tokens += step.prefill_tokens
            self._both_decode_tokens += step.decode_tokens

    def cost(self) -> Cost | None:
        """The fitted cost, None while the steps are too alike to tell its parts apart."""
        coefficients = self._fit.solve()
        return None if coefficients is None else Cost(*coefficients.tolist())

    def split(self, cost: Cost | None) -> tuple[float, float] | None:
        """Seconds of prefill and of decode so far; None while passes of both kinds are unsplit."""
        share = 0.0
        if self._both_s:
            if cost is None:
                return None
            prefill = cost.prefill_s * self._both_prefill_tokens
            both = prefill + cost.decode_s * self._both_decode_tokens
            if both == 0.0:
                return None
            share = prefill / both
        prefill_s = self._prefill_only_s + share * self._both_s
        return prefill_s, self._decode_only_s + (1 - share) * self._both_s


@dataclass(frozen=True, slots=True)
class Amdahl:
    """Decode as work of which only a part is shared: t_B = t₁ · ((1 − f) · B + f)."""

    single_s: float
    parallel_fraction: float

    @property
    def ceiling(self) -> float | None:
        """The speed-up that no batch size exceeds, 1 / (1 − f); None where nothing limits it."""
        serial = 1.0 - self.parallel_fraction
        return 1.0 / serial if serial > 0 else None


class SpeedUp:
    """What batching gains, from the steps that only decode: B sequences take t_B together."""

    def __init__(self) -> None:
        self._fit = LeastSquares(2)
        self._sequences = 0
        self._seconds = 0.0

    def add(self, step: Step) -> None:
        """Take in one step; one with prefill tokens says nothing here."""
        if step.decode_tokens and not step.prefill_tokens:
            self._fit.add((1.0, step.batch_size), step.step_s)
            self._sequences += step.batch_size
            self._seconds += step.step_s

    def law(self) -> Amdahl | None:
        """t_B = t₁ f + t₁ (1 − f) B as a line over B; None until batch sizes differ."""
        coefficients = self._fit.solve()
        if coefficients is None or not coefficients.any():
            return None
        shared_s, serial_s = coefficients.tolist()
        single_s = shared_s + serial_s
        return Amdahl(single_s, shared_s / single_s)

    def gained(self, law: Amdahl) -> float | None:
        """Σ B · t₁ / Σ t_B: one by one, the same tokens would have taken so many times longer."""
        return self._sequences * law.single_s / self._seconds if self._seconds else None
