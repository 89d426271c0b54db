"""Which tokens run in each step. Pure: no torch, no clock, no I/O."""

from rung.scheduler.limits import SchedulerConfig
from rung.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerConfig"]
