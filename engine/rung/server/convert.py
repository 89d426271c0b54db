"""Protocol messages to requests and events to protocol messages; total in both directions.

The frontend is not trusted: every length, id and range is checked here. Keeps no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rung.errors import ErrorCode, RequestError
from rung.request import Finished, FinishReason, Request, Started, StoppingParams
from rung.server.gen import engine_pb2, generation_pb2, model_pb2, step_pb2
from rung.server.outbox import HANDLE_BITS, HANDLE_MASK, Delivery, LogprobBatch, Rejection, request_id
from rung.server.sampling import count_ids, invalid, read_ids, sampling_params
from rung.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.engine import StepTiming
    from rung.models.config import DefaultSampling, ModelMetadata
    from rung.scheduler.batch import SchedulerStats
    from rung.server.prompts import PromptBatch

PROTOCOL = 1
# The one size limit of the protocol, for both directions and both ends.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# A Submit travels inside a SessionRequest, whose tag and length come on top.
MAX_SUBMIT_BYTES = MAX_MESSAGE_BYTES - 1024
MAX_CACHE_SALT_BYTES = 64
# Longer than any engine runs: milliseconds beyond it are no deadline.
MAX_DEADLINE_MS = 1 << 53

_ERROR_CODES = {
    ErrorCode.INVALID_ARGUMENT: step_pb2.ENGINE_ERROR_CODE_INVALID_ARGUMENT,
    ErrorCode.CONTEXT_LENGTH: step_pb2.ENGINE_ERROR_CODE_CONTEXT_LENGTH,
    ErrorCode.CAPACITY: step_pb2.ENGINE_ERROR_CODE_CAPACITY,
    ErrorCode.OVERLOADED: step_pb2.ENGINE_ERROR_CODE_OVERLOADED,
    ErrorCode.DRAINING: step_pb2.ENGINE_ERROR_CODE_DRAINING,
    ErrorCode.NON_FINITE: step_pb2.ENGINE_ERROR_CODE_NON_FINITE,
    ErrorCode.INTERNAL: step_pb2.ENGINE_ERROR_CODE_INTERNAL,
    ErrorCode.DEADLINE: step_pb2.ENGINE_ERROR_CODE_DEADLINE,
}
_FINISH_REASONS = {
    FinishReason.STOP: step_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: step_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: step_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: step_pb2.FINISH_REASON_ERROR,
}


class FrameError(Exception):
    """A frame that breaks the session's rules so that no request can be blamed: the session ends."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What this engine announces and what requests are checked against.

    max_model_len: prompt and answer together, in tokens.
    max_num_seqs:  rows that run at once; max_waiting: rows that may wait.
    max_samples:   handles in one Submit.
    supports_grammar: the tokenizer can be used with grammars.
    prefix_cache:  whether KV of prefixes is kept and found again.
    """

    model: ModelMetadata
    runner: str
    batch_invariant: bool
    max_model_len: int
    max_num_seqs: int
    max_waiting: int
    prefix_cache: bool = True
    max_samples: int = 128
    max_top_logprobs: int = 20
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_allowed_token_ids: int = 16384
    max_bad_words: int = 256
    max_bad_word_tokens: int = 64
    max_grammar_bytes: int = 1024 * 1024
    supports_grammar: bool = False

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        return self.model.config.vocab_size


def describe(facts: EngineFacts) -> model_pb2.DescribeResponse:
    """The answer to Describe, constant for the life of an engine."""
    model = facts.model
    capabilities = [
        model_pb2.CAPABILITY_LOGPROBS,
        model_pb2.CAPABILITY_PRIORITY,
        model_pb2.CAPABILITY_SAMPLING_EXTRA,
        model_pb2.CAPABILITY_PROMPT_LOGPROBS,
    ]
    if facts.supports_grammar:
        capabilities.append(model_pb2.CAPABILITY_GRAMMAR)
    if facts.prefix_cache:
        capabilities.append(model_pb2.CAPABILITY_PREFIX_CACHE)
    if facts.batch_invariant:
        capabilities.append(model_pb2.CAPABILITY_BATCH_INVARIANT)
    return model_pb2.DescribeResponse(
        protocol=PROTOCOL,
        engine_version=__version__,
        model=model_pb2.ModelFacts(
            name=model.name,
            architecture=model.config.architecture,
            weight_format=model.weight_format,
            num_parameters=model.num_parameters,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            bos_token_id=model.tokenizer.bos_token_id,
            eos_token_ids=model.tokenizer.eos_token_ids,
            default_sampling=_default_sampling(model.default_sampling),
            runner=facts.runner,
        ),
        limits=model_pb2.Limits(
            max_submit_bytes=MAX_SUBMIT_BYTES,
            max_num_seqs=facts.max_num_seqs,
            max_waiting=facts.max_waiting,
            max_samples=facts.max_samples,
            max_top_logprobs=facts.max_top_logprobs,
            max_stop_token_ids=facts.max_stop_token_ids,
            max_cache_salt_bytes=MAX_CACHE_SALT_BYTES,
            max_logit_bias=facts.max_logit_bias,
            max_allowed_token_ids=facts.max_allowed_token_ids,
            max_bad_words=facts.max_bad_words,
            max_bad_word_tokens=facts.max_bad_word_tokens,
            max_grammar_bytes=facts.max_grammar_bytes,
        ),
        capabilities=capabilities,
        tokenizer_files=[
            model_pb2.TokenizerFile(name=name, size_bytes=len(content), sha256=sha256(content).digest())
            for name, content in sorted(model.tokenizer.files.items())
        ],
    )


def _default_sampling(default: DefaultSampling) -> generation_pb2.Sampling:
    return generation_pb2.Sampling(
        temperature=default.temperature,
        top_k=default.top_k,
        top_p=default.top_p,
        min_p=default.min_p,
        typical_p=default.typical_p,
        repetition_penalty=default.repetition_penalty,
    )


def column(data: bytes, what: str) -> npt.NDArray[np.uint32]:
    """A little-endian u32 column from the wire: [len(data) / 4]."""
    if len(data) % 4:
        raise FrameError(f"{what} must be a column of 4-byte numbers, but it has {len(data)} bytes.")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)


def submit_handles(submit: generation_pb2.Submit) -> tuple[int, ...]:
    """The handles that a Submit names, distinct and at least one."""
    handles = tuple(submit.handles)
    if not handles:
        raise FrameError("A Submit must name at least one handle.")
    if len(set(handles)) != len(handles):
        raise FrameError("A Submit must not name a handle twice.")
    return handles


def check_order(last: int | None, handles: Sequence[int]) -> int:
    """The last handle of a Submit whose handles count up from `last`, past the wrap at 2^32 too."""
    for handle in handles:
        if last is not None and not 0 < (handle - last) & HANDLE_MASK < 1 << (HANDLE_BITS - 1):
            raise FrameError(f"Handles must count up within a session, but {handle} follows {last}.")
        last = handle
    assert last is not None, "submit_handles gives at least one"
    return last


def to_requests(
    submit: generation_pb2.Submit, handles: Sequence[int], session_number: int, facts: EngineFacts
) -> list[Request]:
    """One request per handle, all of one prompt. Raises `RequestError` for anything out of bounds."""
    if len(handles) > facts.max_samples:
        raise invalid(
            f"A request may have at most {facts.max_samples} samples, but it asks for {len(handles)}."
        )
    prompt_ids = _prompt_ids(submit.prompt_ids, facts)
    sampling = sampling_params(submit, facts)
    stopping = _stopping(submit.stopping, len(prompt_ids), facts)
    salt = _cache_salt(submit)
    return [
        Request(
            request_id=request_id(session_number, handle),
            prompt_ids=prompt_ids,
            sampling=replace(
                sampling,
                sample_index=index,
                # All samples have one prompt; the first one tells of it.
                prompt_top_logprobs=sampling.prompt_top_logprobs if index == 0 else None,
            ),
            stopping=stopping,
            priority=submit.priority,
            deadline_s=_deadline_s(submit),
            cache_salt=salt,
            group_id=request_id(session_number, handles[0]) if len(handles) > 1 else -1,
        )
        for index, handle in enumerate(handles)
    ]


def _prompt_ids(data: bytes, facts: EngineFacts) -> npt.NDArray[np.int32]:
    if not data:
        raise invalid("The prompt is empty; it needs at least one token.")
    num_tokens = count_ids(data, "The prompt")
    if num_tokens >= facts.max_model_len:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH,
            f"The prompt has {num_tokens} tokens, but this model's context holds {facts.max_model_len} "
            "tokens, of which at least one is for the answer; shorten the prompt.",
        )
    return read_ids(data, "The prompt", facts)


def _stopping(stopping: generation_pb2.Stopping, num_prompt: int, facts: EngineFacts) -> StoppingParams:
    room = facts.max_model_len - num_prompt
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else room
    if max_tokens < 1:
        raise invalid("max_tokens must be at least 1.")
    if stopping.HasField("max_tokens") and stopping.min_tokens > max_tokens:
        raise invalid(f"min_tokens is {stopping.min_tokens}, which is more than max_tokens, {max_tokens}.")
    if len(stopping.stop_token_ids) > facts.max_stop_token_ids:
        raise invalid(
            f"A request may name at most {facts.max_stop_token_ids} stop ids, but it names "
            f"{len(stopping.stop_token_ids)}."
        )
    stop_ids = frozenset(stopping.stop_token_ids)
    if stop_ids and max(stop_ids) >= facts.vocab_size:
        raise invalid(f"Stop id {max(stop_ids)} is out of range; ids must be below {facts.vocab_size}.")
    if not stopping.ignore_eos:
        stop_ids |= frozenset(facts.model.tokenizer.eos_token_ids)
    max_tokens = min(max_tokens, room)
    return StoppingParams(
        max_tokens=max_tokens, min_tokens=min(stopping.min_tokens, max_tokens), stop_token_ids=stop_ids
    )


def _cache_salt(submit: generation_pb2.Submit) -> bytes:
    if len(submit.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise invalid(
            f"cache_salt may have at most {MAX_CACHE_SALT_BYTES} bytes, but it has {len(submit.cache_salt)}."
        )
    return submit.cache_salt


def _deadline_s(submit: generation_pb2.Submit) -> float | None:
    if not submit.HasField("deadline_ms") or submit.deadline_ms > MAX_DEADLINE_MS:
        return None
    return submit.deadline_ms / 1e3


def stats(counts: SchedulerStats, timing: StepTiming) -> step_pb2.EngineStats:
    """The engine's state after its last step, and what that step took."""
    return step_pb2.EngineStats(
        running=counts.num_running,
        waiting=counts.num_waiting,
        kv_blocks_used=counts.num_blocks_used,
        kv_blocks_total=counts.num_blocks_total,
        step_rows=timing.rows,
        step_tokens=timing.tokens,
        step_host_ns=timing.step_host_ns,
        step_device_ns=timing.step_device_ns,
        grammar_ns=timing.grammar_ns,
        preemptions_total=counts.preemptions_total,
        prompt_tokens_total=counts.prompt_tokens_total,
        generation_tokens_total=counts.generation_tokens_total,
        recomputed_tokens_total=counts.recomputed_tokens_total,
        cached_tokens_total=counts.cached_tokens_total,
    )


def rejected(rejection: Rejection) -> engine_pb2.SessionResponse:
    """The answer to a Submit that was not accepted."""
    return engine_pb2.SessionResponse(
        rejected=engine_pb2.Rejected(
            handles=np.array(rejection.handles, dtype="<u4").tobytes(), error=_error(rejection.error)
        )
    )


def step_columns(delivery: Delivery, step: step_pb2.Step) -> None:
    """Writes a delivery's rows into a Step; sequence numbers and stats are the session's to add."""
    if len(delivery.handles):
        step.handles = _bytes(delivery.handles)
        step.token_counts = _bytes(delivery.token_counts)
        step.token_ids = _bytes(delivery.token_ids)
    if delivery.logprobs is not None:
        step.logprobs.CopyFrom(_logprobs(delivery.logprobs))
    if delivery.started:
        step.started.extend(_started(started) for started in delivery.started)
    if delivery.finished:
        step.finished.extend(_finished(finished) for finished in delivery.finished)


def prompt_columns(batch: PromptBatch, step: step_pb2.Step) -> None:
    """Writes logprobs of prompts into a Step."""
    step.prompt_logprobs.handles = _bytes(batch.handles)
    step.prompt_logprobs.counts = _bytes(batch.counts)
    step.prompt_logprobs.chosen = batch.chosen.astype("<f4", copy=False).tobytes()
    step.prompt_logprobs.ranks = _bytes(batch.ranks)
    step.prompt_logprobs.top_counts = _bytes(batch.top_counts)
    step.prompt_logprobs.top_ids = _bytes(batch.top_ids)
    step.prompt_logprobs.top_logprobs = batch.top_logprobs.astype("<f4", copy=False).tobytes()


def _bytes(values: npt.NDArray[np.uint32]) -> bytes:
    return values.astype("<u4", copy=False).tobytes()


def _logprobs(batch: LogprobBatch) -> step_pb2.LogprobColumns:
    return step_pb2.LogprobColumns(
        handles=_bytes(batch.handles),
        chosen=batch.chosen.astype("<f4", copy=False).tobytes(),
        top_counts=_bytes(batch.top_counts),
        top_ids=_bytes(batch.top_ids),
        top_logprobs=batch.top_logprobs.astype("<f4", copy=False).tobytes(),
    )


def _started(started: Started) -> step_pb2.Started:
    return step_pb2.Started(
        handle=started.request_id & HANDLE_MASK,
        prompt_tokens=started.num_prompt_tokens,
        cached_tokens=started.num_cached_tokens,
        queue_ns=_nanoseconds(started.queue_s),
        prefill_ns=_nanoseconds(started.prefill_s),
    )


def _finished(finished: Finished) -> step_pb2.Finished:
    return step_pb2.Finished(
        handle=finished.request_id & HANDLE_MASK,
        reason=_FINISH_REASONS[finished.reason],
        stop_token_id=finished.stop_token_id,
        prompt_tokens=finished.num_prompt_tokens,
        completion_tokens=finished.num_output_tokens,
        error=_error(finished.error) if finished.error is not None else None,
    )


def _error(error: RequestError) -> step_pb2.EngineError:
    return step_pb2.EngineError(
        code=_ERROR_CODES[error.code], message=error.message, retryable=error.code.retryable
    )


def _nanoseconds(seconds: float) -> int:
    """0 for anything that is no duration: a clock's fault must not cost a request its events."""
    return max(0, round(seconds * 1e9)) if math.isfinite(seconds) else 0
