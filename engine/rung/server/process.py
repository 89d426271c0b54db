"""How the engine's process ends: signals, a parent that is gone, a loop that hangs or dies."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from rung.engine import Heartbeat

logger = logging.getLogger(__name__)

EXIT_DEAD = 70
DEAD_GRACE_S = 0.8
# A step is taken to hang when it is older than both: some time, and this many times its forecast.
HANG_S = 10.0
HANG_FACTOR = 10
WATCH_INTERVAL_S = 1.0


class ProcessLife:
    """Made on the main thread, before anything is loaded.

    Signals are read from a pipe by a thread of ours. A Python handler alone would not do: it runs on
    the main thread, which sleeps on when the kernel gives the signal to another thread.
    """

    def __init__(self, *, exit_with_parent: bool) -> None:
        self._stop: Callable[[], None] | None = None
        # SIGABRT too: a frontend that gives up on a hung engine learns where it hangs.
        faulthandler.enable()
        self._pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _leave_to_the_pipe)
        # Ctrl-C in a terminal reaches everybody; where there is a parent, it decides when we end.
        signal.signal(signal.SIGINT, signal.SIG_IGN if exit_with_parent else _leave_to_the_pipe)
        threading.Thread(target=self._wait_for_signals, name="rung-signals", daemon=True).start()
        if exit_with_parent:
            threading.Thread(target=_wait_for_parent, name="rung-parent", daemon=True).start()

    def on_stop(self, stop: Callable[[], None]) -> None:
        """What the first signal means from now on; until now it ends the process, as a second one does."""
        self._stop = stop

    def _wait_for_signals(self) -> None:
        os.read(self._pipe, 1)
        if self._stop is None:
            # Still loading: nobody is connected and nothing is worth finishing.
            os._exit(0)
        self._stop()
        os._exit(128 + os.read(self._pipe, 1)[0])


def _leave_to_the_pipe(_signal: int, _frame: FrameType | None) -> None:
    """Takes the signal's default action away; its number is in the pipe by now."""


def _wait_for_parent() -> None:
    """The parent holds the other end of standard input, so it ends when the parent does, however."""
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    os._exit(0)


def exit_dead_soon() -> None:
    """The process ends with EXIT_DEAD within a second, whatever else still hangs."""
    timer = threading.Timer(DEAD_GRACE_S, os._exit, [EXIT_DEAD])
    timer.daemon = True
    timer.start()


def dump_state(heartbeat: Heartbeat) -> None:
    """Writes what the loop was doing, and the stack of every thread, to standard error."""
    print(f"rung: engine state: {heartbeat}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)


def is_hung(heartbeat: Heartbeat) -> bool:
    """Whether the step that runs now has been running for far too long."""
    limit_ms = max(HANG_S * 1000, HANG_FACTOR * heartbeat.predicted_step_ms)
    return heartbeat.step_age_ms > limit_ms


class Watchdog:
    """Dumps the state once per step that hangs. What follows is the frontend's decision."""

    def __init__(
        self, heartbeat: Callable[[], Heartbeat], dump: Callable[[Heartbeat], None] = dump_state
    ) -> None:
        self._heartbeat = heartbeat
        self._dump = dump
        self._dumped: int | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watches from a thread until `stop`."""
        threading.Thread(target=self._run, name="rung-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def look(self) -> None:
        """One look."""
        heartbeat = self._heartbeat()
        if is_hung(heartbeat) and heartbeat.loop_seq != self._dumped:
            self._dumped = heartbeat.loop_seq
            logger.error("a step has been running for %d ms", heartbeat.step_age_ms)
            self._dump(heartbeat)

    def _run(self) -> None:
        while not self._stopped.wait(WATCH_INTERVAL_S):
            self.look()
