from rung.server.gen import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Capability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_UNSPECIFIED: _ClassVar[Capability]
    CAPABILITY_LOGPROBS: _ClassVar[Capability]
    CAPABILITY_BATCH_INVARIANT: _ClassVar[Capability]
    CAPABILITY_SAMPLING_EXTRA: _ClassVar[Capability]
    CAPABILITY_PROMPT_LOGPROBS: _ClassVar[Capability]
    CAPABILITY_GRAMMAR: _ClassVar[Capability]
    CAPABILITY_PRIORITY: _ClassVar[Capability]
    CAPABILITY_PREFIX_CACHE: _ClassVar[Capability]
CAPABILITY_UNSPECIFIED: Capability
CAPABILITY_LOGPROBS: Capability
CAPABILITY_BATCH_INVARIANT: Capability
CAPABILITY_SAMPLING_EXTRA: Capability
CAPABILITY_PROMPT_LOGPROBS: Capability
CAPABILITY_GRAMMAR: Capability
CAPABILITY_PRIORITY: Capability
CAPABILITY_PREFIX_CACHE: Capability

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol", "engine_version", "model", "limits", "capabilities", "tokenizer_files")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FILES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    engine_version: str
    model: ModelFacts
    limits: Limits
    capabilities: _containers.RepeatedScalarFieldContainer[Capability]
    tokenizer_files: _containers.RepeatedCompositeFieldContainer[TokenizerFile]
    def __init__(self, protocol: _Optional[int] = ..., engine_version: _Optional[str] = ..., model: _Optional[_Union[ModelFacts, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., capabilities: _Optional[_Iterable[_Union[Capability, str]]] = ..., tokenizer_files: _Optional[_Iterable[_Union[TokenizerFile, _Mapping]]] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("name", "architecture", "weight_format", "num_parameters", "vocab_size", "max_model_len", "bos_token_id", "eos_token_ids", "default_sampling", "runner")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    weight_format: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    bos_token_id: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: _generation_pb2.Sampling
    runner: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., weight_format: _Optional[str] = ..., num_parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., bos_token_id: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., runner: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_submit_bytes", "max_num_seqs", "max_waiting", "max_samples", "max_top_logprobs", "max_stop_token_ids", "max_logit_bias", "max_allowed_token_ids", "max_bad_words", "max_bad_word_tokens", "max_grammar_bytes", "max_cache_salt_bytes")
    MAX_SUBMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BAD_WORD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAMMAR_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHE_SALT_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_submit_bytes: int
    max_num_seqs: int
    max_waiting: int
    max_samples: int
    max_top_logprobs: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_allowed_token_ids: int
    max_bad_words: int
    max_bad_word_tokens: int
    max_grammar_bytes: int
    max_cache_salt_bytes: int
    def __init__(self, max_submit_bytes: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_waiting: _Optional[int] = ..., max_samples: _Optional[int] = ..., max_top_logprobs: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., max_logit_bias: _Optional[int] = ..., max_allowed_token_ids: _Optional[int] = ..., max_bad_words: _Optional[int] = ..., max_bad_word_tokens: _Optional[int] = ..., max_grammar_bytes: _Optional[int] = ..., max_cache_salt_bytes: _Optional[int] = ...) -> None: ...

class TokenizerFile(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class FetchTokenizerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class FetchTokenizerResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...
