"""Tell whether two ways to serve rows gave the same answers, and where rounding decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jobrunner.commands.compare_runs import Answers, Listed
from jobrunner.records import Engine, Request, SampleId, Sampling

# greedy answers may differ where two logits are nearer than this
NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
# answers that are looked into
_MOST = 32
_LIKELIEST = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not the reference's from token `position` on.

    `gap` is that of the logits of the two tokens there; None where it is not known.
    """

    name: str
    sample: SampleId
    position: int
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class Texts:
    """What the answers of the others say beside those of `reference`.

    Of the differences so many were looked into; those have a gap if they are greedy.
    """

    reference: str
    answers: int
    differences: Sequence[Difference]
    near_tie: float

    @property
    def near_ties(self) -> int:
        return sum(each.gap is not None and each.gap <= self.near_tie for each in self.differences)

    @property
    def beyond(self) -> int:
        return sum(each.gap is not None and each.gap > self.near_tie for each in self.differences)

    @property
    def largest_gap(self) -> float | None:
        return max((each.gap for each in self.differences if each.gap is not None), default=None)


def compare_texts(
    reference: str,
    answers: Mapping[str, Answers],
    requests: Sequence[Request],
    open_engine: Callable[[], Engine],
    near_tie: float,
) -> Texts:
    """Compare all answers with those of the reference; look into the first that differ."""
    known = {SampleId(request.id, request.sample): request for request in requests}
    expected = answers[reference]
    differences: list[Difference] = []
    for name, given in answers.items():
        for sample in sorted(given.keys() & expected.keys()):
            if (place := _first_difference(expected[sample], given[sample])) is None:
                continue
            found = Difference(name, sample, place)
            if len(differences) < _MOST:
                tokens = (expected[sample], given[sample])
                found = replace(found, gap=_gap(known[sample], place, tokens, open_engine))
            differences.append(found)
    return Texts(reference, len(expected), differences, near_tie)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def plainly_greedy(request: Request) -> bool:
    """Whether its tokens are the likeliest ones, without any rule."""
    sampling = request.sampling
    plain = Sampling(
        sampling.max_new_tokens,
        stop_ids=sampling.stop_ids,
        draw_key=sampling.draw_key,
        logprobs=sampling.logprobs,
    )
    # these rules say nothing where the temperature is 0
    changed = replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
    return changed == plain


def _gap(
    request: Request,
    place: int,
    answers: tuple[Sequence[int], Sequence[int]],
    open_engine: Callable[[], Engine],
) -> float | None:
    """How far apart the two tokens' logits are: their log-probabilities differ by as much."""
    if not plainly_greedy(request) or place >= min(map(len, answers)):
        return None
    asked = replace(
        request,
        prompt=[*request.prompt, *answers[0][:place]],
        sampling=Sampling(1, logprobs=_LIKELIEST),
        output=(),
        arrival_s=0.0,
    )
    likeliest = next(_likeliest(open_engine(), asked), {})
    if not likeliest:
        return None
    # a token that is not among them is at least as far away as the last of them
    least = min(likeliest.values())
    one, other = (likeliest.get(tokens[place], least) for tokens in answers)
    return abs(one - other)


def _likeliest(engine: Engine, request: Request) -> Iterator[dict[int, float]]:
    for step in engine.run(Listed([request])):
        for completion in step.completions:
            yield from (dict(each.top) for each in completion.logprobs)
