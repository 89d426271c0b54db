"""Serving figures of the default model through HTTP, beside the machine's own limits.

`python -m tests.bench.serving [--users 1,4,16] [--words 128] [--output 64] [-- rung serve options]`.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import time

from rung.config import cache_dir
from rung.hub import resolve
from rung.models.loader import open_model
from tests.bench.load import LoadResult, run
from tests.bench.machine import MachineLimits, measure
from tests.e2e.server import serving


def print_limits(limits: MachineLimits) -> None:
    """One line per limit."""
    print(f"machine        {limits.cores} cores, {limits.cpu}; Python {platform.python_version()}")
    print(f"memory read    {limits.read_gb_s:.1f} GB/s (float32 matrix-vector product over 1 GiB)")
    print(f"float32        {limits.float32_gflops:.0f} GFLOP/s (1024-cubed matrix product)")


def print_result(result: LoadResult, roof_steps_per_s: float, one_user: float | None) -> None:
    """One row of the table."""
    prompt = sum(a.num_prompt_tokens for a in result.answers) / len(result.answers)
    output = sum(a.num_output_tokens for a in result.answers) / len(result.answers)
    steps_per_s = 1e3 / result.median_ms("tpot_s")
    versus = f"{result.output_tokens_per_s / one_user:5.2f}x" if one_user else "   1x "
    print(
        f"{result.num_users:5d}  {prompt:6.0f}  {output:6.0f}  {result.output_tokens_per_s:8.1f}  {versus}"
        f" {steps_per_s * result.num_users:8.1f}  {steps_per_s / roof_steps_per_s:6.0%}"
        f"  {result.median_ms('ttft_s'):8.0f} {result.worst_ms('ttft_s'):6.0f}"
        f"  {result.median_ms('tpot_s'):8.1f} {result.worst_ms('tpot_s'):6.1f}"
    )


def main() -> None:
    """Measure the machine, then the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", default="1,4,16")
    parser.add_argument("--words", type=int, default=128, help="words per prompt; about as many tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens per answer, end-of-text ignored")
    parser.add_argument("--requests-per-user", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("serve_options", nargs="*", help="after --: options for rung serve")
    arguments = parser.parse_args()

    limits = measure()
    print_limits(limits)
    model = open_model(resolve(arguments.model, cache_dir()))
    # A step reads every weight once, tied heads too: as stored, or as float32 on the reference runner.
    is_native = "reference" not in arguments.serve_options
    weight_bytes = model.weights.total_bytes if is_native else 4 * model.metadata.num_parameters
    roof = limits.read_gb_s * 1e9 / weight_bytes
    print(
        f"model          {model.metadata.name}, {weight_bytes / 1e6:.0f} MB of weights as "
        f"{'stored' if is_native else 'float32'}: at most {roof:.1f} decode steps/s by memory read"
    )
    start = time.perf_counter()
    with serving(arguments.model, *arguments.serve_options) as server:
        print(f"start to ready {time.perf_counter() - start:.1f} s (cached model)")
        print("\nclosed loop, greedy, streamed, no shared prefix; /roof = decode steps/s against memory read")
        print(
            "users  prompt  output  out tok/s  vs 1    rows/s   /roof  TTFT p50    max  TPOT p50    max  ms"
        )
        one_user = None
        for users in map(int, arguments.users.split(",")):
            result = asyncio.run(
                run(
                    server.url,
                    arguments.model,
                    users,
                    arguments.requests_per_user,
                    arguments.words,
                    arguments.output,
                )
            )
            print_result(result, roof, one_user)
            sys.stdout.flush()
            one_user = one_user or result.output_tokens_per_s


if __name__ == "__main__":
    main()
