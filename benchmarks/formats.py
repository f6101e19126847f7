"""How fast each type of a file is multiplied, against the machine's roofs and another engine; prints a Markdown table.

    python benchmarks/formats.py [TYPE ...] [-t 2] [--layers 4] [--rows 128] [--rounds 5] [--json]
                                 [--peer "python peer.py"]

The matrices have the shapes of a model with 1.2 billion parameters (n_embd 2048, n_ff 8192, 8 KV heads of 64) and
random weights. A few layers are enough to be larger than any cache; their products are run through the engine's own
plan, with one row (decode) and with many (prefill), and timed by the executor's stamps. With a peer, a file of these
layers is written for each type and both engines run it as a model, in turn: the peer is a command that takes
`MODEL -p N -n N -t N -r N` and prints llama-bench's JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from tinyllm.buffers import huge_zeros
from tinyllm.kernels.formats import TILE_OF, Tile
from tinyllm.measure.costs import Costs, StepShape, Work
from tinyllm.measure.roofs import Prober, RoofPair, Roofs
from tinyllm.measure.timeline import Clock, Recorder
from tinyllm.plan_writer import PlanWriter
from tinyllm.team import Team, default_threads
from tinyllm.weights import Matrix

N_EMBD, N_FF, KV_WIDTH, HEAD_DIM = 2048, 8192, 512, 64
SHAPES = (
    ("qkv", N_EMBD + 2 * KV_WIDTH, N_EMBD),
    ("resid_mid", N_EMBD, N_EMBD),
    ("ffn_gate_up", 2 * N_FF, N_EMBD),
    ("resid_post", N_EMBD, N_FF),
)
N_LAYERS = 16  # of the model that the times are extrapolated to
# Two bytes of this range are a positive normal number as f16, as bf16 and in f32: no format meets infinities or
# subnormals in its scales, and codes take many values.
BYTES = (0x20, 0x3B)


# Types that files have; some of them share a tile.
TYPES = [name for name in TILE_OF if hasattr(gguf.GGMLQuantizationType, name) and not name.startswith(("F32", "Q8_"))]
TYPES.insert(2, "Q8_0")
N_VOCAB, N_GEN = 512, 32


@dataclass(frozen=True)
class Row:
    """One type: `bits` per weight in memory, the products' speeds, and their shares of the roofs.

    `decode` and `prefill` are tokens a second of whole models: tinyllm's and the peer's; None without a peer, or where
    the peer does not know the type.
    """

    name: str
    bits: float
    decode_gb_s: float
    decode_ms: float
    prefill_gop_s: float
    prefill_t_s: float
    is_float: bool
    decode_share: float = 0.0
    prefill_share: float = 0.0
    decode: tuple[float, float] | None = None
    prefill: tuple[float, float] | None = None

    def beside(self, roofs: Roofs) -> Row:
        """The row with its shares of the roofs."""
        peak = roofs.f32_gflop_s if self.is_float else roofs.int8_gop_s
        return replace(self, decode_share=self.decode_gb_s / roofs.read_gb_s, prefill_share=self.prefill_gop_s / peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=TYPES, metavar="TYPE", help=f"of {', '.join(TYPES)}")
    parser.add_argument("-t", type=int, default=default_threads(), help="threads")
    parser.add_argument("--layers", type=int, default=4, help="layers that are really there")
    parser.add_argument("--rows", type=int, default=128, help="tokens of prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", type=shlex.split, help="command that times another engine")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead")
    args = parser.parse_args()
    if unknown := set(args.types) - set(TYPES):
        parser.error(f"unknown types: {', '.join(sorted(unknown))}")
    team = Team(args.t)
    prober = Prober(team)
    rows, looks = [], [prober.measure()]
    for name in args.types:
        row = measure(name, team, args.layers, args.rows, args.rounds)
        looks.append(prober.measure())
        row = row.beside(RoofPair(looks[-2], looks[-1]).best)
        if args.peer:
            decode, prefill = compare(name, args.t, args.layers, args.rows, args.peer)
            row = replace(row, decode=decode, prefill=prefill)
            looks[-1] = prober.measure()
        rows.append(row)
    prober.close()
    team.close()
    if args.json:
        print(
            json.dumps(
                {"threads": args.t, "roofs": [asdict(look) for look in looks], "types": [asdict(row) for row in rows]},
                indent=1,
            )
        )
    else:
        print_markdown(rows, looks, args.t)


def print_markdown(rows: list[Row], looks: list[Roofs], n_threads: int) -> None:
    reads = [look.read_gb_s for look in looks]
    peaks = [look.int8_gop_s for look in looks]
    print(
        f"{n_threads} threads; roofs, measured before and after each type: read {min(reads):.1f}–{max(reads):.1f} GB/s,"
        f" int8 {min(peaks):.0f}–{max(peaks):.0f} GOP/s\n"
    )
    columns = ["type", "bits/weight", "decode GB/s", "of read", "ms/token", "prefill GOP/s", "of peak", "prefill t/s"]
    compared = any(row.decode for row in rows)
    columns += ["decode, model", "prefill, model"] * compared
    print(f"| {' | '.join(columns)} |")
    print(f"| {' | '.join(['---'] + ['---:'] * (len(columns) - 1))} |")
    for row in rows:
        cells = [row.name, f"{row.bits:.2f}"]
        cells += [f"{row.decode_gb_s:.1f}", f"{100 * row.decode_share:.0f} %", f"{row.decode_ms:.1f}"]
        cells += [f"{row.prefill_gop_s:.0f}", f"{100 * row.prefill_share:.0f} %", f"{row.prefill_t_s:.0f}"]
        cells += [_ratio(row.decode), _ratio(row.prefill)] * compared
        print(f"| {' | '.join(cells)} |")


def _ratio(speeds: tuple[float, float] | None) -> str:
    return f"{speeds[0]:.0f} / {speeds[1]:.0f} = {speeds[0] / speeds[1]:.2f} ×" if speeds else ""


def measure(name: str, team: Team, n_layers: int, n_rows: int, rounds: int) -> Row:
    """Time all matrix products of the layers, `rounds` times each; the best, as roofs are the best of some looks."""
    tile = TILE_OF[name]
    with products(tile, team.n_threads, n_layers, n_rows) as plan:
        decode_s, decode_work = run(plan, team, 1, rounds)
        prefill_s, prefill_work = run(plan, team, n_rows, rounds)
    scale = N_LAYERS / n_layers
    return Row(
        name=name,
        bits=tile.bits_per_weight,
        decode_gb_s=decode_work.n_bytes / decode_s / 1e9,
        decode_ms=1e3 * decode_s * scale,
        prefill_gop_s=prefill_work.ops / prefill_s / 1e9,
        prefill_t_s=n_rows / (prefill_s * scale),
        is_float=tile.is_float,
    )


def compare(
    name: str, n_threads: int, n_layers: int, n_rows: int, peer: list[str]
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Tokens a second of both engines, decode and prefill, on a file of the layers; medians of four runs each."""
    ours = [sys.executable, "-m", "tinyllm_cli.main", "bench", "--json", "-m"]
    samples: dict[tuple[int, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        write_model(path, name, n_layers)
        tests = ["-p", str(n_rows), "-n", str(N_GEN), "-t", str(n_threads), "-r", "2"]
        for engine, command in (*enumerate((ours, peer)), *enumerate((ours, peer))):
            done = subprocess.run([*command, path, *tests], capture_output=True, text=True)
            if done.returncode:
                return None, None
            for test in json.loads(done.stdout):
                samples.setdefault((engine, test["n_prompt"] > 0), []).extend(test["samples_ts"])
    scale = n_layers / N_LAYERS
    speeds = {key: statistics.median(values) * scale for key, values in samples.items()}
    return (speeds[0, False], speeds[1, False]), (speeds[0, True], speeds[1, True])


def write_model(path: Path, name: str, n_layers: int) -> None:
    """A llama of the shapes with random weights of the type, and with few tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_EMBD // HEAD_DIM)
    writer.add_head_count_kv(KV_WIDTH // HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("no_vocab")
    values = np.random.default_rng(0)

    def add(tensor: str, rows: int, columns: int, type_name: str) -> None:
        kind = gguf.GGMLQuantizationType[type_name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (rows, columns // block * block_bytes)
        data = values.integers(BYTES[0], BYTES[1], shape, np.uint8, endpoint=True)
        writer.add_tensor(tensor, data, raw_dtype=kind)

    ones = np.ones(N_EMBD, np.float32)
    for tensor in ("token_embd", "output"):
        add(f"{tensor}.weight", N_VOCAB, N_EMBD, "F16")
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(n_layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for tensor, rows, columns in (
            ("attn_q", N_EMBD, N_EMBD), ("attn_k", KV_WIDTH, N_EMBD), ("attn_v", KV_WIDTH, N_EMBD),
            ("attn_output", N_EMBD, N_EMBD), ("ffn_gate", N_FF, N_EMBD), ("ffn_up", N_FF, N_EMBD),
            ("ffn_down", N_EMBD, N_FF),
        ):  # fmt: skip
            add(f"blk.{layer}.{tensor}.weight", rows, columns, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def products(tile: Tile, n_threads: int, n_layers: int, n_rows: int) -> Iterator[PlanWriter]:
    """A plan of nothing but products, over random tiles in huge pages that are kept for as long as the context."""
    matrices = [Matrix(stage, tile, rows, columns, ()) for _ in range(n_layers) for stage, rows, columns in SHAPES]
    n_bytes = sum(-(-matrix.n_bytes // 256) * 256 for matrix in matrices)
    memory = huge_zeros(n_bytes + (1 << 16))
    pattern = np.random.default_rng(0).integers(BYTES[0], BYTES[1], 1 << 20, np.uint8, endpoint=True)
    for start in range(0, memory.size, pattern.size):
        memory[start : start + pattern.size] = pattern[: memory.size - start]
    address = memory.ctypes.data
    plan = PlanWriter(n_rows, n_threads)
    wide, narrow = plan.buffer("wide", 2 * N_FF), plan.buffer("narrow", N_EMBD)
    inputs = {N_EMBD: plan.buffer("x", N_EMBD), N_FF: plan.buffer("act", N_FF)}
    values = np.random.default_rng(1)
    for x in inputs.values():
        x.array[:] = values.standard_normal(x.array.shape, np.float32)
        plan.quantize("quantize", x)
    for index, matrix in enumerate(matrices):
        matrix.address = address
        address += -(-matrix.n_bytes // 256) * 256
        plan.layer(index // len(SHAPES))
        y = narrow if matrix.n_outputs == N_EMBD else wide.columns(0, matrix.n_outputs, matrix.name)
        plan.linear(matrix.name, inputs[matrix.n_inputs], matrix, y)
    plan.finish()
    yield plan


def run(plan: PlanWriter, team: Team, n_rows: int, rounds: int) -> tuple[float, Work]:
    """Seconds of all products of a step, the least of the rounds, and their work."""
    shape = StepShape(n_rows, n_rows, 0)
    indices = [index for index, op in enumerate(plan.ops) if op.stage != "quantize"]
    plan.set_rows(n_rows, n_rows)
    team.run(plan.table)
    recorder = Recorder(plan, lambda: shape)
    team.recorder = recorder
    clock = Clock(team)
    ticks = []
    for _ in range(rounds):
        team.run(plan.table)
        ticks.append(recorder.take().total[indices].sum())
    team.recorder = None
    clock.stop()
    costs = Costs(plan)
    work = sum((costs.of(plan.ops[index], shape) for index in indices), Work())
    return min(ticks) * clock.seconds_per_tick, work


if __name__ == "__main__":
    main()
