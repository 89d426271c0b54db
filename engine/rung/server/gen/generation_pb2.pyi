from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Submit(_message.Message):
    __slots__ = ("handles", "prompt_ids", "sampling", "stopping", "logprobs", "grammar", "priority", "deadline_ms", "cache_salt")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    prompt_ids: bytes
    sampling: Sampling
    stopping: Stopping
    logprobs: LogprobRequest
    grammar: Grammar
    priority: int
    deadline_ms: int
    cache_salt: bytes
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., prompt_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ..., logprobs: _Optional[_Union[LogprobRequest, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias_ids", "logit_bias_values", "allowed_token_ids", "bad_words")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias_ids: bytes
    logit_bias_values: bytes
    allowed_token_ids: bytes
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias_ids: _Optional[bytes] = ..., logit_bias_values: _Optional[bytes] = ..., allowed_token_ids: _Optional[bytes] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    def __init__(self, token_ids: _Optional[bytes] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("llguidance",)
    LLGUIDANCE_FIELD_NUMBER: _ClassVar[int]
    llguidance: str
    def __init__(self, llguidance: _Optional[str] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class LogprobRequest(_message.Message):
    __slots__ = ("top_n", "prompt_top_n")
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_N_FIELD_NUMBER: _ClassVar[int]
    top_n: int
    prompt_top_n: int
    def __init__(self, top_n: _Optional[int] = ..., prompt_top_n: _Optional[int] = ...) -> None: ...
