from rung.server.gen import generation_pb2 as _generation_pb2
from rung.server.gen import model_pb2 as _model_pb2
from rung.server.gen import step_pb2 as _step_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("submit", "abort", "drain")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    submit: _generation_pb2.Submit
    abort: Abort
    drain: Drain
    def __init__(self, submit: _Optional[_Union[_generation_pb2.Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("step", "rejected")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    step: _step_pb2.Step
    rejected: Rejected
    def __init__(self, step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    def __init__(self, handles: _Optional[bytes] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handles", "error")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    error: _step_pb2.EngineError
    def __init__(self, handles: _Optional[bytes] = ..., error: _Optional[_Union[_step_pb2.EngineError, _Mapping]] = ...) -> None: ...
