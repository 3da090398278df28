"""The bounded window between reading and the engine. Knows nothing of files, text or tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from threading import Condition, Thread

from jobrunner.records import Completion, Request


class Feed:
    """Prepares requests on a background thread and hands them to the engine in order.

    `batches` is pulled on that thread until the window holds `max_rows` rows or `max_tokens`
    tokens; a request bigger than that passes when the window is empty. While `batches` waits
    for something it should yield empty lists, so that `close` is prompt. Rows that failed in
    preparation count as rows until `errors` hands them over.

    Whatever the thread raises is raised by the next call here. Call it from one thread.
    """

    def __init__(
        self, batches: Iterator[list[Request | Completion]], max_rows: int, max_tokens: int
    ) -> None:
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._changed = Condition()
        self._ready: deque[Request] = deque()
        self._errors: list[Completion] = []
        self._tokens = 0
        self._ended = False
        self._closing = False
        self._admitting = True
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._pump, args=(batches,), name="feed", daemon=True)
        self._thread.start()

    @property
    def exhausted(self) -> bool:
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
            for item in batch:
                while not self._closing and not self._has_room(item):
                    self._changed.wait()
                if self._closing:
                    return False
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
