"""One frontend's session: its open handles, what it is told, and what it may ask.

Synchronous and free of gRPC, so that tests drive it message by message. Lives on the I/O thread;
only its outbox is filled from the engine loop.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from rung.errors import ErrorCode, RequestError
from rung.server import convert
from rung.server.gen import engine_pb2, generation_pb2, step_pb2
from rung.server.outbox import HANDLE_MASK, Outbox, Publisher, Rejection, request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rung.engine import Heartbeat
    from rung.request import Request

U32_MAX = 0xFFFFFFFF


class EnginePort(Protocol):
    """What a session needs of the engine loop; every call returns at once, from any thread."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues the samples of one request, accepted all or none."""
        ...

    def abort(self, request_ids: Sequence[int]) -> None:
        """Ends rows; unknown ones are ignored. Keeps its place among the submissions."""
        ...

    def heartbeat(self) -> Heartbeat:
        """Where the loop is, and its last stats."""
        ...


class Session:
    """State of one stream. `receive` takes a message in, `responses` gives what is to be written."""

    def __init__(
        self,
        number: int,
        engine: EnginePort,
        facts: convert.EngineFacts,
        publisher: Publisher,
        wake: Callable[[], None],
    ) -> None:
        self._number = number
        self._engine = engine
        self._facts = facts
        self._publisher = publisher
        self._outbox = Outbox(wake)
        # Handles from their Submit until their terminal event is written: what bounds the outbox.
        self._open: set[int] = set()
        self._aborted: set[int] = set()
        self._max_open = facts.max_num_seqs + facts.max_waiting
        self._last_handle: int | None = None
        self._draining = False
        self._seq = 0
        publisher.add(number, self._outbox)

    @property
    def num_rejected(self) -> int:
        """Rejections that wait to be written."""
        return self._outbox.num_rejected

    @property
    def num_open(self) -> int:
        """Handles that have not been told their terminal event."""
        return len(self._open)

    def receive(self, message: engine_pb2.SessionRequest) -> None:
        """Acts on one message. Raises `FrameError` for one that breaks the rules of the stream."""
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(message.submit)
        elif kind == "abort":
            self._abort(message.abort)
        elif kind == "drain":
            self._draining = True
        else:
            raise convert.FrameError("A SessionRequest must hold a submit, an abort or a drain.")

    def _submit(self, submit: generation_pb2.Submit) -> None:
        handles = convert.submit_handles(submit)
        if not self._open.isdisjoint(handles):
            raise convert.FrameError("A Submit must not name a handle that has not ended.")
        self._last_handle = convert.check_order(self._last_handle, handles)
        try:
            self._check_room(len(handles))
            requests = convert.to_requests(submit, handles, self._number, self._facts)
        except RequestError as error:
            self._outbox.reject(Rejection(handles, error))
            return
        self._open.update(handles)
        self._engine.submit(requests)

    def _check_room(self, num_samples: int) -> None:
        if self._draining:
            raise RequestError(ErrorCode.DRAINING, "This session is draining and takes no more requests.")
        if len(self._open) + num_samples > self._max_open:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"This session already has {len(self._open)} of at most {self._max_open} rows running, "
                "waiting or unread; try again later.",
            )

    def _abort(self, abort: engine_pb2.Abort) -> None:
        handles = convert.column(abort.handles, "Abort.handles").tolist()
        # Each row goes to the engine once: a flood of aborts must not fill its inbox.
        live = self._open.intersection(handles) - self._aborted
        if live:
            self._aborted |= live
            self._engine.abort([request_id(self._number, handle) for handle in live])

    def responses(self) -> list[engine_pb2.SessionResponse]:
        """Rejections, then Steps with everything that is new; a heartbeat when nothing is.

        Only logprobs of long prompts need more than one Step; they come ahead of the tokens.
        """
        delivery = self._outbox.take()
        ended = [handle for rejection in delivery.rejected for handle in rejection.handles]
        ended += [finished.request_id & HANDLE_MASK for finished in delivery.finished]
        self._open.difference_update(ended)
        self._aborted.difference_update(ended)
        responses = [convert.rejected(rejection) for rejection in delivery.rejected]
        for batch in delivery.prompts[:-1]:
            response = self._step()
            convert.prompt_columns(batch, response.step)
            responses.append(response)
        response = self._step()
        for batch in delivery.prompts[-1:]:
            convert.prompt_columns(batch, response.step)
        convert.step_columns(delivery, response.step)
        responses.append(response)
        return responses

    def _step(self) -> engine_pb2.SessionResponse:
        """The next Step, without news of any row."""
        self._seq += 1
        heartbeat = self._engine.heartbeat()
        return engine_pb2.SessionResponse(
            step=step_pb2.Step(
                seq=self._seq,
                loop_seq=heartbeat.loop_seq,
                step_age_ms=min(heartbeat.step_age_ms, U32_MAX),
                predicted_step_ms=min(heartbeat.predicted_step_ms, U32_MAX),
                emitted_unix_ns=time.time_ns(),
                stats=convert.stats(heartbeat.stats, self._publisher.timing),
            )
        )

    def close(self) -> None:
        """Aborts every row that is still open; the engine's answers to that find nobody."""
        self._publisher.remove(self._number)
        if self._open:
            self._engine.abort([request_id(self._number, handle) for handle in self._open])
            self._open.clear()
