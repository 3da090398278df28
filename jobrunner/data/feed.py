"""The bounded window between reading and the engine. Knows nothing of files, text or tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Condition, Thread

from jobrunner.records import Completion, Request, RowId


class Feed:
    """Prepares requests on a background thread and hands them to the engine in order.

    `batches` is pulled on that thread until the window holds `max_rows` rows or `max_tokens`
    tokens; a request bigger than that passes when the window is empty. While `batches` waits
    for something it should yield empty lists, so that `close` is prompt, and so that the engine
    does not wait for company of the rows it has. Rows that failed in preparation count as rows
    until `errors` hands them over.

    `wanted` tells, at any moment, which rows others have not taken over meanwhile.

    Whatever the thread raises is raised by the next call here. Call it from one thread.
    """

    def __init__(
        self,
        batches: Iterator[list[Request | Completion]],
        max_rows: int,
        max_tokens: int,
        wanted: Callable[[RowId], bool] = lambda row: True,
    ) -> None:
        self._wanted = wanted
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._changed = Condition()
        self._ready: deque[Request] = deque()
        self._errors: list[Completion] = []
        self._tokens = 0
        self._ended = False
        self._dry = False
        self._closing = False
        self._admitting = True
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._pump, args=(batches,), name="feed", daemon=True)
        self._thread.start()

    @property
    def exhausted(self) -> bool:
        """No request is left, and none is known to come; errors may still be there.

        What other workers hold may come later: `ended` tells when nothing can.
        """
        with self._changed:
            self._raise_failure()
            if not self._admitting:
                return True
            return (self._ended or self._dry) and not self._ready

    @property
    def ended(self) -> bool:
        """No request is left and none will come; errors may still be there."""
        with self._changed:
            self._raise_failure()
            return not self._admitting or (self._ended and not self._ready)

    @property
    def left_over(self) -> bool:
        """`stop_admitting` kept back requests, or may have."""
        with self._changed:
            return not self._admitting and (bool(self._ready) or not self._ended)

    def stop_admitting(self) -> None:
        """Hand over no more requests: whoever takes them ends those it has."""
        with self._changed:
            self._admitting = False
            self._changed.notify_all()

    def give_back(self, requests: Iterable[Request]) -> None:
        """Take requests back that were handed over: they are the next again."""
        with self._changed:
            returned = list(requests)
            self._ready.extendleft(reversed(returned))
            self._tokens += sum(map(_tokens, returned))
            self._changed.notify_all()

    def drop_unwanted(self) -> None:
        """Forget what is ready of rows that are not wanted any more."""
        with self._changed:
            self._ready = deque(r for r in self._ready if self._wanted(r.id))
            self._errors = [c for c in self._errors if self._wanted(c.id)]
            self._tokens = sum(map(_tokens, self._ready))
            self._changed.notify_all()

    def take(self, limit: int) -> Iterable[Request]:
        """Hand over at most `limit` requests that are ready now; never blocks."""
        with self._changed:
            self._raise_failure()
            count = min(limit, len(self._ready)) if self._admitting else 0
            taken = [self._ready.popleft() for _ in range(count)]
            self._tokens -= sum(_tokens(request) for request in taken)
            self._changed.notify_all()
        return taken

    def wait(self, timeout_s: float) -> None:
        """Return when a request or an error is there, all is exhausted, or the time is up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready or self._errors or self._ended or not self._admitting,
                timeout=timeout_s,
            )
            self._raise_failure()

    def errors(self) -> list[Completion]:
        """Hand over the rows that failed in preparation since the last call; never blocks."""
        with self._changed:
            self._raise_failure()
            errors, self._errors = self._errors, []
            self._changed.notify_all()
        return errors

    def close(self) -> None:
        """Stop the thread and wait for it; what is in the window is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pump(self, batches: Iterator[list[Request | Completion]]) -> None:
        failure: BaseException | None = None
        try:
            for batch in batches:
                if not self._put(batch):
                    break
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            failure = error
        with self._changed:
            self._failure = failure
            self._ended = True
            self._changed.notify_all()

    def _put(self, batch: list[Request | Completion]) -> bool:
        """Put a batch into the window, waiting for room; False when the feed is closing."""
        with self._changed:
            self._dry = not batch
            for item in batch:
                while not self._closing and not self._has_room(item):
                    self._changed.wait()
                if self._closing:
                    return False
                if not self._wanted(item.id):
                    continue
                if isinstance(item, Completion):
                    self._errors.append(item)
                else:
                    self._ready.append(item)
                    self._tokens += _tokens(item)
                self._changed.notify_all()
            return not self._closing

    def _has_room(self, item: Request | Completion) -> bool:
        rows = len(self._ready) + len(self._errors)
        if rows >= self._max_rows:
            return False
        if isinstance(item, Completion) or not self._ready:
            return True
        return self._tokens + _tokens(item) <= self._max_tokens

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _tokens(request: Request) -> int:
    return len(request.prompt) + len(request.output)
