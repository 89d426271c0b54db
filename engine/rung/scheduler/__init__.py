"""Which tokens run in each step. Pure: no torch, no clock, no I/O."""
