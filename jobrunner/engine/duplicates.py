"""Compute equal requests once and answer all of them. Knows nothing of steps or tensors."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from operator import attrgetter

from jobrunner.records import (
    Completion,
    FinishReason,
    Request,
    RowError,
    RowId,
    SampleId,
    Sampling,
    TokenLogprob,
)

# answers that are kept in case that their question comes again, in tokens
REMEMBERED_TOKENS = 1_000_000
# who follows has no prompt of its own: so many of them take the memory of one waiting row
FOLLOWERS_PER_ROW = 16

_DIGEST_BYTES = 16
# everything that decides the tokens of a greedy text: it makes no draws
_greedy_rules = attrgetter(*(f.name for f in fields(Sampling) if f.name != "draw_key"))


@dataclass(frozen=True, slots=True)
class _Answer:
    row: RowId
    tokens: array[int]
    finish_reason: FinishReason | None
    stop_string: str | None
    error: RowError | None
    logprobs: Seq[TokenLogprob]
    prompt_tokens: int

    @property
    def size_tokens(self) -> int:
        return 1 + len(self.tokens) + sum(1 + len(logprob.top) for logprob in self.logprobs)

    def continues(self, output: Seq[int]) -> bool:
        """Tell whether it may stand for a text of which an earlier run generated the beginning."""
        if self.error is not None:
            return not output
        return self.tokens[: len(output)] == array("q", output)


@dataclass(slots=True)
class _Leader:
    """A request that the engine computes, and who waits for its answer, with their arrivals."""

    request: Request
    key: Hashable
    followers: list[tuple[Request, float]]


class Duplicates:
    """Lets the first of several equal requests run and gives its answer to the others.

    Requests are equal if their prompts and all that decides their tokens are: greedy ones
    whatever their draw key, others with it, so those with the same own seed. Nothing is shared
    where it would change more than tokens: a request with tokens of an earlier run goes on with
    those, one of a higher priority does not wait for a lower one, and one whose arrival is
    replayed takes its time. The answers of last use are remembered, up to `remembered_tokens`.
    """

    def __init__(self, remembered_tokens: int = REMEMBERED_TOKENS) -> None:
        self._remembered_tokens = remembered_tokens
        self._leaders: dict[Hashable, _Leader] = {}
        self._leading: dict[SampleId, _Leader] = {}
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._answer_tokens = 0
        self._waiting = 0
        self._answered = 0

    @property
    def waiting(self) -> int:
        """How many requests wait for the answer of another."""
        return self._waiting

    @property
    def window_rows(self) -> int:
        """How many rows of the waiting window they count for."""
        return -(-self._waiting // FOLLOWERS_PER_ROW)

    def sift(
        self, requests: Iterable[Request], now: float
    ) -> tuple[list[Request], list[Completion]]:
        """Return the requests to be computed, and the answers that are known; the rest waits."""
        computed: list[Request] = []
        known: list[Completion] = []
        for request in requests:
            if request.arrival_s > 0:
                computed.append(request)
                continue
            key = _key(request)
            answer = self._recall(key)
            if answer is not None and answer.continues(request.output):
                known.append(_completion(answer, request, queue_s=0.0))
            elif answer is not None or not self._follow(request, key, now):
                computed.append(request)
        self._answered += len(known)
        return computed, known

    def share(self, completions: Iterable[Completion], now: float) -> list[Completion]:
        """Return the completions of those who waited for one of these, in the order they came."""
        shared: list[Completion] = []
        for completion in completions:
            leader = self._leading.pop(_sample(completion), None)
            if leader is None:
                continue
            del self._leaders[leader.key]
            answer = _answer(completion)
            self._remember(leader.key, answer)
            self._waiting -= len(leader.followers)
            shared += [
                _completion(answer, request, queue_s=now - arrived_at)
                for request, arrived_at in leader.followers
            ]
        self._answered += len(shared)
        return shared

    def withdraw(self, requests: Iterable[Request]) -> list[Request]:
        """Forget requests that are not computed after all; return them and who waited for them."""
        withdrawn: list[Request] = []
        for request in requests:
            withdrawn.append(request)
            leader = self._leading.pop(SampleId(request.id, request.sample), None)
            if leader is not None:
                del self._leaders[leader.key]
                self._waiting -= len(leader.followers)
                withdrawn += [follower for follower, _ in leader.followers]
        return withdrawn

    def count_answered(self) -> int:
        """Return how many requests got an answer without being computed, since the last call."""
        count, self._answered = self._answered, 0
        return count

    def check(self) -> None:
        """Raise AssertionError unless leaders, followers and answers agree with each other."""
        assert {id(leader) for leader in self._leaders.values()} == {
            id(leader) for leader in self._leading.values()
        }, "a leader is not known by its id"
        followers = sum(len(leader.followers) for leader in self._leaders.values())
        assert followers == self._waiting, "a follower is lost or doubled"
        assert not self._leaders.keys() & self._answers.keys(), "an answered request runs again"
        tokens = sum(answer.size_tokens for answer in self._answers.values())
        assert tokens == self._answer_tokens, "the size of the answers is wrong"
        assert tokens <= self._remembered_tokens, "more answers than may be remembered"

    def _follow(self, request: Request, key: Hashable, now: float) -> bool:
        """Make a request wait for an equal one; False, and it may lead, if it is computed."""
        leader = self._leaders.get(key)
        if leader is None:
            self._leaders[key] = leader = _Leader(request, key, [])
            self._leading[SampleId(request.id, request.sample)] = leader
            return False
        if request.output or request.priority < leader.request.priority:
            return False
        leader.followers.append((replace(request, prompt=leader.request.prompt), now))
        self._waiting += 1
        return True

    def _recall(self, key: Hashable) -> _Answer | None:
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def _remember(self, key: Hashable, answer: _Answer) -> None:
        self._answers[key] = answer
        self._answer_tokens += answer.size_tokens
        while self._answer_tokens > self._remembered_tokens:
            _, forgotten = self._answers.popitem(last=False)
            self._answer_tokens -= forgotten.size_tokens


def _key(request: Request) -> Hashable:
    sampling = request.sampling
    prompt = blake2b(array("q", request.prompt).tobytes(), digest_size=_DIGEST_BYTES).digest()
    draw_key = sampling.draw_key if sampling.temperature > 0 else b""
    return prompt, draw_key, _greedy_rules(sampling)


def _sample(completion: Completion) -> SampleId:
    return SampleId(completion.id, completion.request.sample if completion.request else 0)


def _answer(completion: Completion) -> _Answer:
    return _Answer(
        completion.id,
        array("q", completion.tokens),
        completion.finish_reason,
        completion.stop_string,
        completion.error,
        completion.logprobs,
        completion.prompt_tokens,
    )


def _completion(answer: _Answer, request: Request, queue_s: float) -> Completion:
    return Completion(
        id=request.id,
        tokens=answer.tokens.tolist(),
        finish_reason=answer.finish_reason,
        stop_string=answer.stop_string,
        prompt_tokens=answer.prompt_tokens,
        error=_error_of(request.id, answer),
        queue_s=queue_s,
        request=request,
        logprobs=answer.logprobs,
    )


def _error_of(row: RowId, answer: _Answer) -> RowError | None:
    """The same error, in the words of another row."""
    if answer.error is None:
        return None
    return RowError(answer.error.kind, answer.error.message.replace(str(answer.row), str(row)))
