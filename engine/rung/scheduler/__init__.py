"""Which tokens run in each step. Pure: no torch, no clock, no I/O."""

from rung.scheduler.scheduler import Scheduler, SchedulerConfig

__all__ = ["Scheduler", "SchedulerConfig"]
