"""Readers of model files. Every offset, size and count is checked before it is used."""
