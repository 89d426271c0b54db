"""The exceptions Rung raises on purpose. Each message is one sentence for the person who caused it.

What is not here is a bug: it is logged with a traceback and reported as an internal error.
"""

from __future__ import annotations

from enum import Enum


class RungError(Exception):
    """Base of all deliberate errors."""


class ConfigError(RungError):
    """A setting is wrong. The command line prints it and exits 64."""


class ModelError(RungError):
    """A model cannot be found, read or run; damaged and hostile files end here."""


class ErrorCode(Enum):
    """Why a request failed; mirrors `EngineErrorCode` of the protocol."""

    INVALID_ARGUMENT = "invalid_argument"
    CONTEXT_LENGTH = "context_length"
    CAPACITY = "capacity"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    NON_FINITE = "non_finite"
    INTERNAL = "internal"
    DEADLINE = "deadline"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later or elsewhere."""
        return self in (ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.INTERNAL, ErrorCode.DEADLINE)


class RequestError(RungError):
    """One request cannot be served; others are untouched."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def non_finite() -> RequestError:
    """The error of a request for which the model computed NaN or infinity."""
    return RequestError(
        ErrorCode.NON_FINITE,
        "The model computed a value that is not finite for this request, so no token can be "
        "chosen; other requests are not affected.",
    )
