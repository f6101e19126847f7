"""What bench measures and how it adds up; never how long anything takes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from bench_model import HEAD_DIM, N_EMBD, N_FF, N_HEADS, N_KV_HEADS, N_LAYERS, N_VOCAB, write_bench_model
from conftest import reference_dir

import tinyllm
from tinyllm.bench import Bench, Result, Trial
from tinyllm.errors import InvalidParameterError
from tinyllm.kernels import abi
from tinyllm.kernels.jit import kernel_addresses
from tinyllm.measure import machine
from tinyllm.measure.breakdown import PYTHON, Entry, break_down, merge
from tinyllm.measure.costs import FORMULAS, Costs, StepShape, Work
from tinyllm.measure.perfetto import FIRST_WORKER, LAYERS, STEPS, TracedResult, trace_document, write_trace
from tinyllm.measure.roofs import Prober, RoofPair, Roofs
from tinyllm.measure.timeline import Clock, Recorder, bounds_of
from tinyllm.team import Team

N_THREADS = 2
LLAMA_BENCH_KEYS = {
    *("build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size"),
    *("model_n_params", "n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_prompt", "n_gen", "n_depth"),
    *("test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts"),
}
STAGES = {
    *("attn_norm", "q", "k+v", "rope", "attn_out", "attn_output", "ffn_norm", "ffn_gate_up", "ffn_down"),
    *("embed", "out_rows", "final_norm", "logits", PYTHON),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return write_bench_model(tmp_path_factory.mktemp("bench") / "tiny.gguf")


@pytest.fixture(scope="module")
def results(model_path) -> dict[str, Result]:
    """One run of a prompt in three chunks, of tokens, and of both behind a depth."""
    trials = [Trial(20, 0), Trial(0, 5), Trial(12, 3, n_depth=40)]
    with Bench(model_path, trials, n_threads=N_THREADS, n_batch=8, repetitions=3, layers=True, trace_steps=4) as bench:
        return {result.trial.name: result for result in bench.results()}


# Trials and results.


@pytest.mark.parametrize(
    ("trial", "name", "unit", "n_units"),
    [
        (Trial(512, 0), "pp512", "prompt", 1),
        (Trial(0, 128), "tg128", "token", 128),
        (Trial(64, 8), "pp64+tg8", "run", 1),
        (Trial(0, 16, 4096), "tg16 @ d4096", "token", 16),
    ],
)
def test_trials_are_named_as_llama_bench_names_them(trial, name, unit, n_units):
    assert (trial.name, trial.unit, trial.n_units) == (name, unit, n_units)


@pytest.mark.parametrize("numbers", [(0, 0), (-1, 5), (1, 1, -1)])
def test_a_trial_needs_something_to_do(numbers):
    with pytest.raises(InvalidParameterError):
        Trial(*numbers)


def test_steps_of_a_trial():
    assert Trial(20, 2, 5).steps(8) == [
        StepShape(8, 0, 5), StepShape(8, 0, 13), StepShape(4, 1, 21), StepShape(1, 1, 25), StepShape(1, 1, 26),
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{"repetitions": 0}, {"n_threads": -1}, {"kv_type": "f64"}], ids=str)
def test_numbers_that_cannot_be_are_refused(model_path, options):
    with pytest.raises(InvalidParameterError):
        Bench(model_path, [Trial(1, 0)], **options)


def test_nothing_to_measure_is_refused(model_path):
    with pytest.raises(InvalidParameterError):
        Bench(model_path, [])


def test_trials_that_do_not_fit_the_models_context_are_refused():
    path = Path(__file__).parent / "data" / "architectures" / "starcoder.gguf"
    with pytest.raises(InvalidParameterError, match=r"pp70 @ d9 needs 79 positions, and starcoder.gguf has 64 at most"):
        Bench(path, [Trial(8, 0), Trial(70, 0, 9)], layers=True)


def test_trials_that_do_not_fit_into_memory_are_refused(model_path, monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 30_000)
    with pytest.raises(InvalidParameterError, match=r"pp8 @ d400: 408 positions take .* GB of cache"):
        Bench(model_path, [Trial(8, 0, 400), Trial(8, 0)])
    with Bench(model_path, [Trial(8, 0)], repetitions=1) as bench:
        assert len(list(bench.results())) == 1


def test_rows_have_the_keys_of_llama_bench(results):
    for result in results.values():
        row = json.loads(json.dumps(result.as_dict()))
        assert not LLAMA_BENCH_KEYS - set(row)
        assert len(row["samples_ts"]) == len(row["samples_ns"]) == 3
        assert row["avg_ts"] == pytest.approx(np.mean(row["samples_ts"]))
        assert row["stddev_ts"] == pytest.approx(np.std(row["samples_ts"], ddof=1))
        n_tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([1e9 * n_tokens / ns for ns in row["samples_ns"]])
        assert (row["n_threads"], row["n_batch"], row["type_k"]) == (N_THREADS, 8, "f16")


def test_facts_about_the_model(results, model_path):
    row = results["pp20"].as_dict()
    assert row["model_filename"] == str(model_path)
    layer = 2 * N_EMBD * N_EMBD + 2 * N_KV_HEADS * HEAD_DIM * N_EMBD + 3 * N_EMBD * N_FF + 2 * N_EMBD
    assert row["n_params"] == row["model_n_params"] == N_LAYERS * layer + N_VOCAB * N_EMBD + N_EMBD
    assert row["model_type"] == f"llama {row['n_params'] / 1e3:.0f}K Q8_0"


def test_first_token_belongs_to_prompts(results):
    assert results["tg5"].first_token_ns is None
    assert results["pp20"].first_token_ns >= min(results["pp20"].samples_ns)
    assert results["pp12+tg3 @ d40"].first_token_ns < max(results["pp12+tg3 @ d40"].samples_ns)


def test_each_repetition_is_announced_and_a_depth_is_computed_once(model_path, monkeypatch):
    told, evaluated = [], []
    evaluate = tinyllm.model.Sequence.evaluate

    def spy(self, ids, *args, **options):
        evaluated.append((len(self), len(ids)))
        return evaluate(self, ids, *args, **options)

    monkeypatch.setattr(tinyllm.model.Sequence, "evaluate", spy)
    trials = [Trial(3, 0, 10), Trial(0, 2, 10)]
    with Bench(
        model_path, trials, n_threads=1, repetitions=2, on_run=lambda trial, i: told.append((trial.name, i))
    ) as bench:
        list(bench.results())
    assert told == [(trial.name, i) for trial in trials for i in (-1, 0, 1)]
    assert evaluated == [(0, 10)] + 3 * [(10, 3)] + 3 * [(10, 1), (11, 1)]


def test_without_layers_nothing_is_stamped(model_path):
    with Bench(model_path, [Trial(4, 0)], n_threads=1, repetitions=1, warm_up=False) as bench:
        (result,) = bench.results()
    assert result.breakdown is result.roofs is result.trace is None
    assert "per_layer" not in result.as_dict()


# Work.


def op_named(plan, stage: str, kind: abi.Arguments):
    return next(op for op in plan.ops if op.stage == stage and op.arguments is kind)


@pytest.fixture(scope="module")
def plan(model_path):
    with tinyllm.load(model_path, n_threads=1, n_ctx=256) as model:
        yield model.network.plan


def test_every_kind_of_op_has_a_formula():
    kinds = {name: kind for name, kind in vars(abi).items() if isinstance(kind, abi.Arguments)}
    outside_plans = {"CHECK", "PACK", "PROBE", "SUM_EXP"}
    assert {name for name, kind in kinds.items() if id(kind) not in FORMULAS} == outside_plans


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("shape", [StepShape(1, 1, 0), StepShape(1, 1, 33), StepShape(9, 0, 0), StepShape(9, 0, 30)])
def test_attention_counts_what_each_row_sees(plan, shape, window):
    op = op_named(plan, "attn_out", abi.ATTEND)
    if window is not None:
        op.values["window_left"] = window - 1
    seen = [
        {p for p in range(position + 1) if window is None or p > position - window}
        for position in range(shape.position, shape.position + shape.n_rows)
    ]
    work = Costs(plan).of(op, shape)
    per_pair = N_HEADS * (4 * HEAD_DIM + 20)
    assert work.f32_ops == sum(map(len, seen)) * per_pair
    kv_bytes = len(set().union(*seen)) * N_KV_HEADS * (HEAD_DIM + 32) * 2  # values are padded to 32
    assert work.n_bytes == kv_bytes + shape.n_rows * N_HEADS * 2 * HEAD_DIM * 4
    op.values["window_left"] = 2**30


def test_products_read_their_weights_once(plan):
    op = op_named(plan, "ffn_down", abi.LINEAR)
    one, many = (Costs(plan).of(op, StepShape(n, 1, 0)) for n in (1, 10))
    assert one.int8_ops == 2 * N_EMBD * N_FF and many.int8_ops == 10 * one.int8_ops
    q8_0_bytes = N_EMBD * N_FF * 34 // 32
    assert q8_0_bytes < one.n_bytes < many.n_bytes < 10 * q8_0_bytes
    assert many.n_bytes - one.n_bytes == 9 * (N_FF * 2 + N_EMBD * 8)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["mixtral", "deepseek2", "llama4", "gemma3", "gpt2"])
def test_all_weights_are_read_by_enough_rows_and_fewer_by_one(name):
    """Experts included: what one row reads of them is the share that is used, and many rows read all."""
    path = reference_dir() / "conformance" / "models" / f"{name}.gguf"
    with tinyllm.load(path, n_threads=1, n_ctx=64) as model:
        costs, ops = Costs(model.network.plan), model.network.plan.ops
        products = [op for op in ops if op.arguments in (abi.LINEAR, abi.DISPATCH)]

        def weight_bytes(n_rows: int) -> float:
            """Without activations, which grow with the rows."""
            shapes = [StepShape(n, n, 0) for n in (n_rows, 2 * n_rows, 3 * n_rows)]
            a, b, c = (sum(costs.of(op, shape).n_bytes for op in products) for shape in shapes)
            return a - (c - b) if n_rows > 1 else a

        assert weight_bytes(10_000) == pytest.approx(model.weights.n_bytes)
        experts = [op.blocks.count * op.blocks.steps["weights"] for op in products if op.arguments is abi.DISPATCH]
        used = [op.weight_bytes for op in products if op.arguments is abi.DISPATCH]
        activations = weight_bytes(1) - (model.weights.n_bytes - sum(experts) + sum(used))
        assert 0 < activations < 0.5 * model.weights.n_bytes


def test_only_wanted_rows_reach_the_output_matrix(plan):
    op = op_named(plan, "logits", abi.LINEAR)
    assert Costs(plan).of(op, StepShape(10, 0, 0)) == Work()
    assert Costs(plan).of(op, StepShape(10, 3, 0)).int8_ops == 3 * 2 * N_EMBD * N_VOCAB


# Stamps.


def stamps_of(*threads: list[int]) -> np.ndarray:
    return np.array(threads, np.int64)


def test_an_op_ends_when_its_last_thread_is_done():
    # start, (own end, all end) of three ops; thread 0 lost its processor behind the first one.
    stamps = stamps_of([0, 10, 60, 61, 62, 70, 80], [2, 15, 16, 40, 61, 75, 76])
    assert bounds_of(stamps).tolist() == [0, 15, 61, 80]
    assert bounds_of(stamps, np.array([True, False, False])).tolist() == [0, 10, 61, 80]


def test_the_recorder_sums_steps_of_its_plan_only(plan):
    n_ops = len(plan.ops)
    recorder = Recorder(plan, lambda: StepShape(1, 1, 7), keep=1)
    assert recorder(np.zeros((3, abi.OP_BYTES // 8), np.int64)) == 0
    for step in range(3):
        assert recorder(plan.table) == recorder.last.ctypes.data
        stamps = recorder.last
        assert stamps.shape == (1, 2 * n_ops + 1)
        stamps[0, :] = 1000 * step + 10 * np.arange(2 * n_ops + 1)
    ticks = recorder.take()
    assert ticks.shapes == 3 * (StepShape(1, 1, 7),)
    assert ticks.mean.tolist() == ticks.longest.tolist() == [30.0] * n_ops
    assert ticks.total.sum() == 3 * 20 * n_ops
    assert len(recorder.kept) == 1 and recorder.kept[0].stamps[0, 1] == 10
    assert recorder.take().shapes == ()


def test_time_of_an_op_is_work_imbalance_and_waiting(plan, monkeypatch):
    n_ops = len(plan.ops)
    monkeypatch.setattr(plan, "n_threads", 2)
    monkeypatch.setattr(plan, "alone", lambda n_rows, n_out: [False] * n_ops)
    recorder = Recorder(plan, lambda: StepShape(1, 1, 0))
    recorder(plan.table)
    stamps = recorder.last
    stamps[0, 1::2], stamps[0, 2::2] = 100 * np.arange(n_ops) + 90, 100 * np.arange(n_ops) + 100
    stamps[1, 1::2], stamps[1, 2::2] = 100 * np.arange(n_ops) + 50, 100 * np.arange(n_ops) + 100
    ticks = recorder.take()
    assert ticks.longest.tolist() == [90.0] * n_ops and ticks.mean.tolist() == [70.0] * n_ops
    assert ticks.total.sum() == 100 * n_ops


def test_steps_are_recorded_as_they_were_run(results):
    for result in results.values():
        expected = result.trial.steps(8)[:4]
        assert [step.shape for step in result.trace.steps] == expected
        for step in result.trace.steps:
            assert np.all(np.diff(step.stamps, axis=1) >= 0)


def test_ticks_are_converted_to_seconds():
    team = Team(1)
    clock = Clock(team)
    clock.stop()
    assert 0 < clock.seconds_per_tick < 1e-6
    later = clock.moment(clock._last[1])
    assert later == pytest.approx(clock._last[0])
    team.close()


def test_stamps_do_not_change_results(model_path):
    ids = list(range(30))
    with tinyllm.load(model_path, n_threads=N_THREADS, n_ctx=64) as model:
        plain = model.logits(ids)
        recorder = Recorder(model.network.plan, lambda: StepShape(0, 0, 0))
        model.team.recorder = recorder
        observed = model.logits(ids)
        model.team.recorder = None
        assert len(recorder.take().shapes) == 1
    assert np.array_equal(plain, observed)


# Breakdown.


def test_entries_add_up_to_the_wall_time(results):
    for result in results.values():
        entries = result.as_dict()["per_layer"]
        wall_ms = np.mean(result.samples_ns) / 1e6 / result.trial.n_units
        assert sum(entry["ms"] for entry in entries) == pytest.approx(wall_ms, rel=1e-4)
        assert result.breakdown.wall_ms == pytest.approx(wall_ms)
        assert result.breakdown.ops.ms < wall_ms
        assert result.as_dict()["per_layer_unit"] == result.trial.unit


def test_every_stage_of_every_layer_is_there_once(results):
    for result in results.values():
        entries = result.breakdown.entries
        assert {entry.stage for entry in entries} == STAGES
        places = [(entry.layer, entry.stage) for entry in entries]
        assert len(places) == len(set(places))
        assert [entry.layer for entry in result.breakdown.by_layer()] == list(range(N_LAYERS))
        assert entries[-1].stage == PYTHON and entries[-1].ms > 0


def test_work_of_a_breakdown_is_that_of_the_result(results):
    for result in results.values():
        work = result.breakdown.ops.work * result.trial.n_units
        assert work.n_bytes == pytest.approx(result.work.n_bytes)
        assert work.ops == pytest.approx(result.work.ops)


def test_stages_are_sorted_by_what_is_lost(results):
    for result in results.values():
        lost = [entry.lost_ms for entry in result.breakdown.by_stage()]
        assert lost == sorted(lost, reverse=True)


ROOFS = Roofs(read_gb_s=10.0, int8_gop_s=100.0, f32_gflop_s=50.0)


@pytest.mark.parametrize(
    ("work", "ms", "mean_ms", "limit", "least_ms"),
    [
        (Work(n_bytes=20e6), 4.0, 4.0, "mem", 2.0),
        (Work(n_bytes=20e6), 1.0, 1.0, "cache", 2.0),
        (Work(n_bytes=20e6), 4.0, 1.5, "sync", 2.0),
        (Work(n_bytes=1e6, int8_ops=300e6), 4.0, 4.0, "int8", 3.0),
        (Work(n_bytes=1e6, int8_ops=1e6, f32_ops=50e6), 4.0, 4.0, "f32", 1.0),
    ],
)
def test_the_limit_of_an_op(work, ms, mean_ms, limit, least_ms):
    times = ROOFS.times(work)
    resource = max(times, key=times.get)
    entry = Entry("stage", 0, 1, (ms,), mean_ms, mean_ms, work, {resource: 1e3 * times[resource]})
    assert entry.limit == limit
    assert entry.least_ms == pytest.approx(least_ms)
    assert entry.lost_ms == pytest.approx(max(0.0, ms - least_ms))


def test_sums_keep_the_spread_of_repetitions():
    parts = [Entry("a", i, 1, samples, 1, 1, Work(1, 2, 3), {"mem": 0.5}) for i, samples in enumerate([(1, 3), (3, 1)])]
    both = merge("a", None, parts)
    assert (both.ms, both.stddev_ms, both.calls, both.work, both.roof_ms) == (4, 0, 2, Work(2, 4, 6), {"mem": 1.0})
    assert parts[0].stddev_ms == pytest.approx(np.std([1, 3], ddof=1))


def test_a_breakdown_of_known_ticks(plan):
    recorder = Recorder(plan, lambda: StepShape(1, 1, 0))
    n_ops = len(plan.ops)
    repetitions = []
    for width in (10, 30):
        for _ in range(2):
            recorder(plan.table)
            recorder.last[0] = width * np.arange(2 * n_ops + 1)
        repetitions.append(recorder.take())
    # Two tokens of 20 or 60 ticks per op, a microsecond each; Python takes the rest of 0.1 s.
    broken = break_down(plan, repetitions, [0.1, 0.1], 1e-6, ROOFS, "token", 2)
    assert broken.wall_ms == pytest.approx(50)
    assert broken.ops.samples == pytest.approx([0.02 * n_ops, 0.06 * n_ops])
    assert broken.ops.calls == sum(not op.done_before for op in plan.ops)


# Probes.


def probe(name: str, memory: np.ndarray, n_threads: int, **values: int) -> np.ndarray:
    """Run a probe; a vector of 64 bytes per thread."""
    result = np.zeros((n_threads + 1, 64), np.uint8)
    aligned = result.ctypes.data + -result.ctypes.data % 64
    many = np.array([2], np.int64)
    arguments = np.array(
        abi.PROBE.pack(
            n_rows=many.ctypes.data, memory=memory.ctypes.data, result=aligned,
            **{"n_chunks": 1, "chunk_bytes": 0, "vectors": 0} | values,
        )
    )  # fmt: skip
    kernel = kernel_addresses([f"probes.{name}"])[f"probes.{name}"]
    team = Team(n_threads)
    table = np.zeros((1, abi.OP_BYTES // 8), np.int64)
    table[0, :4] = kernel, kernel, arguments.ctypes.data, many.ctypes.data
    assert team.run(table) == 1
    team.close()
    start = aligned - result.ctypes.data
    return result.ravel()[start : start + 64 * n_threads].reshape(n_threads, 64)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_read_probe_reads_every_byte(n_threads):
    memory = np.random.default_rng(1).integers(0, 256, 64 * 1024, np.uint8) & 0x11
    memory[np.random.default_rng(2).integers(0, memory.size, 40)] = 0x80
    found = probe("read", memory, n_threads, n_chunks=16, chunk_bytes=4096)
    assert np.array_equal(np.bitwise_or.reduce(found), np.bitwise_or.reduce(memory.reshape(-1, 64)))


def test_the_dot_probe_forms_products():
    from tinyllm.kernels.probes import SUMS

    memory = np.random.default_rng(1).integers(0, 3, 64 * 64, np.uint8)
    found = probe("dot", memory, 1, vectors=60, n_chunks=2).view(np.float32)
    expected = np.zeros(16)
    for turn, s in itertools.product(range(60 // SUMS), range(SUMS)):
        at = 64 * (turn % 32)
        weights = memory[at : at + 64].reshape(16, 4).astype(int)
        expected += 2 * weights @ memory[at + 4 * s : at + 4 * s + 4].astype(int)
    assert found[0].tolist() == expected.tolist()


def test_the_float_probe_multiplies_and_adds():
    from tinyllm.kernels.probes import SUMS

    memory = np.linspace(0.1, 0.9, 32, dtype=np.float32)
    found = probe("fma", memory, 1, vectors=60, n_chunks=2).view(np.float32)
    chain = np.zeros(16)
    for _ in range(2 * 60 // SUMS):
        chain = chain * memory[:16] + memory[16:]
    assert found[0] == pytest.approx(SUMS * chain, rel=1e-5)


def test_roofs_are_measured_and_the_buffer_given_back():
    team = Team(1)
    prober = Prober(team)
    roofs = prober.measure()
    prober.close()
    team.close()
    assert min(roofs.as_dict().values()) > 0


@pytest.mark.parametrize(("factor", "noisy"), [(1.0, False), (1.05, False), (1.2, True), (0.8, True)])
def test_roofs_that_differ_are_noisy(factor, noisy):
    pair = RoofPair(ROOFS, Roofs(10.0 * factor, 100.0, 50.0))
    assert pair.noisy is noisy
    assert (pair.worst.read_gb_s, pair.best.read_gb_s) == (min(10, 10 * factor), max(10, 10 * factor))


# Traces.


@pytest.fixture(scope="module")
def document(results) -> dict:
    traced = [
        TracedResult("tiny, 2 threads", result.trace, {"page-ins": 0, "compiled": 1.5}) for result in results.values()
    ]
    return trace_document(traced, {"model": "tiny"})


def slices(document: dict, tid: int) -> list[dict]:
    return [event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == tid]


def test_tracks_are_named_in_order(document):
    named = [e for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert [(e["tid"], e["args"]["name"]) for e in named] == [
        (STEPS, "00 steps"), (LAYERS, "01 layers"), (10, "10 worker 0"), (11, "11 worker 1"),
    ]  # fmt: skip
    order = [e["args"]["sort_index"] for e in document["traceEvents"] if e["name"] == "thread_sort_index"]
    assert order == sorted(order)
    assert document["displayTimeUnit"] == "ns" and document["otherData"] == {"model": "tiny"}


def test_slices_are_sorted_and_nest(document):
    timed = [event for event in document["traceEvents"] if "ts" in event]
    keys = [(event["ts"], -event.get("dur", 0)) for event in timed]
    assert keys == sorted(keys) and keys[0][0] == 0
    for tid in {event["tid"] for event in timed}:
        open_slices: list[int] = []
        for event in slices(document, tid):
            start = round(1000 * event["ts"])
            end = start + round(1000 * event["dur"])
            while open_slices and open_slices[-1] <= start:
                open_slices.pop()
            assert not open_slices or end <= open_slices[-1], event
            open_slices.append(end)


def test_workers_show_steps_layers_stages_and_waits(document, results):
    n_ops = sum(not op.done_before for op in next(iter(results.values())).trace.plan.ops)
    n_steps = sum(len(result.trace.steps) for result in results.values())
    for thread in range(N_THREADS):
        names = [event["name"] for event in slices(document, FIRST_WORKER + thread)]
        assert names.count("wait") == n_steps * n_ops
        assert names.count("prefill") + names.count("decode") == n_steps
        assert names.count("layer 0") == names.count("layer 1") == n_steps
        assert {name for name in names if name in STAGES} == STAGES - {PYTHON}
    assert {event["cat"] for event in slices(document, FIRST_WORKER)} == {"prefill", "decode"}


def test_stages_fill_their_step(document):
    for thread in range(N_THREADS):
        track = slices(document, FIRST_WORKER + thread)
        whole = sum(event["dur"] for event in track if event["name"] in ("prefill", "decode"))
        stages = sum(event["dur"] for event in track if event["name"] in STAGES)
        layers = sum(event["dur"] for event in track if event["name"].startswith(("layer ", "outside ")))
        assert stages == pytest.approx(whole) and layers == pytest.approx(whole)


def test_steps_hold_their_ops_and_python(document):
    track = slices(document, STEPS)
    whole = sum(event["dur"] for event in track if event["name"] in ("prefill", "decode"))
    parts = sum(event["dur"] for event in track if event["name"] in ("prepare", "ops", "collect"))
    assert parts == pytest.approx(whole)


def test_numbers_are_on_the_first_worker_only(document, results):
    stages = [event for event in slices(document, FIRST_WORKER) if event["name"] in STAGES]
    assert all({"layer", "kernel", "bytes", "gbs", "gops", "limit"} <= set(event["args"]) for event in stages)
    assert not any("args" in event for event in slices(document, FIRST_WORKER + 1))
    bare = trace_document([TracedResult("t", next(iter(results.values())).trace, {})], {}, with_args=False)
    assert not any("args" in event for event in bare["traceEvents"] if event["ph"] == "X")


def test_tokens_are_chained_once_each(document):
    flows = [event for event in document["traceEvents"] if event["ph"] in "sf"]
    by_id: dict[tuple, list[dict]] = {}
    for event in flows:
        by_id.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
    for pair in by_id.values():
        kinds = [event["ph"] for event in sorted(pair, key=lambda event: event["ts"])]
        assert kinds == ["s", "f"]
        assert all(event["bp"] == "e" for event in pair if event["ph"] == "f")


def test_counters_and_incidents(document):
    assert {e["name"] for e in document["traceEvents"] if e["ph"] == "C"} == {"t/s", "GB/s", "wait %"}
    assert {e["name"] for e in document["traceEvents"] if e["ph"] == "i"} == {"compiled"}


def test_trace_files_are_ascii_json_and_compressed_by_name(results, tmp_path):
    import gzip

    traced = [TracedResult("模型", next(iter(results.values())).trace, {})]
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    write_trace(plain, traced, {"cmd": "tinyllm \x1b"})
    write_trace(packed, traced, {"cmd": "tinyllm \x1b"})
    assert plain.read_bytes().isascii() and b"\x1b" not in plain.read_bytes()
    assert json.loads(plain.read_text()) == json.loads(gzip.decompress(packed.read_bytes()))
