"""Settings: precedence, every bound, and sentences that say what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.cli.args import build_parser
from rung.config import (
    PREFIX_CACHE,
    RUNNERS,
    EngineConfig,
    ModelOptions,
    ServeConfig,
    Settings,
    byte_count,
    cache_dir,
    engine_arguments,
    engine_config,
    listen_address,
    model_options,
    serve_config,
)
from rung.errors import ConfigError

UNIX = "unix:/tmp/rung/e.sock"


def settings(command: str, *arguments: str, environ: dict[str, str] | None = None) -> Settings:
    parsed = vars(build_parser().parse_args([command, *arguments]))
    return Settings(parsed, environ or {})


def serve(*arguments: str, environ: dict[str, str] | None = None) -> ServeConfig:
    return serve_config(settings("serve", *arguments, environ=environ))


def engine(*arguments: str, environ: dict[str, str] | None = None) -> EngineConfig:
    return engine_config(settings("engine", *arguments, environ=environ))


def test_serve_needs_no_settings() -> None:
    config = serve()
    assert (config.model, config.host, config.port) == ("smollm2", "127.0.0.1", 8000)
    assert config.options == ModelOptions()
    assert config.drain_timeout_s == 30


def test_the_command_line_wins_over_the_environment() -> None:
    environ = {"RUNG_PORT": "9", "RUNG_MAX_NUM_SEQS": "7", "RUNG_MODEL": "a", "RUNG_INSECURE": "1"}
    config = serve("--port", "10", environ=environ)
    assert (config.port, config.options.max_num_seqs, config.model, config.insecure) == (10, 7, "a", True)
    assert serve("b", environ=environ).model == "b"
    assert not serve(environ={"RUNG_INSECURE": "0"}).insecure
    assert serve(environ={"RUNG_PORT": ""}).port == 8000


def test_zero_is_a_value() -> None:
    config = serve("--port", "0", "--drain-timeout", "0")
    assert (config.port, config.drain_timeout_s) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "70000"], "65535"),
        (["--port", "http"], "--port must be a number"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be from 1"),
        (["--max-num-seqs", "600"], "at least 600"),
        (["--max-model-len", "1"], "from 2"),
        (["--kv-cache-memory", "2GB"], "2GiB"),
        (["--prefix-cache", "maybe"], "must be one of on, off"),
        (["--itl-target-ms", "0"], "must be from 1"),
        (["--kv-over-commit", "0.9"], "must be a factor from 1 to 16"),
        (["--kv-over-commit", "nan"], "must be a factor from 1 to 16"),
        (["--kv-cache-memory", "0"], "from 1 byte"),
        (["--kv-cache-memory", "nan"], "must be a size"),
        (["--kv-cache-memory", "inf"], "must be a size"),
        (["--runner", "cuda"], "native, reference, fake"),
        (["--kv-cache-dtype", "fp8"], "bf16, f32, int8"),
        (["--activations", "int4"], "int8, float"),
        (["--threads", "-1"], "from 1 to 1024"),
        (["--drain-timeout", "nan"], "from 0 to 86400"),
        (["--drain-timeout", "soon"], "from 0 to 86400"),
        (["--log-format", "xml"], "human, json"),
        (["--host", "example.org"], "127.0.0.1"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--host", "::"], "--api-key-file"),
        (["--api-key-file", "/nonexistent/keys"], "not a file"),
    ],
)
def test_wrong_serve_settings_say_what_is_right(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        serve(*arguments)
    assert said in str(raised.value)


def test_a_wrong_variable_is_named_as_one() -> None:
    with pytest.raises(ConfigError, match="RUNG_PORT must be a number"):
        serve(environ={"RUNG_PORT": "x"})
    with pytest.raises(ConfigError, match="RUNG_INSECURE is a switch"):
        serve(environ={"RUNG_INSECURE": "maybe"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert serve("--host", host).host in ("127.0.0.1", "127.9.9.9", "::1")


def test_other_machines_need_a_key_or_insecure(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    assert serve("--host", "0.0.0.0", "--api-key-file", str(keys)).api_key_file == keys
    assert serve("--host", "0.0.0.0", "--insecure").insecure


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "unix:PATH"),
        (["--listen", "engine.sock"], "not an address"),
        (["--listen", "unix:engine.sock"], "absolute"),
        (["--listen", "unix:/" + "a" * 99], "100 bytes"),
        (["--listen", "unix:/" + "ä" * 50], "101 bytes"),
        (["--listen", "127.0.0.1:x"], "the port of --listen"),
        (["--listen", ":1"], "not an address"),
        (["--listen", "::1:80"], "[IPV6]:PORT"),
        (["--listen", "127.0.0.1:1"], "--insecure"),
    ],
)
def test_wrong_engine_settings_say_what_is_right(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        engine(*arguments)
    assert said in str(raised.value)


def test_addresses_print_as_they_are_written() -> None:
    for text in (UNIX, "unix:/" + "a" * 98, "127.0.0.1:50", "host:0", "[::1]:8"):
        assert str(listen_address(text, "--listen")) == text
    assert str(listen_address("[::1]:0", "--listen").with_port(7)) == "[::1]:7"
    assert str(listen_address(UNIX, "--listen").with_port(1)) == UNIX


def test_tls_files_come_together_and_only_for_tcp(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("ca", "cert", "key")}
    for path in paths.values():
        path.write_text("pem")
    every = [f"--tls-{name}={path}" for name, path in paths.items()]
    config = engine("--listen", "0.0.0.0:1", *every)
    assert config.tls is not None
    assert config.tls.key == paths["key"]
    assert engine("--listen", "0.0.0.0:1", "--insecure").tls is None
    with pytest.raises(ConfigError, match="belong together"):
        engine("--listen", "0.0.0.0:1", *every[:2])
    with pytest.raises(ConfigError, match="Unix socket"):
        engine("--listen", UNIX, *every)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("1.5gib", 3 << 29),
        (" 4 KiB", 4096),
        ("1e3", 1000),
    ],
)
def test_byte_counts(text: str, count: int) -> None:
    assert byte_count(text, "--kv-cache-memory") == count


@given(st.text(max_size=12))
def test_any_text_is_a_byte_count_or_a_clear_error(text: str) -> None:
    try:
        count = byte_count(text, "--x")
    except ConfigError:
        return
    assert 1 <= count <= 1 << 50


@given(st.text(max_size=120), st.sampled_from(["", "unix:", "unix:/", "[", "host:"]))
def test_any_text_is_an_address_or_a_clear_error(text: str, prefix: str) -> None:
    try:
        address = listen_address(prefix + text, "--listen")
    except ConfigError:
        return
    assert listen_address(str(address), "--listen") == address


options = st.builds(
    ModelOptions,
    max_model_len=st.none() | st.integers(2, 1 << 20),
    max_num_seqs=st.integers(1, 64),
    max_num_batched_tokens=st.integers(64, 1 << 16),
    max_waiting=st.integers(1, 1 << 16),
    kv_cache_bytes=st.none() | st.integers(1, 1 << 40),
    runner=st.sampled_from(RUNNERS),
    threads=st.none() | st.integers(1, 256),
    prefix_cache=st.sampled_from(PREFIX_CACHE),
    itl_target_ms=st.integers(1, 600_000),
    kv_over_commit=st.floats(1, 16),
    fake_step_ms=st.integers(0, 100),
)


@given(options)
def test_the_engine_gets_the_options_that_serve_was_given(given_options: ModelOptions) -> None:
    parsed = settings("engine", *engine_arguments(given_options), environ={"RUNG_MAX_NUM_SEQS": "3"})
    assert model_options(parsed) == given_options


def test_the_cache_follows_the_environment() -> None:
    assert cache_dir({"RUNG_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/rung")
    home = Path("~/.cache/rung").expanduser()
    assert cache_dir({}) == cache_dir({"XDG_CACHE_HOME": "relative"}) == home
