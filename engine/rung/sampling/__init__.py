"""Choosing tokens from host logits, with numpy alone."""
