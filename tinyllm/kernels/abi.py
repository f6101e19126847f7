"""The kernel ABI without Numba: every kernel is `void kernel(int64 arguments, int64 thread, int64 n_threads)`.

`arguments` is the address of a block of int64 words; this module names the words of each kind of kernel.
The first two words are the same everywhere: a ticket counter, from which threads draw their share of the work, and the
address of the number of rows of the step. The last word, a cache line away, is a second counter (see `dealing.py`).
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class Arguments:
    """Names of the words of an argument block; `fields.name` is a byte offset."""

    WORDS = 32

    def __init__(self, names: str):
        self.names = ("ticket", "n_rows", *names.split())
        if len(self.names) >= self.WORDS:
            raise ValueError("too many words for an argument block")
        for index, name in enumerate(self.names):
            setattr(self, name, 8 * index)

    def __getattr__(self, name: str) -> int:
        raise AttributeError(f"these kernel arguments have no word named {name!r}")

    def pack(self, **values: int | float) -> list[int]:
        """The words in order; floats are stored as the bits of a float32."""
        unknown = set(values) - set(self.names)
        missing = set(self.names) - set(values) - {"ticket"}
        if unknown or missing:
            raise ValueError(f"kernel arguments: unknown {sorted(unknown)}, missing {sorted(missing)}")
        words = [_word(values.get(name, 0)) for name in self.names]
        return words + [0] * (self.WORDS - len(words))


# Where in a block the ticket counters of the low and of the high half of the units are.
TICKETS = (0, 8 * (Arguments.WORDS - 1))


def _word(value: int | float) -> int:
    if isinstance(value, float):
        return struct.unpack("<I", struct.pack("<f", value))[0]
    return int(value)


# One record of quantized activations: 32 inputs of one row, a cache line.
RECORD = 64
RECORD_SCALE = 32  # f32: scale
RECORD_SUMS = 36  # f32 x 2: scale · Σ codes of each half
RECORD_SUM = 44  # f32: scale · Σ codes
RECORD_NEGATIVE = 48  # 3 words: −Σ codes of each half, then of all, as `dot.store_codes` writes them

# Parts of a matrix that the product with one row walks at the same time. The hardware reads ahead in each of them by
# itself: on Zen 3 one thread reads 22 GB/s in one stream, 27 in two, and 29 in four.
STREAMS = 4

# y[row] (+)= scale · (W x + bias), for rows from *first_row on (0: all). `twin`: two matrices lie in turns of two
# panels, and the outputs of the second begin so many panels behind those of the first. `then`: a kernel that goes on
# with what is complete of both, called with `then_arguments` and two spans, of rows and of columns.
# `grain` panels are a unit of work. For one row it is `turn` panels, of each of STREAMS streams of `stream` panels that
# lie one behind the other, and then of what is left over.
LINEAR = Arguments(
    "grain stream turn panels tiles panel_bytes weights private x x_stride y y_stride bias accumulate scale scratch"
    " scratch_stride first_row twin then then_arguments"
)
# A span is its first number and the one behind its last, in one word.
SPAN = 2**32

# h (+)= scale · norm(x), and optionally its records.
NORM = Arguments(
    "n eps weight weight_stride bias x x_stride h h_stride records records_stride segments accumulate scale"
)

# records of x.
QUANTIZE = Arguments("n x x_stride records records_stride")

# y = act(gate) * up, and optionally its records; gate and up are column offsets of x.
GATED = Arguments("n gate up x_stride y y_stride records records_stride")

# Records of each row of x in two rows: of its values, and of what rounding them left over.
SPLIT = Arguments("n x x_stride records records_stride")

# y[i] = x[2i] + x[2i + 1]
JOIN = Arguments("n x x_stride y y_stride")

# x = x limited to ±limit.
LIMIT = Arguments("n limit x x_stride")

# y[head · y_step] = x[head · x_step], n floats each.
COPY_HEADS = Arguments("n n_heads x x_stride x_step y y_stride y_step")

# Call a kernel for each of some argument blocks: `groups` lists their numbers (0: all in order).
DISPATCH = Arguments("n_groups groups blocks one many")

# Scores of experts to the n_used chosen ones and their weights, per row.
ROUTE = Arguments(
    "n_experts n_used n_groups n_groups_used scores scores_stride choice choice_stride bias ids weights normalise scale"
)

# Rows sorted by expert: pairs of (row, choice) with the same expert become neighbours.
# A pair is `parts` rows of the products' activations.
GROUP = Arguments(
    "n_experts n_used parts ids counts firsts active n_active n_pairs pair_rows pair_weights weights places"
)

# y (+)= scale · (Σ weight · z[place] + shared · sigmoid(gate))
COMBINE = Arguments(
    "n n_used places weights z z_stride shared shared_stride gate gate_stride y y_stride accumulate scale"
)

# x[i] = x[i] · weights[i]
WEIGH = Arguments("n x x_stride weights")

# Rotate q and k, write k and v into the cache. Tables hold a cosine and a sine per rotated dimension and row.
ROPE = Arguments(
    "row_table q q_stride k k_stride v v_stride n_heads n_kv_heads head_dim v_dim n_rot offset cos_sin table_stride"
    " pages"
    " pool page_bytes head_bytes v_offset"
)

# y[i] = x[index[i]]
GATHER = Arguments("n index x x_stride y y_stride")

# Attention of the step's blocks of rows over the cache.
ATTEND = Arguments(
    "blocks n_blocks q q_stride out out_stride n_heads n_kv_heads head_dim v_dim pool page_bytes head_bytes v_offset"
    " pages scale softcap window_left window_right slopes sinks scratch scratch_stride partials max_partitions"
    " max_rows causal"
)

# Short causal convolution of each of n channels, over the runs of the step. `gate_in` and `gate_out` share x's stride.
CONVOLVE = Arguments("runs n_runs n taps bias x x_stride gate_in gate_out y y_stride state")

# Selective scan over n channels: x and y per channel, b and c per state.
SELECTIVE_SCAN = Arguments(
    "runs n_runs n n_state x x_stride dt dt_stride b c bc_stride a d z z_stride y y_stride state"
)

# Scan of state space duality: heads of channels with one step size and decay each; x, b and c are columns of one
# matrix.
HEAD_SCAN = Arguments(
    "runs n_runs n_heads head_dim n_groups n_state x b c xbc_stride dt dt_stride dt_bias a d z z_stride y y_stride"
    " state"
)

# Gated delta rule. Value head j has key head j // key_div % n_key_heads, and its beta and alpha lie in groups.
DELTA_RULE = Arguments(
    "runs n_runs n_heads k_dim v_dim n_key_heads key_div q k v qkv_stride beta alpha gate_stride group group_bytes"
    " a dt_bias y y_stride state"
)

# y = rms_norm(x) · weight · silu(gate) per segment of n.
GATED_NORM = Arguments("n segments eps weight x x_stride gate gate_stride y y_stride")

# x = x · sigmoid(gate) per segment of n.
SIGMOID_GATE = Arguments("n segments x x_stride gate gate_stride gate_segment")

# Words of a run, the rows of one sequence in a step: first row, rows, addresses of the state before and behind them.
RUN_FIRST, RUN_ROWS, RUN_SOURCE, RUN_TARGET, RUN_BYTES = 0, 8, 16, 24, 32

# x = scale · table[token], from the file's blocks.
EMBED = Arguments("row_table table row_bytes n_blocks x x_stride scale")

# Words of a row of the step: position, address of its sequence's page table, token.
ROW_POSITION, ROW_PAGES, ROW_TOKEN, ROW_BYTES = 0, 8, 16, 24
# Words of a block of rows of one sequence: first row, rows, first position, length of the sequence, page table.
BLOCK_FIRST, BLOCK_ROWS, BLOCK_POSITION, BLOCK_LENGTH, BLOCK_PAGES, BLOCK_BYTES = 0, 8, 16, 24, 32, 40

PAGE = 32  # positions per page
PARTITION = 128  # positions whose softmax is computed on its own and merged in order


class CacheType(NamedTuple):
    """A type of cached keys and values: bytes of 32 numbers, and of how many a head's size must be a multiple."""

    block_bytes: int
    multiple: int


# q8_0: int8 codes, and a half-precision scale for each position and 32 dimensions.
CACHE_TYPES = {"f16": CacheType(64, 1), "f32": CacheType(128, 1), "q8_0": CacheType(34, 32)}

# A row of a plan's table: kernel for one row, kernel for many (0: the op before does this one's work), arguments,
# address of the number of rows, and whether the op is private when there is one row: then each thread does all of it
# for itself, and nobody waits.
OP_ONE, OP_MANY, OP_ARGUMENTS, OP_ROWS, OP_PRIVATE, OP_BYTES = 0, 8, 16, 24, 32, 40


class JOB:
    """Byte offsets in the block that the threads of a team share; each group of words has a cache line of its own."""

    ops, n_ops, stamps, arrived_before = 0, 8, 16, 24
    arrived = 128
    epoch, quit = 256, 264
    stop = 384
    stop_after = 512
    left = 640
    BYTES = 768


# Panels of 16 rows from the file's rows, with `gap` bytes behind every second; `table` is the address of
# `pack.table_of` the type, or 0.
PACK = Arguments("rows n_inputs row_bytes source panels panel_bytes gap tiles weights table")

# Packed panels, with `gap` bytes behind every second, that are looked through; the word at `flag` becomes 1 if a scale,
# a minimum or a plain weight is not finite.
CHECK = Arguments("panels panel_bytes gap tiles weights flag")

# Chunks of memory to be read, or chunks of `vectors` vector operations; a vector per thread comes out.
PROBE = Arguments("memory n_chunks chunk_bytes vectors result")

# Σ exp(x - shift) of n float32, as the sum of the two float32 at `result`.
SUM_EXP = Arguments("n x shift result")
