"""Raw settings to one frozen, validated configuration; the only place in Python that reads the environment.

Every option may also be given as an environment variable: `--max-num-seqs 8` is
`RUNG_MAX_NUM_SEQS=8`; the command line wins. Switches take 1 or 0. Besides the options:

RUNG_CACHE_DIR   where fetched models are kept; default $XDG_CACHE_HOME/rung, else ~/.cache/rung
RUNG_LOG         read by the frontend alone: its log filter, such as debug

Binds, loads and opens nothing.
"""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rung.errors import ConfigError
from rung.frontend_limits import FRONTEND_LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

DEFAULT_MODEL = "smollm2"
RUNNERS = ("native", "reference", "fake")
KV_CACHE_DTYPES = ("bf16", "f32", "int8")
ACTIVATIONS = ("int8", "float")
PREFIX_CACHE = ("on", "off")
LOG_FORMATS = ("human", "json")
# sockaddr_un holds 108 bytes on Linux and 104 on macOS, with a final zero.
MAX_SOCKET_PATH_BYTES = 100
_BYTE_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where an engine is reached: a Unix socket path, or a TCP host and port."""

    unix_path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        """Whether this is a Unix socket."""
        return self.unix_path is not None

    @property
    def target(self) -> str:
        """The form that gRPC binds."""
        return str(self)

    def with_port(self, port: int) -> ListenAddress:
        """The same address with the port that was chosen for 0."""
        return self if self.is_unix else ListenAddress(host=self.host, port=port)

    def __str__(self) -> str:
        if self.unix_path is not None:
            return f"unix:{self.unix_path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of mutual TLS: the authority that signs frontends, our certificate, its key."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How an engine runs a model.

    max_model_len:          tokens of prompt and answer together; None: as many as the model was made
                            for and the KV memory holds.
    max_num_seqs:           rows that run at once.
    max_num_batched_tokens: tokens computed in one step, at least max_num_seqs.
    max_waiting:            rows that may wait to run; more are refused as overloaded.
    kv_cache_bytes:         memory for keys and values; None: chosen from what is free.
    runner:                 what computes: "native" (the CPU kernels), "reference" (torch, float32) or
                            "fake" (no model at all).
    kv_cache_dtype:         how the native runner keeps keys and values; int8 has a scale per token and head.
    activations:            what the native runner multiplies quantized weights with: "int8" or "float".
    threads:                threads that compute; None: every core this process may use.
    prefix_cache:           "on": keys and values of prompts and answers are kept while there is room, and
                            found again by requests that begin alike; "off": they are not.
    itl_target_ms:          time between two tokens of a stream that the prompts of others may cause.
    kv_over_commit:         running requests may be forecast to need the KV memory this many times over.
    fake_step_ms:           time that each step of the fake runner takes.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_waiting: int = 1024
    kv_cache_bytes: int | None = None
    runner: str = "native"
    kv_cache_dtype: str = KV_CACHE_DTYPES[0]
    activations: str = ACTIVATIONS[0]
    threads: int | None = None
    prefix_cache: str = PREFIX_CACHE[0]
    itl_target_ms: int = 100
    kv_over_commit: float = 1.1
    fake_step_ms: int = 0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, but {self.max_num_seqs} running "
                f"sequences (--max-num-seqs) need one token each per step; give at least {self.max_num_seqs}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything `rung engine` needs.

    model:            registered name, path, or org/name.
    listen:           where frontends connect.
    tls:              mutual TLS for a TCP address; None only for a Unix socket or with --insecure.
    exit_with_parent: end when standard input closes.
    """

    model: str
    listen: ListenAddress
    options: ModelOptions
    tls: TlsFiles | None = None
    exit_with_parent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything `rung serve` needs; limits of None are the frontend's defaults.

    host, port:            where HTTP is served.
    served_model_name:     what clients call the model; None: the model's own name.
    api_key_file:          accepted keys, one a line; None: no authentication.
    insecure:              serve other machines without authentication.
    drain_timeout_s:       how long streams may go on after the first Ctrl-C or SIGTERM.
    max_inflight_requests: HTTP requests served or waiting at once; more get 429.
    max_body_bytes:        bytes of one HTTP request body.
    sse_keepalive_s:       silence on a stream before a comment is sent.
    log_format:            form of the frontend's messages on standard error.
    frontend_limits:       by name, those of `FRONTEND_LIMITS` that are given, as numbers.
    """

    model: str
    host: str
    port: int
    options: ModelOptions
    served_model_name: str | None = None
    api_key_file: Path | None = None
    insecure: bool = False
    drain_timeout_s: float = 30.0
    max_inflight_requests: int | None = None
    max_body_bytes: int | None = None
    sse_keepalive_s: float | None = None
    log_format: str | None = None
    frontend_limits: tuple[tuple[str, str], ...] = ()


class Settings:
    """Raw values by option name, such as "max_num_seqs": the command line's, else the environment's."""

    def __init__(self, arguments: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        self._arguments = arguments
        self._environ = os.environ if environ is None else environ

    def get(self, name: str, parse: Callable[[str, str], T]) -> T | None:
        """The parsed value, or None when it is given nowhere. `parse` takes the text and its origin."""
        value = self._arguments.get(name)
        if value is not None:
            return parse(str(value), "--" + name.replace("_", "-"))
        variable = "RUNG_" + name.upper()
        text = self._environ.get(variable, "")
        return parse(text, variable) if text else None

    def text(self, name: str) -> str | None:
        """A value that any text can be."""
        return self.get(name, lambda text, _origin: text)

    def flag(self, name: str) -> bool:
        """A switch, off unless given."""
        return self.get(name, _flag) or False


def engine_config(settings: Settings) -> EngineConfig:
    """The configuration of `rung engine`; raises `ConfigError` with what would be right."""
    listen = settings.get("listen", listen_address)
    if listen is None:
        raise ConfigError("--listen is missing; give unix:PATH, or HOST:PORT for remote frontends.")
    tls = _tls(settings)
    if not listen.is_unix and tls is None and not settings.flag("insecure"):
        raise ConfigError(
            f"--listen {listen} would let anybody on the network use this engine; give --tls-ca, --tls-cert "
            "and --tls-key, or --insecure where the network itself is trusted."
        )
    if listen.is_unix and tls is not None:
        raise ConfigError("TLS files are for a TCP address; file permissions guard a Unix socket.")
    return EngineConfig(
        model=settings.text("model") or DEFAULT_MODEL,
        listen=listen,
        options=model_options(settings),
        tls=tls,
        exit_with_parent=settings.flag("exit_with_parent"),
    )


def serve_config(settings: Settings) -> ServeConfig:
    """The configuration of `rung serve`; raises `ConfigError` with what would be right."""
    host = settings.get("host", _host) or "127.0.0.1"
    api_key_file = settings.get("api_key_file", _file)
    insecure = settings.flag("insecure")
    if not _is_loopback(host) and api_key_file is None and not insecure:
        raise ConfigError(
            f"--host {host} would serve other machines without authentication; give --api-key-file, "
            "or --insecure where the network itself is trusted."
        )
    drain_timeout_s = settings.get("drain_timeout", _seconds)
    port = settings.get("port", integer(0, 65_535))
    return ServeConfig(
        model=settings.text("model") or DEFAULT_MODEL,
        host=host,
        port=8000 if port is None else port,
        options=model_options(settings),
        served_model_name=settings.text("served_model_name"),
        api_key_file=api_key_file,
        insecure=insecure,
        drain_timeout_s=30.0 if drain_timeout_s is None else drain_timeout_s,
        max_inflight_requests=settings.get("max_inflight_requests", integer(1, 1 << 20)),
        max_body_bytes=settings.get("max_body_bytes", byte_count),
        sse_keepalive_s=settings.get("sse_keepalive", _seconds),
        log_format=settings.get("log_format", _choice(LOG_FORMATS)),
        frontend_limits=tuple(_frontend_limits(settings)),
    )


def _frontend_limits(settings: Settings) -> Iterator[tuple[str, str]]:
    parsers: dict[str, Callable[[str, str], float]] = {
        "count": integer(1, 1 << 31),
        "bytes": byte_count,
        "seconds": _seconds,
    }
    for limit in FRONTEND_LIMITS:
        value = settings.get(limit.name, parsers[limit.kind])
        if value is not None:
            yield limit.name, f"{value:g}" if isinstance(value, float) else str(value)


def model_options(settings: Settings) -> ModelOptions:
    """The options that `serve` and `engine` share."""
    default = ModelOptions()
    threads = settings.get("threads", _or_auto(integer(1, 1024)))
    kv_cache_bytes = settings.get("kv_cache_memory", _or_auto(byte_count))
    return ModelOptions(
        max_model_len=settings.get("max_model_len", integer(2, 1 << 30)),
        max_num_seqs=settings.get("max_num_seqs", integer(1, 4096)) or default.max_num_seqs,
        max_num_batched_tokens=settings.get("max_num_batched_tokens", integer(1, 1 << 20))
        or default.max_num_batched_tokens,
        max_waiting=settings.get("max_waiting", integer(1, 1 << 20)) or default.max_waiting,
        kv_cache_bytes=kv_cache_bytes or None,
        runner=settings.get("runner", _choice(RUNNERS)) or default.runner,
        kv_cache_dtype=settings.get("kv_cache_dtype", _choice(KV_CACHE_DTYPES)) or default.kv_cache_dtype,
        activations=settings.get("activations", _choice(ACTIVATIONS)) or default.activations,
        threads=threads or None,
        prefix_cache=settings.get("prefix_cache", _choice(PREFIX_CACHE)) or default.prefix_cache,
        itl_target_ms=settings.get("itl_target_ms", integer(1, 600_000)) or default.itl_target_ms,
        kv_over_commit=settings.get("kv_over_commit", _factor) or default.kv_over_commit,
        fake_step_ms=settings.get("fake_step_ms", integer(0, 60_000)) or 0,
    )


def engine_arguments(options: ModelOptions) -> list[str]:
    """The command-line options that give `options` again: how `serve` hands them to its engine."""
    arguments = [
        f"--max-num-seqs={options.max_num_seqs}",
        f"--max-num-batched-tokens={options.max_num_batched_tokens}",
        f"--max-waiting={options.max_waiting}",
        f"--kv-cache-memory={'auto' if options.kv_cache_bytes is None else options.kv_cache_bytes}",
        f"--runner={options.runner}",
        f"--kv-cache-dtype={options.kv_cache_dtype}",
        f"--activations={options.activations}",
        f"--threads={'auto' if options.threads is None else options.threads}",
        f"--prefix-cache={options.prefix_cache}",
        f"--itl-target-ms={options.itl_target_ms}",
        f"--kv-over-commit={options.kv_over_commit!r}",
    ]
    if options.fake_step_ms:
        arguments.append(f"--fake-step-ms={options.fake_step_ms}")
    if options.max_model_len is not None:
        arguments.append(f"--max-model-len={options.max_model_len}")
    return arguments


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where fetched models are kept; not created here."""
    environ = os.environ if environ is None else environ
    if environ.get("RUNG_CACHE_DIR"):
        return Path(environ["RUNG_CACHE_DIR"]).expanduser()
    # The XDG specification has relative paths ignored.
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "rung"


def listen_address(text: str, origin: str) -> ListenAddress:
    """Parses `unix:PATH`, `HOST:PORT` or `[IPV6]:PORT`."""
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:"))
        num_bytes = len(os.fsencode(path))
        if not path.is_absolute():
            raise ConfigError(
                f"{origin} is {text}, but a socket's path must be absolute: unix:/run/rung.sock."
            )
        if num_bytes >= MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{origin} names a socket path of {num_bytes} bytes, but the system allows fewer than "
                f"{MAX_SOCKET_PATH_BYTES}; choose a shorter folder."
            )
        return ListenAddress(unix_path=path)
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ConfigError(f"{origin} is {text}, not an address; give unix:PATH, HOST:PORT or [IPV6]:PORT.")
    return ListenAddress(host=host.strip("[]"), port=integer(0, 65_535)(port, f"the port of {origin}"))


def integer(low: int, high: int) -> Callable[[str, str], int]:
    """A parser of whole numbers between two bounds."""

    def parse(text: str, origin: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(
                f"{origin} must be a number from {low} to {high}, but it is {text!r}."
            ) from None
        if not low <= value <= high:
            raise ConfigError(f"{origin} must be from {low} to {high}, but it is {value}.")
        return value

    return parse


def byte_count(text: str, origin: str) -> int:
    """Parses bytes, with KiB, MiB or GiB behind the number if that reads better."""
    number = text.strip().rstrip("KMGIBkmgib")
    unit = text.strip()[len(number) :].upper()
    try:
        value = float(number) * _BYTE_UNITS[unit]
        count = int(value)
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(
            f"{origin} must be a size such as 512MiB, 2GiB or 1073741824, but it is {text!r}."
        ) from None
    if not 1 <= count <= 1 << 50:
        raise ConfigError(f"{origin} must be from 1 byte to 1048576GiB, but it is {text}.")
    return count


def _real(what: str, low: int, high: int) -> Callable[[str, str], float]:
    """A parser of numbers between two bounds, fractions included."""

    def parse(text: str, origin: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ConfigError(f"{origin} must be a {what} from {low} to {high}, but it is {text!r}.")
        return value

    return parse


_seconds = _real("number of seconds", 0, 86_400)
_factor = _real("factor", 1, 16)


def _or_auto(parse: Callable[[str, str], int]) -> Callable[[str, str], int]:
    """Lets `auto` stand for 0, which no such option means otherwise."""
    return lambda text, origin: 0 if text == "auto" else parse(text, origin)


def _flag(text: str, origin: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ConfigError(f"{origin} is a switch; give 1 or 0, not {text!r}.")
    return values[text.lower()]


def _choice(values: tuple[str, ...]) -> Callable[[str, str], str]:
    def parse(text: str, origin: str) -> str:
        if text not in values:
            raise ConfigError(f"{origin} must be one of {', '.join(values)}, but it is {text!r}.")
        return text

    return parse


def _host(text: str, origin: str) -> str:
    if text == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        raise ConfigError(
            f"{origin} must be an IP address such as 127.0.0.1, 0.0.0.0 or ::1, but it is {text!r}."
        ) from None


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _file(text: str, origin: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(f"{origin} names {text}, which is not a file.")
    return path.absolute()


def _tls(settings: Settings) -> TlsFiles | None:
    names = ("tls_ca", "tls_cert", "tls_key")
    ca, cert, key = (settings.get(name, _file) for name in names)
    if ca is None and cert is None and key is None:
        return None
    if ca is None or cert is None or key is None:
        raise ConfigError("--tls-ca, --tls-cert and --tls-key belong together; give all three or none.")
    return TlsFiles(ca, cert, key)
