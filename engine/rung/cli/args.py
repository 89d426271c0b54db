"""The command line as argparse sees it: names, help and grouping. Values stay text; `config` judges them."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rung.config import DEFAULT_MODEL, ModelOptions
from rung.errors import ConfigError
from rung.frontend_limits import FRONTEND_LIMITS
from rung.version import __version__

_DEFAULTS = ModelOptions()
_MODEL_HELP = (
    "a name that `rung models` lists, a GGUF file, a folder with a Hugging Face model, or org/name of one "
    f"on the Hugging Face hub (default: {DEFAULT_MODEL})"
)
_METAVARS = {"count": "N", "bytes": "SIZE", "seconds": "SECONDS"}
_ENVIRONMENT = (
    "Every option may also be set in the environment: --max-num-seqs 8 is RUNG_MAX_NUM_SEQS=8. "
    "RUNG_CACHE_DIR says where fetched models are kept."
)


class Parser(argparse.ArgumentParser):
    """Wrong usage is a wrong setting like any other: one sentence, exit 64."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for what it cannot parse."""
        raise ConfigError(f"{message}; see `{self.prog} --help`.")


def build_parser() -> Parser:
    """The parser of the whole command."""
    parser = Parser(
        prog="rung",
        description="Serve open-weight language models to many users at once.",
        epilog=_ENVIRONMENT,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rung {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    _add_serve(commands)
    _add_engine(commands)
    _add_pull(commands)
    _command(commands, "models", "list the named models and which of them are here")
    return parser


def _command(
    commands: argparse._SubParsersAction[Parser], name: str, summary: str, description: str = ""
) -> Parser:
    return commands.add_parser(
        name,
        help=summary,
        description=description or f"{summary[0].upper()}{summary[1:]}.",
        epilog=_ENVIRONMENT,
        allow_abbrev=False,
    )


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        "serve",
        "serve a model over an OpenAI-compatible HTTP API",
        "Fetch MODEL if it is not here, start an engine for it, and serve it over an OpenAI-compatible HTTP "
        "API. The first Ctrl-C lets open streams finish; the second ends at once.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", metavar="IP", help="address to listen on (default: 127.0.0.1)")
    http.add_argument("--port", metavar="N", help="port to listen on; 0 takes a free one (default: 8000)")
    http.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model (default: its own name)",
    )
    http.add_argument(
        "--api-key-file", metavar="FILE", help="accepted API keys, one a line (default: no authentication)"
    )
    http.add_argument(
        "--insecure",
        action="store_const",
        const=True,
        help="allow other machines to connect without an API key",
    )
    http.add_argument(
        "--drain-timeout",
        metavar="SECONDS",
        help="how long open streams may go on after Ctrl-C or SIGTERM (default: 30)",
    )
    http.add_argument(
        "--max-inflight-requests",
        metavar="N",
        help="requests served or waiting at once; more get status 429 (default: 1024)",
    )
    http.add_argument(
        "--max-body-bytes", metavar="SIZE", help="largest request body, such as 32MiB (default: 32MiB)"
    )
    http.add_argument(
        "--sse-keepalive",
        metavar="SECONDS",
        help="silence on a stream before a comment is sent (default: 15)",
    )
    http.add_argument(
        "--log-format",
        metavar="FORMAT",
        help="form of messages on standard error: human or json (default: human)",
    )
    limits = parser.add_argument_group("HTTP limits")
    for limit in FRONTEND_LIMITS:
        limits.add_argument(
            f"--{limit.name.replace('_', '-')}",
            metavar=_METAVARS[limit.kind],
            help=f"{limit.help} (default: {limit.default})",
        )
    _add_model_options(parser)


def _add_engine(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        "engine",
        "run an engine alone, for frontends that run elsewhere",
        "Run an engine alone: it computes for every frontend that connects. `rung serve` starts its own.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    network = parser.add_argument_group("network")
    network.add_argument(
        "--listen", metavar="ADDRESS", help="unix:PATH (under 100 bytes) or HOST:PORT; required"
    )
    network.add_argument("--tls-ca", metavar="FILE", help="PEM certificate of the frontends' authority")
    network.add_argument("--tls-cert", metavar="FILE", help="PEM certificate of this engine")
    network.add_argument("--tls-key", metavar="FILE", help="PEM key of that certificate, not encrypted")
    network.add_argument(
        "--insecure", action="store_const", const=True, help="allow a TCP address without TLS files"
    )
    network.add_argument(
        "--exit-with-parent",
        action="store_const",
        const=True,
        help="end when standard input closes, so that no engine outlives the frontend that started it",
    )
    _add_model_options(parser)


def _add_pull(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(commands, "pull", "fetch a model and print where it is")
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP)


def _add_model_options(parser: Parser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--runner",
        metavar="NAME",
        help="what computes: native (CPU kernels), reference (torch, float32) or fake (no model, for "
        f"tests) (default: {_DEFAULTS.runner})",
    )
    engine.add_argument("--threads", metavar="N", help="threads that compute (default: auto, all cores)")
    engine.add_argument(
        "--max-model-len",
        metavar="TOKENS",
        help="prompt and answer together (default: as many as the model was made for and the memory holds)",
    )
    engine.add_argument(
        "--kv-cache-memory",
        metavar="SIZE",
        help="memory for keys and values, such as 512MiB (default: auto, at most 2GiB and a quarter "
        "of what is free)",
    )
    engine.add_argument(
        "--kv-cache-dtype",
        metavar="NAME",
        help="how the native runner keeps keys and values: bf16, f32 or int8 "
        f"(default: {_DEFAULTS.kv_cache_dtype})",
    )
    engine.add_argument(
        "--activations",
        metavar="NAME",
        help="what the native runner multiplies quantized weights with: int8, or float, which is slower "
        f"and exact (default: {_DEFAULTS.activations})",
    )
    engine.add_argument(
        "--max-num-seqs",
        metavar="N",
        help=f"sequences that run at once (default: {_DEFAULTS.max_num_seqs})",
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        metavar="N",
        help="tokens computed in one step; lower means smoother streams, higher means faster prompts "
        f"(default: {_DEFAULTS.max_num_batched_tokens})",
    )
    engine.add_argument(
        "--max-waiting",
        metavar="N",
        help=f"sequences that may wait; more are refused (default: {_DEFAULTS.max_waiting})",
    )
    engine.add_argument(
        "--prefix-cache",
        metavar="SWITCH",
        help="on: keep keys and values of what was computed while there is room, for requests that begin "
        f"alike; off: do not (default: {_DEFAULTS.prefix_cache})",
    )
    engine.add_argument(
        "--itl-target-ms",
        metavar="MS",
        help="time between two tokens of a stream that other people's prompts may cause; prompts are read in "
        f"pieces that keep it (default: {_DEFAULTS.itl_target_ms})",
    )
    engine.add_argument(
        "--kv-over-commit",
        metavar="FACTOR",
        help="requests are let in until their forecasts need the KV memory this many times; above 1 more run "
        f"at once and more may be computed twice (default: {_DEFAULTS.kv_over_commit:g})",
    )
    engine.add_argument(
        "--fake-step-ms", metavar="MS", help="time that a step of the fake runner takes (default: 0)"
    )
