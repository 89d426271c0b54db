"""Requests that wait, in the order in which they are to start. Who starts is the scheduler's decision."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rung.request import Request

Key = tuple[int, int, int]


class WaitingQueue:
    """Higher priority first, then first come. A preempted request comes back to its old place."""

    def __init__(self) -> None:
        self._order: list[Key] = []
        self._requests: dict[int, Request] = {}
        # (deadline, request id) of all that were added with one; those that left are skipped when due.
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        """In order; the queue must not change meanwhile."""
        requests = self._requests
        return (requests[request_id] for _, _, request_id in self._order)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._order, _key(request))
        self._requests[request.request_id] = request
        if request.deadline_s is not None and request.scheduled_at_s is None:
            heappush(self._deadlines, (request.queued_at_s + request.deadline_s, request.request_id))

    def remove(self, request: Request) -> None:
        """Take a request out."""
        del self._requests[request.request_id]
        del self._order[bisect_left(self._order, _key(request))]
        if not self._order:
            self._deadlines = []

    def take_overdue(self, now_s: float) -> list[Request]:
        """Requests that have never run and whose deadline has passed; they are still in the queue."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, request_id = heappop(self._deadlines)
            request = self._requests.get(request_id)
            # The id may have come again, with another deadline or none.
            if (
                request is not None
                and request.scheduled_at_s is None
                and request.deadline_s is not None
                and request.queued_at_s + request.deadline_s == deadline_s
            ):
                overdue.append(request)
        return overdue


def _key(request: Request) -> Key:
    return (-request.priority, request.arrival, request.request_id)
