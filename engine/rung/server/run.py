"""Runs one engine from its configuration to its end: open, plan, load, listen, loop.

The loop has the main thread; gRPC has its own.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import socket
import stat
import sys
import time
from typing import TYPE_CHECKING

from rung.engine import Engine
from rung.errors import ConfigError
from rung.grammar.compiler import GrammarCompiler
from rung.grammar.gate import GrammarGate
from rung.grammar.runner import GrammarRunner
from rung.grammar.states import GrammarStates
from rung.models.loader import open_model
from rung.scheduler import Scheduler, SchedulerConfig
from rung.scheduler.policies import PolicyConfig
from rung.server import process
from rung.server.convert import EngineFacts
from rung.server.memory import (
    BLOCK_SIZE,
    KvPlan,
    MemoryPlan,
    human_bytes,
    plan_kv,
    plan_memory,
    workspace_bytes,
)
from rung.server.outbox import Publisher
from rung.server.probe import probe
from rung.server.process_memory import anonymous_bytes, available_bytes
from rung.server.runners import plan_runner
from rung.server.service import EngineServer
from rung.server.tls import server_credentials
from rung.version_check import check_kernels

if TYPE_CHECKING:
    from pathlib import Path

    from rung.config import EngineConfig, ModelOptions
    from rung.models.config import ModelMetadata
    from rung.runner.protocol import Runner, RunnerInfo
    from rung.server.process import ProcessLife

logger = logging.getLogger(__name__)

# The I/O thread must not wait for the loop thread longer than this to get the interpreter.
SWITCH_INTERVAL_S = 0.0005
# Of the prefix cache's names: new with each process, so that no client can aim at another's blocks.
CACHE_KEY_BYTES = 32


def run_engine(config: EngineConfig, path: Path, name: str | None, life: ProcessLife) -> int:
    """Serves the model at `path`, under `name` if given, until told to stop; returns the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    start_s = time.monotonic()
    check_kernels()
    credentials = None if config.tls is None else server_credentials(config.tls)
    _claim_socket(config)

    model = open_model(path)
    metadata = dataclasses.replace(model.metadata, name=name or model.metadata.name)
    plan = plan_runner(model, config.options)
    memory = plan_memory(
        plan.weight_bytes,
        workspace_bytes(metadata.config, config.options.max_num_batched_tokens, config.options.max_num_seqs),
        available_bytes(),
    )
    kv = plan_kv(
        model_context=metadata.config.max_position_embeddings,
        max_model_len=config.options.max_model_len,
        max_num_seqs=config.options.max_num_seqs,
        kv_cache_bytes=config.options.kv_cache_bytes,
        bytes_per_block=plan.kv_bytes_per_block,
        free_bytes=memory.free_for_kv,
    )
    before = anonymous_bytes()
    runner = plan.build(kv.num_blocks)
    _print_table(metadata, config.options, kv, memory, runner.info, time.monotonic() - start_s)
    _check_memory(memory, kv, before)
    facts = EngineFacts(
        model=metadata,
        runner=runner.info.name,
        batch_invariant=runner.info.batch_invariant,
        max_model_len=kv.max_model_len,
        max_num_seqs=config.options.max_num_seqs,
        max_waiting=config.options.max_waiting,
        supports_grammar=bool(metadata.tokenizer.eos_token_ids),
        prefix_cache=config.options.prefix_cache == "on",
    )
    publisher = Publisher()
    deaths: list[Exception] = []
    grammars = GrammarStates(facts.vocab_size)
    runner = GrammarRunner(runner, grammars)
    scheduler = _make_scheduler(runner, kv, config.options)
    engine = _build_engine(scheduler, runner, publisher, grammars, deaths)
    gate = GrammarGate(engine, _grammar_compiler(metadata), grammars, publisher.reject)
    server = EngineServer(gate, facts, publisher, config.listen, credentials)
    life.on_stop(engine.stop)
    print(f"Engine listening on {server.start()}", file=sys.stderr, flush=True)
    watchdog = process.Watchdog(engine.heartbeat)
    watchdog.start()
    engine.run()
    watchdog.stop()
    gate.close()
    server.stop("The engine has failed." if deaths else "The engine is shutting down.")
    runner.close()
    if publisher.num_dropped_rows:
        logger.info("%d rows came for sessions that were gone", publisher.num_dropped_rows)
    return process.EXIT_DEAD if deaths else 0


def _grammar_compiler(metadata: ModelMetadata) -> GrammarCompiler:
    tokenizer = metadata.tokenizer
    text = tokenizer.files["tokenizer.json"].decode()
    return GrammarCompiler(text, metadata.config.vocab_size, tokenizer.eos_token_ids)


def _make_scheduler(runner: Runner, kv: KvPlan, options: ModelOptions) -> Scheduler:
    config = SchedulerConfig(
        num_blocks=kv.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_waiting=options.max_waiting,
        max_model_len=kv.max_model_len,
        prefix_cache=options.prefix_cache == "on",
        depth=runner.info.depth,
        policies=PolicyConfig(itl_target_s=options.itl_target_ms / 1e3, over_commit=options.kv_over_commit),
    )
    scheduler = Scheduler(config, cache_key=secrets.token_bytes(CACHE_KEY_BYTES))
    # A runner without weights takes the time that it was told to take.
    if runner.info.weight_bytes:
        for shape, elapsed_s in probe(runner, config):
            scheduler.learn(shape, elapsed_s)
    return scheduler


def _build_engine(
    scheduler: Scheduler,
    runner: Runner,
    publisher: Publisher,
    grammars: GrammarStates,
    deaths: list[Exception],
) -> Engine:
    def on_dead(error: Exception) -> None:
        deaths.append(error)
        process.exit_dead_soon()
        process.dump_state(engine.heartbeat())

    engine = Engine(
        scheduler,
        runner,
        grammars.forgetting_ended(publisher.publish),
        on_rejected=grammars.forgetting_rejected(publisher.reject),
        on_dead=on_dead,
        check_integrity=True,
    )
    return engine


def _claim_socket(config: EngineConfig) -> None:
    """Makes room for our Unix socket: what a dead engine left is removed, a live one is respected."""
    path = config.listen.unix_path
    if path is None:
        return
    # What we create from here on, the socket above all, is for this user alone.
    os.umask(0o077)
    if not path.parent.is_dir():
        raise ConfigError(f"--listen names the folder {path.parent}, which does not exist; create it first.")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--listen names {path}, which exists and is not a socket; give another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"Another engine listens on {path}; give --listen another path.")


def _check_memory(memory: MemoryPlan, kv: KvPlan, before: int | None) -> None:
    """Says so when loading took more than the equation has for all of it."""
    after = anonymous_bytes()
    if before is None or after is None:
        return
    planned = memory.weights + kv.kv_bytes + memory.workspace + memory.reserve
    if after - before > planned:
        logger.warning(
            "loading took %s and %s were planned for everything: the memory equation is wrong for this model",
            human_bytes(after - before),
            human_bytes(planned),
        )


def _print_table(
    metadata: ModelMetadata,
    options: ModelOptions,
    kv: KvPlan,
    memory: MemoryPlan,
    info: RunnerInfo,
    load_s: float,
) -> None:
    context = f"{kv.max_model_len} tokens"
    if kv.reduced_from is not None:
        context += f" (the model was made for {kv.reduced_from}; more --kv-cache-memory would hold more)"
    rows = (
        ("model", f"{metadata.name} ({metadata.config.architecture}, {metadata.weight_format})"),
        ("parameters", f"{metadata.num_parameters / 1e6:.1f} million"),
        ("runner", ", ".join(filter(None, (info.name, info.details, f"loaded in {load_s:.1f} s")))),
        ("weights", human_bytes(info.weight_bytes)),
        (
            "KV cache",
            f"{human_bytes(kv.kv_bytes)}: {kv.num_tokens} tokens in {kv.num_blocks} blocks of {BLOCK_SIZE}",
        ),
        ("memory", memory.describe(kv.kv_bytes)),
        ("context", context),
        ("batch", f"{options.max_num_seqs} sequences, {options.max_num_batched_tokens} tokens per step"),
        (
            "scheduling",
            f"{options.itl_target_ms} ms between tokens, prefix cache {options.prefix_cache}, "
            f"KV over-commit {options.kv_over_commit:g}",
        ),
    )
    for label, value in rows:
        print(f"  {label:<11} {value}", file=sys.stderr)
    sys.stderr.flush()
