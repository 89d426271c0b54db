"""The frontend's limits that `rung serve` passes on: names, help and what values look like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontendLimit:
    """One option of the frontend.

    name:    as in settings, with underscores.
    kind:    "count", "bytes" or "seconds".
    help:    what it limits; what the frontend does beyond it.
    default: as the frontend has it, for the help text.
    """

    name: str
    kind: str
    help: str
    default: str


FRONTEND_LIMITS = (
    FrontendLimit("max_connections", "count", "connections at once; more wait", "32768"),
    FrontendLimit(
        "max_queued_tokens", "count", "prompt tokens that may wait for a first token; more get status 429",
        "4194304",
    ),
    FrontendLimit(
        "max_queue_wait", "seconds", "longest predicted wait for a first token; beyond it, status 429", "120"
    ),
    FrontendLimit(
        "max_unread_bytes", "bytes", "of an answer that may wait for its client; a slower one is cut off",
        "4MiB",
    ),
    FrontendLimit(
        "replay_wait", "seconds",
        "how long a request that has shown nothing yet waits for a lost engine; 0 never waits", "60",
    ),
    FrontendLimit("max_prompts", "count", "prompts of one completion request", "128"),
    FrontendLimit("max_samples", "count", "answers to one prompt", "16"),
    FrontendLimit("max_stop_strings", "count", "stop strings of one request", "16"),
    FrontendLimit("max_stop_bytes", "bytes", "of one stop string", "1024"),
    FrontendLimit("head_timeout", "seconds", "for the head of an HTTP request", "120"),
    FrontendLimit("body_timeout", "seconds", "for a whole request body", "60"),
    FrontendLimit("send_timeout", "seconds", "for a client to take anything of what was sent to it", "60"),
)  # fmt: skip
