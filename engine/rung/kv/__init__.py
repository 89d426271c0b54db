"""Ownership of KV blocks. Pure: no torch, no clock, no I/O."""
