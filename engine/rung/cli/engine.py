"""`rung engine`: finds the model and runs an engine in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rung.config import engine_config
from rung.server.process import ProcessLife

if TYPE_CHECKING:
    from rung.config import Settings


def run(settings: Settings) -> int:
    """Runs until told to stop; returns the exit code."""
    config = engine_config(settings)
    life = ProcessLife(exit_with_parent=config.exit_with_parent)
    # Imported after the signals are ours: this takes a moment.
    from rung.cli.models import find_model
    from rung.server.run import run_engine

    model = find_model(config.model)
    return run_engine(config, model.path, model.name, life)
