"""Compiles the grammars of requests before they reach the engine, so that no step ever waits for that."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rung.errors import ErrorCode, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rung.engine import Engine, Heartbeat
    from rung.grammar.compiler import GrammarCompiler
    from rung.grammar.states import GrammarStates
    from rung.request import Request

logger = logging.getLogger(__name__)

NUM_WORKERS = 2
# Requests whose grammar is being compiled, or waits for that.
MAX_COMPILING = 256


@dataclass(slots=True)
class _Compiling:
    requests: tuple[Request, ...]
    aborted: list[int] = field(default_factory=list)


class GrammarGate:
    """The engine as sessions see it; requests without a grammar go through at once.

    on_rejected: told of requests whose grammar cannot be used, on a worker thread.
    """

    def __init__(
        self,
        engine: Engine,
        compiler: GrammarCompiler,
        states: GrammarStates,
        on_rejected: Callable[[Sequence[int], RequestError], None],
    ) -> None:
        self._engine = engine
        self._compiler = compiler
        self._states = states
        self._on_rejected = on_rejected
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="rung-grammar")
        # Guards what follows, and keeps a submission and its aborts in order.
        self._lock = threading.Lock()
        self._compiling: dict[int, _Compiling] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand in the samples of one request: all are accepted or all are rejected."""
        text = requests[0].sampling.grammar
        if text is None:
            self._engine.submit(requests)
            return
        with self._lock:
            is_full = len(self._compiling) >= MAX_COMPILING
            if not is_full:
                entry = _Compiling(tuple(requests))
                self._compiling[requests[0].request_id] = entry
                self._workers.submit(self._compile, entry, text)
        if is_full:
            error = RequestError(
                ErrorCode.OVERLOADED,
                f"The grammars of {MAX_COMPILING} requests are being compiled, which is the limit; "
                "try again later.",
            )
            self._on_rejected([request.request_id for request in requests], error)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Cancel requests; unknown and ended ids are ignored."""
        with self._lock:
            wanted = set(request_ids) if self._compiling else set()
            for entry in self._compiling.values():
                entry.aborted += [
                    request.request_id for request in entry.requests if request.request_id in wanted
                ]
            self._engine.abort(request_ids)

    def heartbeat(self) -> Heartbeat:
        """How the engine's loop is doing now."""
        return self._engine.heartbeat()

    def close(self) -> None:
        """Wait for what is being compiled, and compile no more."""
        self._workers.shutdown(cancel_futures=True)

    def _compile(self, entry: _Compiling, text: str) -> None:
        request_ids = [request.request_id for request in entry.requests]
        try:
            grammar = self._compiler.compile(text)
        except RequestError as error:
            self._give_up(request_ids, error)
        except BaseException:
            logger.exception("a grammar could not be compiled")
            message = "The engine failed to compile this request's grammar."
            self._give_up(request_ids, RequestError(ErrorCode.INTERNAL, message))
        else:
            with self._lock:
                del self._compiling[request_ids[0]]
                self._states.add(entry.requests, grammar)
                self._engine.submit(entry.requests)
                if entry.aborted:
                    self._engine.abort(entry.aborted)

    def _give_up(self, request_ids: Sequence[int], error: RequestError) -> None:
        with self._lock:
            del self._compiling[request_ids[0]]
        self._on_rejected(request_ids, error)
