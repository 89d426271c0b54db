from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class EngineErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ERROR_CODE_UNSPECIFIED: _ClassVar[EngineErrorCode]
    ENGINE_ERROR_CODE_INVALID_ARGUMENT: _ClassVar[EngineErrorCode]
    ENGINE_ERROR_CODE_CONTEXT_LENGTH: _ClassVar[EngineErrorCode]
    ENGINE_ERROR_CODE_CAPACITY: _ClassVar[EngineErrorCode]
    ENGINE_ERROR_CODE_OVERLOADED: _ClassVar[EngineErrorCode]
    ENGINE_ERROR_CODE_DRAINING: _ClassVar[EngineErrorCode]
    ENGINE_ERROR_CODE_NON_FINITE: _ClassVar[EngineErrorCode]
    ENGINE_ERROR_CODE_INTERNAL: _ClassVar[EngineErrorCode]
    ENGINE_ERROR_CODE_DEADLINE: _ClassVar[EngineErrorCode]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ERROR: FinishReason
ENGINE_ERROR_CODE_UNSPECIFIED: EngineErrorCode
ENGINE_ERROR_CODE_INVALID_ARGUMENT: EngineErrorCode
ENGINE_ERROR_CODE_CONTEXT_LENGTH: EngineErrorCode
ENGINE_ERROR_CODE_CAPACITY: EngineErrorCode
ENGINE_ERROR_CODE_OVERLOADED: EngineErrorCode
ENGINE_ERROR_CODE_DRAINING: EngineErrorCode
ENGINE_ERROR_CODE_NON_FINITE: EngineErrorCode
ENGINE_ERROR_CODE_INTERNAL: EngineErrorCode
ENGINE_ERROR_CODE_DEADLINE: EngineErrorCode

class Step(_message.Message):
    __slots__ = ("seq", "loop_seq", "step_age_ms", "predicted_step_ms", "emitted_unix_ns", "handles", "token_counts", "token_ids", "logprobs", "started", "finished", "stats", "prompt_logprobs")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LOOP_SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    loop_seq: int
    step_age_ms: int
    predicted_step_ms: int
    emitted_unix_ns: int
    handles: bytes
    token_counts: bytes
    token_ids: bytes
    logprobs: LogprobColumns
    started: _containers.RepeatedCompositeFieldContainer[Started]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    stats: EngineStats
    prompt_logprobs: PromptLogprobColumns
    def __init__(self, seq: _Optional[int] = ..., loop_seq: _Optional[int] = ..., step_age_ms: _Optional[int] = ..., predicted_step_ms: _Optional[int] = ..., emitted_unix_ns: _Optional[int] = ..., handles: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., started: _Optional[_Iterable[_Union[Started, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., stats: _Optional[_Union[EngineStats, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobColumns, _Mapping]] = ...) -> None: ...

class LogprobColumns(_message.Message):
    __slots__ = ("handles", "chosen", "top_counts", "top_ids", "top_logprobs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    chosen: bytes
    top_counts: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, handles: _Optional[bytes] = ..., chosen: _Optional[bytes] = ..., top_counts: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class PromptLogprobColumns(_message.Message):
    __slots__ = ("handles", "counts", "chosen", "ranks", "top_counts", "top_ids", "top_logprobs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    counts: bytes
    chosen: bytes
    ranks: bytes
    top_counts: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, handles: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., chosen: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_counts: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("handle", "prompt_tokens", "cached_tokens", "queue_ns", "prefill_ns")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    prompt_tokens: int
    cached_tokens: int
    queue_ns: int
    prefill_ns: int
    def __init__(self, handle: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "reason", "stop_token_id", "prompt_tokens", "completion_tokens", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: FinishReason
    stop_token_id: int
    prompt_tokens: int
    completion_tokens: int
    error: EngineError
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., error: _Optional[_Union[EngineError, _Mapping]] = ...) -> None: ...

class EngineError(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: EngineErrorCode
    message: str
    retryable: bool
    def __init__(self, code: _Optional[_Union[EngineErrorCode, str]] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("running", "waiting", "kv_blocks_used", "kv_blocks_total", "step_rows", "step_tokens", "step_host_ns", "step_device_ns", "preemptions_total", "prompt_tokens_total", "generation_tokens_total", "recomputed_tokens_total", "cached_tokens_total", "grammar_ns")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_HOST_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_DEVICE_NS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_NS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    step_rows: int
    step_tokens: int
    step_host_ns: int
    step_device_ns: int
    preemptions_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    recomputed_tokens_total: int
    cached_tokens_total: int
    grammar_ns: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., step_rows: _Optional[int] = ..., step_tokens: _Optional[int] = ..., step_host_ns: _Optional[int] = ..., step_device_ns: _Optional[int] = ..., preemptions_total: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ..., generation_tokens_total: _Optional[int] = ..., recomputed_tokens_total: _Optional[int] = ..., cached_tokens_total: _Optional[int] = ..., grammar_ns: _Optional[int] = ...) -> None: ...
