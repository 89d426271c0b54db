"""The gRPC service on a thread of its own, so that no stream waits for the engine loop or holds it.

Carries messages between streams and sessions; what they mean is `session`'s and `convert`'s.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from rung.errors import ConfigError
from rung.server import convert
from rung.server.gen import engine_pb2, engine_pb2_grpc, model_pb2
from rung.server.session import EnginePort, Session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rung.config import ListenAddress
    from rung.server.outbox import Publisher

    DescribeContext = grpc.aio.ServicerContext[model_pb2.DescribeRequest, model_pb2.DescribeResponse]
    FetchContext = grpc.aio.ServicerContext[model_pb2.FetchTokenizerRequest, model_pb2.FetchTokenizerResponse]
    SessionContext = grpc.aio.ServicerContext[engine_pb2.SessionRequest, engine_pb2.SessionResponse]

logger = logging.getLogger(__name__)

MAX_SESSIONS = 16
# The protocol promises a Step every 500 ms; half of that leaves room for a busy machine.
HEARTBEAT_S = 0.25
FETCH_CHUNK_BYTES = 1024 * 1024
# A reader that leaves this many rejections unread is not read from until it catches up.
MAX_UNREAD_REJECTIONS = 1024
# How long a stopping engine waits for its sessions to take their last events, and for their streams.
FLUSH_S = 0.2
STOP_GRACE_S = 0.3
# From the end of the sessions to that of their sockets. A gRPC client that writes (a window update, the
# answer to a ping) when its socket is already closed drops what it has not read: the reason, a last token.
LINGER_S = 0.5
KEEPALIVE_MS = 10_000

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", convert.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", convert.MAX_MESSAGE_BYTES),
    # The stream's receive window. gRPC core sizes the connection's window itself, from this and
    # the bandwidth it measures; our send windows are the frontend's to set.
    ("grpc.http2.lookahead_bytes", 16 * 1024 * 1024),
    # Two processes on one port would each get some of the frontends.
    ("grpc.so_reuseport", 0),
    # Frontends ping every 10 s, with or without calls.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
)
# A vanished peer closes a Unix socket at once, so only TCP needs to ask.
_TCP_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(slots=True)
class _Stream:
    """A session with what wakes its two tasks: something to write, room to read."""

    number: int
    session: Session
    news: asyncio.Event
    room: asyncio.Event = field(default_factory=asyncio.Event)


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """The three calls of `rung.engine.v1`. All methods run on the I/O loop."""

    def __init__(self, engine: EnginePort, facts: convert.EngineFacts, publisher: Publisher) -> None:
        self._engine = engine
        self._facts = facts
        self._publisher = publisher
        self._description = convert.describe(facts)
        self._streams: dict[int, _Stream] = {}
        self._last_session = 0
        self._closing: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def Describe(
        self, request: model_pb2.DescribeRequest, context: DescribeContext
    ) -> model_pb2.DescribeResponse:
        """Facts that never change, whatever the load."""
        del request, context
        return self._description

    async def FetchTokenizer(
        self, request: model_pb2.FetchTokenizerRequest, context: FetchContext
    ) -> AsyncIterator[model_pb2.FetchTokenizerResponse]:
        """One file of the tokenizer bundle, in chunks."""
        content = self._facts.model.tokenizer.files.get(request.name)
        if content is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"This model has no tokenizer file {request.name!r}."
            )
        for start in range(0, len(content), FETCH_CHUNK_BYTES):
            yield model_pb2.FetchTokenizerResponse(chunk=content[start : start + FETCH_CHUNK_BYTES])

    async def Session(
        self,
        requests: AsyncIterator[engine_pb2.SessionRequest],
        context: SessionContext,
    ) -> None:
        """One frontend, until it goes, breaks a rule, or the engine stops."""
        if self._closing.done():
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._closing.result())
        if len(self._streams) >= MAX_SESSIONS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"This engine already serves {MAX_SESSIONS} sessions, its limit.",
            )
        # Sent by itself, so that a status can follow at any time: a first write that is still under
        # way would hold the metadata that a status then waits for.
        await context.send_initial_metadata(())
        stream = self._open()
        reader = asyncio.ensure_future(self._read(stream, requests))
        writer = asyncio.ensure_future(self._write(stream, context))
        try:
            ends: set[asyncio.Future[Any]] = {reader, writer, self._closing}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.done():
                # The engine has published its last events; a reader that keeps up gets them.
                stream.news.set()
                await asyncio.wait({writer}, timeout=FLUSH_S)
        finally:
            # Also when the client is gone, which cancels this coroutine.
            self._close(stream)
            reader.cancel()
            writer.cancel()
        if self._closing.done():
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._closing.result())
        for task in (reader, writer):
            if task.done() and not task.cancelled():
                await _finish(task, context)

    def close(self, reason: str) -> bool:
        """Ends every session with UNAVAILABLE and this sentence; refuses new ones. Whether there were any."""
        if not self._closing.done():
            self._closing.set_result(reason)
        return bool(self._streams)

    def beat(self) -> None:
        """Makes every session write a Step, with or without news."""
        for stream in self._streams.values():
            stream.news.set()

    def _open(self) -> _Stream:
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        news.set()
        # 31 bits, so that a request id stays a positive int64.
        number = self._last_session = self._last_session % 0x7FFFFFFF + 1

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        session = Session(number, self._engine, self._facts, self._publisher, wake)
        stream = self._streams[number] = _Stream(number, session, news)
        return stream

    def _close(self, stream: _Stream) -> None:
        del self._streams[stream.number]
        stream.session.close()

    async def _read(self, stream: _Stream, requests: AsyncIterator[engine_pb2.SessionRequest]) -> None:
        try:
            async for message in requests:
                stream.session.receive(message)
                while stream.session.num_rejected > MAX_UNREAD_REJECTIONS:
                    stream.room.clear()
                    await stream.room.wait()
        except DecodeError as error:
            raise convert.FrameError(f"A frame is no SessionRequest: {error}.") from error

    async def _write(self, stream: _Stream, context: SessionContext) -> None:
        is_last = False
        while not is_last:
            await stream.news.wait()
            stream.news.clear()
            is_last = self._closing.done()
            # Built when the transport asks for more: what came meanwhile has merged by itself.
            responses = stream.session.responses()
            stream.room.set()
            for response in responses:
                await context.write(response)


async def _finish(task: asyncio.Future[None], context: SessionContext) -> None:
    """Turns how a session's task ended into the stream's status."""
    error = task.exception()
    if isinstance(error, convert.FrameError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if error is not None:
        raise error


class EngineServer:
    """Binds and serves on a thread of its own, from `start` to `stop`."""

    def __init__(
        self,
        engine: EnginePort,
        facts: convert.EngineFacts,
        publisher: Publisher,
        listen: ListenAddress,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._publisher = publisher
        self._listen = listen
        self._credentials = credentials
        self._bound: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Future[str] | None = None
        self._thread = threading.Thread(target=self._run, name="rung-io", daemon=True)

    def start(self) -> str:
        """Binds, and returns the address with the port that was chosen. `ConfigError` if it cannot."""
        self._thread.start()
        return self._bound.result()

    def stop(self, reason: str) -> None:
        """Ends every session with `reason`. The engine loop must have ended: it publishes no more."""
        if self._loop is None or self._stop is None or not self._thread.is_alive():
            return
        stop = self._stop
        self._loop.call_soon_threadsafe(stop.set_result, reason)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._bound.done():
                raise
            self._bound.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = self._loop.create_future()
        options = _CHANNEL_OPTIONS if self._listen.is_unix else _CHANNEL_OPTIONS + _TCP_OPTIONS
        server = grpc.aio.server(options=options)
        service = EngineService(self._engine, self._facts, self._publisher)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        address = self._bind(server)
        await server.start()
        ticker = asyncio.ensure_future(_tick(service))
        self._bound.set_result(address)
        try:
            if service.close(await self._stop):
                await asyncio.sleep(LINGER_S)
        finally:
            ticker.cancel()
            await server.stop(STOP_GRACE_S)

    def _bind(self, server: grpc.aio.Server) -> str:
        target = self._listen.target
        try:
            if self._credentials is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"Cannot listen on {self._listen}: the address is in use or not of this machine; "
                "give --listen another."
            ) from error
        return str(self._listen.with_port(port))


async def _tick(service: EngineService) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        service.beat()
