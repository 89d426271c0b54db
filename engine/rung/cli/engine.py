"""`rung engine`: finds the model and runs an engine in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rung.cli.models import find_model
from rung.config import engine_config
from rung.server.process import ProcessLife

if TYPE_CHECKING:
    from rung.config import Settings


def run(settings: Settings) -> int:
    """Runs until told to stop; returns the exit code."""
    config = engine_config(settings)
    # First, since a download that is interrupted ends as in any other command.
    model = find_model(config.model)
    life = ProcessLife(exit_with_parent=config.exit_with_parent)
    # Only now: it takes a moment, and its libraries start threads.
    from rung.server.run import run_engine

    return run_engine(config, model.path, model.name, life)
