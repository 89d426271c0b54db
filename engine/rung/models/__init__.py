"""Architectures: one file each, written against the op interface."""
