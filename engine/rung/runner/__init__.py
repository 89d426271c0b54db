"""Devices that execute a plan."""
