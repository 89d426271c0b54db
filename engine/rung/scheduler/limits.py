"""Limits of a scheduler, and which requests could never be served within them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from rung.errors import ConfigError, ErrorCode, RequestError
from rung.scheduler.policies import PolicyConfig
from rung.scheduler.table import blocks_for

if TYPE_CHECKING:
    from rung.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits, all at least 1, and what the scheduler does within them.

    num_blocks:             KV blocks of the runner.
    block_size:             tokens per block.
    max_num_seqs:           requests that run at once.
    max_num_batched_tokens: tokens per step, over all rows.
    max_waiting:            requests accepted and not yet running.
    max_model_len:          tokens of one request, prompt and answer.
    prefix_cache:           whether KV of prefixes is kept and found again.
    depth:                  plans that may be in flight; 1 means that each lands before the next is made.
    policies:               how the budget, the memory and the order are decided.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_model_len: int
    prefix_cache: bool = True
    depth: int = 1
    policies: PolicyConfig = field(default_factory=PolicyConfig)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ConfigError(f"{item.name} is {value}; it must be at least 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs is "
                f"{self.max_num_seqs}; each running sequence needs a token per step, so make the first "
                "at least the second."
            )


def check_fits(request: Request, config: SchedulerConfig) -> None:
    """Raise `RequestError` for a request that no empty engine with these limits could serve."""
    if request.num_prompt_tokens < 1 or request.stopping.max_tokens < 1:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT,
            f"The prompt has {request.num_prompt_tokens} tokens and max_tokens is "
            f"{request.stopping.max_tokens}; both must be at least 1.",
        )
    total = request.max_total_tokens
    if total > config.max_model_len:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH,
            f"The prompt of {request.num_prompt_tokens} tokens and max_tokens "
            f"{request.stopping.max_tokens} make {total} tokens and the context holds "
            f"{config.max_model_len}; shorten one of them.",
        )
    needed = blocks_for(total, config.block_size)
    if needed > config.num_blocks:
        raise RequestError(
            ErrorCode.CAPACITY,
            f"The prompt and max_tokens make {total} tokens, which need {needed} KV blocks of "
            f"{config.block_size} tokens, and the engine has {config.num_blocks}; "
            "shorten one of them or give the engine more KV memory.",
        )
