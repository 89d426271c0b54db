import numpy as np
import numpy.typing as npt

__version__: str

FORMATS: tuple[str, ...]
"""Names of the stored weight formats that the kernels read."""

def row_bytes(format: str, num_cols: int) -> int:
    """Bytes of a row of `num_cols` values.

    ValueError when the format is unknown or the row is not a whole number of its blocks.
    """

def dequantize(format: str, data: npt.NDArray[np.uint8], num_cols: int) -> npt.NDArray[np.float32]:
    """Decode rows of stored weights.

    data: [num_rows, row_bytes(format, num_cols)] uint8, contiguous
    Returns [num_rows, num_cols] float32, bit for bit what the `gguf` package computes. Releases
    the GIL, so several tensors may be decoded at once by Python threads. ValueError when shapes
    and format disagree. Source: the block structures of ggml.
    """

def kv_bytes_per_block(num_layers: int, num_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Bytes of a KV block of 16 tokens over all layers, keys and values, as `Model` stores it."""

def measure_limits(num_threads: int | None = None) -> dict[str, float]:
    """What this machine can do at most, measured in two seconds on the last of `AVAILABLE_ISAS`.

    num_threads: None: what quota and affinity leave to this process.

    Returns, each the best of several runs of all threads together, in 10^9 per second:
    read_gb_s:   bytes of 1 GiB read from memory in order.
    int8_gop_s:  additions and multiplications of the integer products that the linear layers are
                 made of, on data in the first cache; unpacking and scales are left out.
    f32_gflop_s: the same of fused multiply-adds in float32.
    """

AVAILABLE_ISAS: tuple[str, ...]
"""Instruction sets that the kernels have and this processor too, the plainest first."""

class Model:
    """Packed weights, paged keys and values, a recorded program and threads.

    Every call that computes releases the GIL; a model serves one call at a time. ValueError when
    arguments make no sense; then nothing was computed. R rows, T query tokens, S sampling rows.

    max_len:      positions are below this.
    num_blocks:   KV blocks of `block_size` = 16 tokens.
    kv_dtype:     f32, bf16, or int8 with a scale per token and head.
    activations:  int8 (in groups of 32, where a matrix takes that) or float.
    num_threads:  the caller included; None: what quota and affinity leave to this process.
    isa:          one of `AVAILABLE_ISAS`; None: the last of them.
    window:       positions that a query sees, its own included; None: all before it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        rope_theta: float,
        max_len: int,
        num_blocks: int,
        block_size: int,
        kv_dtype: str,
        activations: str,
        num_threads: int | None = None,
        isa: str | None = None,
        window: int | None = None,
    ) -> None: ...
    @property
    def isa(self) -> str:
        """The instruction set in use."""

    @property
    def num_threads(self) -> int:
        """The threads in use, the caller's included."""

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of a block over all layers, keys and values."""

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes that the packed weights take, and how many numbers the matrices hold."""

    def add_matrix(self, name: str, format: str, data: npt.NDArray[np.uint8], num_cols: int) -> bool:
        """Repack stored rows, [num_rows, row_bytes(format, num_cols)] uint8.

        Returns whether products with it take int8 activations.
        """

    def add_vector(self, name: str, format: str, data: npt.NDArray[np.uint8], len: int) -> None:
        """Decode one stored row of `len` values, [1, row_bytes(format, len)] uint8."""

    def load_program(
        self, ops: list[tuple[str, tuple[int, ...], tuple[str, ...], tuple[int, ...], int, float]]
    ) -> None:
        """Take in what a step does: (kind, inputs, weights, outputs, layer, value) of each op.

        Registers, shapes and weights are checked; ValueError names the op that does not fit.
        """

    def poison(self, blocks: npt.NDArray[np.int32]) -> None:
        """Fill blocks [F] with numbers that make NaN of all that they touch."""

    def copy_blocks(self, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Copy blocks sources [C] over targets [C] in every layer, pair after pair."""

    def forward(
        self,
        token_ids: npt.NDArray[np.int32],
        query_start: npt.NDArray[np.int32],
        num_computed: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        sample_rows: npt.NDArray[np.int32],
        scored_tokens: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Compute a step's tokens and store their keys and values.

        token_ids [T]; query_start [R+1]; num_computed [R]; block_tables [R, B]; sample_rows [S];
        scored_tokens [Q], indices into the T tokens, for `score`.
        """

    def sample(
        self,
        num_top: npt.NDArray[np.int32],
        on_host: npt.NDArray[np.bool_],
        temperature: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int32],
        top_p: npt.NDArray[np.float32],
        number: npt.NDArray[np.float64],
    ) -> tuple[
        npt.NDArray[np.int32],
        npt.NDArray[np.bool_],
        npt.NDArray[np.float32],
        dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]],
        npt.NDArray[np.float32],
    ]:
        """Run the output head for the rows that sample in the last `forward`, and choose their ids.

        All [S]. num_top: how many of the likeliest ids are wanted; -1: no logprobs.
        on_host: rows whose logits are wanted instead, for choosing elsewhere.
        temperature, top_k, top_p: as in requests; temperature 0 takes the likeliest id.
        number: the random number in [0, 1) of a row that draws.

        Returns the ids [S], ties to the lower; whether a row was finite [S]; the log-probabilities of
        the ids [S], where num_top is not -1; the likeliest ids and their logprobs by row where it is
        not; and logits [number of rows on the host, vocab_size]. Of rows on the host only the second
        and the last mean anything. Sources: Holtzman et al. 2019, arXiv:1904.09751, for top_p.
        """

    def score(
        self, target_ids: npt.NDArray[np.int32], num_top: npt.NDArray[np.int32]
    ) -> tuple[
        npt.NDArray[np.bool_],
        npt.NDArray[np.float32],
        npt.NDArray[np.int32],
        npt.NDArray[np.int32],
        npt.NDArray[np.float32],
    ]:
        """Run the output head for the scored tokens of the last `forward`, 64 at a time.

        target_ids [Q]: the id whose log-probability is wanted after each; num_top [Q], from 0.

        Returns whether each was finite [Q]; log-probabilities [Q] and ranks [Q] of the target ids, 1 being
        the likeliest and ties going to the lower id; and the likeliest ids and their log-probabilities,
        min(num_top, vocab_size) for each, one after the other. Of what is not finite, which has no
        likeliest ids, only that means anything.
        """

    def take_times(self) -> dict[str, int]:
        """Nanoseconds by phase (linear, attention, head, rest) since the last call."""
