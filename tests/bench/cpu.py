"""The native CPU runner beside the machine's own limits: `python -m tests.bench.cpu [--quick]`.

Measures what the machine can do, then prefill and decode of the real runner on the real scheduler's
plans in this process: no HTTP, no engine loop. Greedy unless --temperature says otherwise.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

import rung_kernels
from rung.config import ACTIVATIONS, KV_CACHE_DTYPES, cache_dir
from rung.hub import resolve
from rung.models.loader import OpenModel, open_model
from rung.runner.native import NativeRunner, kv_bytes_per_block
from tests.bench import host
from tests.bench.steps import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_STEPS,
    WARM_STEPS,
    DecodeTime,
    StepTime,
    time_decode,
    time_prefill,
    touch_blocks,
)

if TYPE_CHECKING:
    from rung.models.config import ModelConfig

BLOCK_SIZE = 16
PARTS = [item.name for item in fields(StepTime)]


@dataclass(frozen=True)
class Sizes:
    """What is measured; `seconds` go into each figure, or what a few steps or one prompt take."""

    prompts: tuple[int, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: float


FULL = Sizes((128, 512, 2048, 8192), (1, 2, 4, 8, 16, 32), (128, 1024, 4096), 1.0)
QUICK = Sizes((128, 512), (1, 8, 32), (128, 1024), 0.3)


@dataclass(frozen=True)
class Work:
    """What a model asks of the machine.

    linear_weights, head_weights: numbers of the matrices that every token, every sampled token meets.
    step_bytes:    bytes of packed weights that a decode step reads.
    key_bytes:     bytes of keys and values of one position over all layers.
    key_flops:     additions and multiplications of one query with one position over all layers.
    linear_rate:   the machine's limit for products with weights, per second.
    float_rate:    the limit for attention.
    read_rate:     bytes per second.
    """

    linear_weights: int
    head_weights: int
    step_bytes: int
    key_bytes: float
    key_flops: int
    linear_rate: float
    float_rate: float
    read_rate: float


def print_machine(limits: dict[str, float]) -> None:
    """The machine and its limits."""
    print(
        f"machine       {host.cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load {host.load_average():.1f} before the start"
    )
    print(f"memory read   {limits['read_gb_s']:.1f} GB/s (1 GiB in order, all threads, best of several)")
    print(f"int8          {limits['int8_gop_s']:.0f} GOP/s (integer vector products alone, on cached data)")
    print(f"float32       {limits['f32_gflop_s']:.0f} GFLOP/s (fused multiply-adds, on cached data)")


def load(
    arguments: argparse.Namespace, model: OpenModel, num_blocks: int, open_seconds: float
) -> NativeRunner:
    """The packed model; prints what that took."""
    before = host.resident_bytes()
    start = time.perf_counter()
    runner = NativeRunner(
        model.metadata.config,
        model.weights,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_threads=arguments.threads,
        kv_dtype=arguments.kv_cache_dtype,
        activations=arguments.activations,
    )
    seconds = time.perf_counter() - start
    info = runner.info
    print(
        f"kernels       {runner.isa} of {', '.join(rung_kernels.AVAILABLE_ISAS)}; "
        f"{runner.num_threads} threads"
    )
    print(
        f"model         {model.metadata.name} ({model.metadata.weight_format}), {arguments.activations} "
        f"activations, {arguments.kv_cache_dtype} KV"
    )
    print(
        f"load          {open_seconds:.2f} s to open the file, {seconds:.2f} s to pack "
        f"{model.weights.total_bytes / 1e6:.1f} MB into {info.weight_bytes / 1e6:.1f} MB, "
        f"{runner.bytes_per_weight:.3f} bytes per weight"
    )
    resident = host.resident_bytes()
    touch_blocks(runner)
    print(
        f"resident      {resident / 1e6:.0f} MB after packing, {before / 1e6:.0f} MB before; then KV "
        f"{info.num_blocks * info.kv_bytes_per_block / 1e6:.0f} MB ({info.num_blocks} blocks of "
        f"{BLOCK_SIZE} tokens): {host.resident_bytes() / 1e6:.0f} MB"
    )
    return runner


def work_of(runner: NativeRunner, model: OpenModel, limits: dict[str, float], activations: str) -> Work:
    """Counts from the weights as they are."""
    config, weights = model.metadata.config, model.weights
    matrices = {name: weights.get(name) for name in weights.names() if len(weights.get(name).shape) == 2}
    linear = sum(m.num_values for name, m in matrices.items() if name not in ("embed_tokens", "lm_head"))
    step_bytes = runner.info.weight_bytes
    if "lm_head" in matrices:
        # Rows are looked up in it; it is not read through.
        step_bytes -= matrices["embed_tokens"].data.nbytes
    linear_limit = limits["int8_gop_s"] if activations == "int8" else limits["f32_gflop_s"]
    return Work(
        linear_weights=linear,
        head_weights=config.vocab_size * config.hidden_size,
        step_bytes=step_bytes,
        key_bytes=runner.info.kv_bytes_per_block / BLOCK_SIZE,
        key_flops=4 * config.num_heads * config.head_dim * config.num_layers,
        linear_rate=linear_limit * 1e9,
        float_rate=limits["f32_gflop_s"] * 1e9,
        read_rate=limits["read_gb_s"] * 1e9,
    )


def split(time: StepTime) -> str:
    """Shares of the time, in the order of `PARTS`."""
    return "".join(f"{getattr(time, part) / time.total:>10.1%}" for part in PARTS)


def print_prefill(runner: NativeRunner, work: Work, sizes: Sizes, vocab_size: int) -> None:
    """One line per prompt length."""
    print(
        f"\nPrefill: one prompt of random ids in chunks of {MAX_NUM_BATCHED_TOKENS}, to its first token; "
        "medians.\n"
        "of int8: products with weights per second of the whole time, against the limit; linear, attn: each\n"
        "in its own time, against the int8 and the float32 limit. Then where the time goes."
    )
    print(f"{'tokens':>7}{'runs':>6}{'tok/s':>9}{'ms':>9}{'of int8':>9}{'linear':>8}{'attn':>7} |" + heads())
    rng = np.random.default_rng(0)
    for length in sizes.prompts:
        prompt = rng.integers(0, vocab_size, length).tolist()
        prefill = time_prefill(runner, prompt, seconds=sizes.seconds)
        time = prefill.time
        linear_ops = 2 * work.linear_weights * length
        attention_flops = work.key_flops * length * (length + 1) // 2
        of_int8 = (linear_ops + 2 * work.head_weights) / time.total / work.linear_rate
        print(
            f"{length:>7}{prefill.num_runs:>6}{length / time.total:>9.0f}{time.total * 1e3:>9.1f}"
            f"{of_int8:>9.0%}{linear_ops / time.linear / work.linear_rate:>8.0%}"
            f"{attention_flops / time.attention / work.float_rate:>7.0%} |{split(time)}",
            flush=True,
        )


def print_decode(runner: NativeRunner, work: Work, sizes: Sizes, vocab_size: int, temperature: float) -> None:
    """One line per number of rows and context."""
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    print(
        f"\nDecode: steps of one token per row, {how}; medians.\n"
        "of mem: packed weights and KV read per step, against the memory limit; of int8: products with\n"
        "weights, against the int8 limit; binds: the limit that is nearer. Then where the time goes."
    )
    print(
        f"{'rows':>5}{'context':>9}{'steps':>7}{'tok/s':>9}{'ms/step':>9}{'MB/step':>9}"
        f"{'of mem':>8}{'of int8':>9}{'binds':>8} |" + heads()
    )
    rng = np.random.default_rng(1)
    for context in sizes.contexts:
        for num_rows in sizes.rows:
            if blocks_needed(num_rows, context) > runner.info.num_blocks:
                print(f"{num_rows:>5}{context:>9}  left out: its KV does not fit half of the free memory")
                continue
            prompts = rng.integers(0, vocab_size, (num_rows, context)).tolist()
            decode = time_decode(runner, prompts, temperature=temperature, seconds=sizes.seconds)
            print(decode_line(work, num_rows, context, decode), flush=True)


def decode_line(work: Work, num_rows: int, context: int, decode: DecodeTime) -> str:
    """One line of the table."""
    seconds = decode.time.total
    num_bytes = work.step_bytes + work.key_bytes * decode.num_keys
    of_memory = num_bytes / seconds / work.read_rate
    of_int8 = 2 * (work.linear_weights + work.head_weights) * num_rows / seconds / work.linear_rate
    binds = "memory" if of_memory > of_int8 else "int8"
    return (
        f"{num_rows:>5}{context:>9}{decode.num_steps:>7}{num_rows / seconds:>9.0f}{seconds * 1e3:>9.2f}"
        f"{num_bytes / 1e6:>9.0f}{of_memory:>8.0%}{of_int8:>9.0%}{binds:>8} |{split(decode.time)}"
    )


def heads() -> str:
    """Headings of `split`."""
    return "".join(f"{part:>10}" for part in PARTS)


def blocks_needed(num_rows: int, context: int) -> int:
    """KV blocks of a decode measurement."""
    return num_rows * -(-(context + 1 + WARM_STEPS + MAX_STEPS) // BLOCK_SIZE)


def choose_num_blocks(sizes: Sizes, config: ModelConfig, kv_dtype: str) -> int:
    """Enough for everything, or what half of the free memory holds; enough for prefill at any rate."""
    wanted = max(blocks_needed(rows, context) for rows in sizes.rows for context in sizes.contexts)
    held = host.available_bytes() // 2 // kv_bytes_per_block(config, kv_dtype)
    least = max(max(sizes.prompts) // BLOCK_SIZE + 1, MAX_NUM_BATCHED_TOKENS)
    return max(min(wanted, held), least)


def sizes_for(quick: bool, max_len: int) -> Sizes:
    """Those that the model's context holds."""
    sizes = QUICK if quick else FULL
    prompts = tuple(length for length in sizes.prompts if length <= max_len)
    contexts = tuple(c for c in sizes.contexts if c + 1 + WARM_STEPS + MAX_STEPS <= max_len)
    return Sizes(prompts, sizes.rows, contexts, sizes.seconds)


def parse_arguments() -> argparse.Namespace:
    """Names and defaults are those of `rung serve`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="registered name, path, or org/name")
    parser.add_argument("--threads", type=int, help="default: every core that this process may use")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default=KV_CACHE_DTYPES[0])
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="above 0: tokens are drawn on the host"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    return parser.parse_args()


def main() -> None:
    """Measure the machine, then the runner."""
    arguments = parse_arguments()
    limits = rung_kernels.measure_limits(arguments.threads)
    path = resolve(arguments.model, cache_dir())
    start = time.perf_counter()
    model = open_model(path)
    open_seconds = time.perf_counter() - start
    config = model.metadata.config
    sizes = sizes_for(arguments.quick, config.max_position_embeddings)
    print_machine(limits)
    num_blocks = choose_num_blocks(sizes, config, arguments.kv_cache_dtype)
    runner = load(arguments, model, num_blocks, open_seconds)
    work = work_of(runner, model, limits, arguments.activations)
    start, cpu_start = time.perf_counter(), time.process_time()
    print_prefill(runner, work, sizes, config.vocab_size)
    print_decode(runner, work, sizes, config.vocab_size, arguments.temperature)
    busy = (time.process_time() - cpu_start) / (time.perf_counter() - start) / runner.num_threads
    runner.close()
    print(
        f"\nload {host.load_average():.1f} at the end; the threads ran {busy:.0%} of the time. "
        "Well below 90%, the machine\nhad other work, and shares of its limits mean little."
    )


if __name__ == "__main__":
    main()
