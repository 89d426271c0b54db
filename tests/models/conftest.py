"""The default model, opened once; fetched if this machine does not have it yet."""

from __future__ import annotations

import pytest

from rung.config import cache_dir
from rung.hub import resolve
from rung.models.loader import OpenModel, open_model
from rung.runner.reference import ReferenceRunner


@pytest.fixture(scope="session")
def smollm2() -> OpenModel:
    """Metadata and mapped weights."""
    return open_model(resolve("smollm2", cache_dir()))


@pytest.fixture(scope="session")
def smollm2_runner(smollm2: OpenModel) -> ReferenceRunner:
    """Room for every golden prompt at once, and little more."""
    return ReferenceRunner(smollm2.metadata.config, smollm2.weights, num_blocks=288, block_size=16)
