"""`tinyllm bench`: lists of tests, every form of output, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from bench_model import N_LAYERS, write_bench_model
from test_bench import LLAMA_BENCH_KEYS, STAGES

from tinyllm.bench import Trial
from tinyllm.errors import InvalidParameterError
from tinyllm_cli import bench_compare, bench_layers, main
from tinyllm_cli.bench_options import Setting, ShowOptions, TestOptions, numbers, settings_of, trials_of
from tinyllm_cli.bench_roofline import HEIGHT

TestOptions.__test__ = False  # pytest takes it for a class of tests


class Output(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return write_bench_model(tmp_path_factory.mktemp("bench") / "tiny.gguf")


@pytest.fixture
def bench(model_path, monkeypatch, capsys, tmp_path) -> Callable[..., Output]:
    """Runs a short `tinyllm bench` on the small model in this process: `bench("--json")`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def call(*arguments: object, model: object = model_path) -> Output:
        line = ["bench", "-m", str(model), *map(str, arguments)]
        for option, value in (("-p", "6"), ("-n", "3"), ("-t", "1"), ("-r", "2")):
            if option not in arguments:
                line += [option, value]
        monkeypatch.setattr(sys, "argv", ["tinyllm", *line])
        return Output(main._run(line), *capsys.readouterr())

    return call


@pytest.fixture
def results_of_json(bench) -> list[dict]:
    return json.loads(bench("--json", "-r", 1).out)


# Lists.


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["512"], [512]),
        (["128,512", "1024"], [128, 512, 1024]),
        (["1-4"], [1, 2, 3, 4]),
        (["0-4096+2048"], [0, 2048, 4096]),
        (["1-64*4"], [1, 4, 16, 64]),
        (["1-9*3, 2"], [1, 3, 9, 2]),
        (["5-4"], []),
    ],
    ids=str,
)
def test_lists_and_ranges(texts, expected):
    assert numbers("-p", texts) == expected


@pytest.mark.parametrize(
    "text", ["", "a", "1,", "-1", "1.5", "1-8/2", "0-8*2", "1-8*1", "1-8+0", "0-99999999", "9" * 30, "²"], ids=repr
)
def test_what_is_no_list_is_refused_with_its_option(text):
    with pytest.raises(InvalidParameterError, match=r"^-p "):
        numbers("-p", [text])


def test_all_combinations_are_run():
    options = TestOptions(
        model=["a", "b"], n_prompt=["8,4"], n_gen=["2,0"], prompt_gen=["8,2"], n_depth=["0,16"], threads=["1-2"]
    )
    assert trials_of(options) == [
        Trial(*numbers) for depth in (0, 16) for numbers in ((8, 0, depth), (4, 0, depth), (0, 2, depth), (8, 2, depth))
    ]
    assert settings_of(options) == [Setting(name, n, 256, "f16") for name in ("a", "b") for n in (1, 2)]


def test_the_defaults_are_those_of_llama_bench():
    assert trials_of(TestOptions()) == [Trial(512, 0), Trial(0, 128)]
    assert settings_of(TestOptions()) == [Setting("smollm2", None, 256, "f16")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "text"), ({"as_json": True}, "json"), ({"output": "md"}, "md"), ({"output": "csv", "as_csv": True}, "csv")],
    ids=str,
)
def test_output_formats(options, expected):
    assert ShowOptions(**options).format == expected


# Output.


def test_json_has_a_row_for_the_prompt_and_one_for_the_tokens(bench):
    result = bench("--json")
    rows = json.loads(result.out)
    assert result.code == 0
    assert [(row["n_prompt"], row["n_gen"], len(row["samples_ts"])) for row in rows] == [(6, 0, 2), (0, 3, 2)]
    assert all(set(row) >= LLAMA_BENCH_KEYS and row["n_threads"] == 1 for row in rows)


def test_jsonl_has_a_line_for_each_row(bench):
    lines = bench("-o", "jsonl", "-n", 0, "-d", "0,8").out.splitlines()
    assert [json.loads(line)["n_depth"] for line in lines] == [0, 8]


def test_layers_in_json_add_up(bench):
    for row in json.loads(bench("--layers", "--json").out):
        whole = row["avg_ns"] / 1e6 / (row["n_gen"] or 1)
        assert sum(entry["ms"] for entry in row["per_layer"]) == pytest.approx(whole, rel=1e-3)
        assert {entry["stage"] for entry in row["per_layer"]} == STAGES
        assert {entry["layer"] for entry in row["per_layer"]} == {None, *range(N_LAYERS)}
        assert set(row["roofs"]) == {"before", "after"}


def test_csv_has_a_row_per_test_or_per_stage_and_layer(bench):
    plain = list(csv.DictReader(io.StringIO(bench("--csv").out)))
    assert [(row["test"], row["n_threads"]) for row in plain] == [("pp6", "1"), ("tg3", "1")]
    layers = list(csv.DictReader(io.StringIO(bench("--csv", "--layers").out)))
    assert {row["stage"] for row in layers} == STAGES
    assert sum(float(row["ms"]) for row in layers if row["test"] == "pp6") == pytest.approx(
        float(next(row["avg_ns"] for row in layers if row["test"] == "pp6")) / 1e6, rel=1e-3
    )


def test_markdown_is_a_table_of_llama_bench(bench):
    lines = bench("--md").out.splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        *("model", "size", "params", "threads", "test", "t/s", "GB/s", "GOP/s")
    ]
    assert set(lines[1]) <= set("|-: ")
    assert ["pp6" in lines[2], "tg3" in lines[3]] == [True, True]
    assert len({len(line) for line in lines[:4]}) == 1


def test_columns_appear_when_they_are_not_the_default(bench):
    header = bench("--md", "-ctk", "f16,f32", "-b", 4, "-n", 0).out.splitlines()[0]
    assert "n_batch" in header and "type_k" in header


def test_plain_text_has_no_escapes_and_fits_80_columns(bench):
    out = bench("--layers", "--roofline").out
    assert "\x1b" not in out
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("stage"))
    end = next(i for i, line in enumerate(lines) if line.startswith("sum"))
    assert {line.split()[0] for line in lines[first + 1 : end]} == STAGES
    assert max(len(line) for line in lines[first : end + 1]) <= 80
    assert any(line.startswith("layers  0 ") for line in lines)
    assert sum(line[9:10] == "|" for line in lines) == HEIGHT
    for words in ("load ", "compile kernels ", "first token after pp6", "tokenizing or sampling"):
        assert words in out


def test_a_trace_is_written(bench, tmp_path):
    result = bench("--trace", tmp_path / "t.json", "--trace-steps", 2)
    document = json.loads((tmp_path / "t.json").read_text())
    assert result.code == 0 and str(tmp_path / "t.json") in result.err
    assert {"model", "cpu", "threads", "roofs", "cmd"} == set(document["otherData"])
    steps = [e for e in document["traceEvents"] if e["name"] in ("prefill", "decode") and e["tid"] == 0]
    assert [step["name"] for step in steps] == ["prefill", "decode", "decode"]


# Comparing.


def test_a_run_is_compared_with_an_earlier_one(bench, tmp_path):
    earlier = tmp_path / "earlier.json"
    rows = json.loads(bench("--layers", "--json").out)
    for row in rows:
        row["avg_ts"] *= 1e-3
        row["stddev_ts"] = 0.0
    earlier.write_text(json.dumps(rows[:1]))
    out = bench("--layers", "--compare", earlier).out
    assert f"compared with {earlier}" in out
    pp, tg = (next(line for line in out.splitlines() if f"thread, {name}" in line) for name in ("pp6: ", "tg3: "))
    assert " x" in pp and "within noise" not in pp
    assert tg.endswith("not in it")


@pytest.mark.parametrize(
    ("before", "now", "noise", "is_noise"), [(100, 101, 2, True), (100, 104, 2, False), (100, 96, 2, False)]
)
def test_a_difference_within_the_noise_of_both_runs(before, now, noise, is_noise):
    assert bench_compare.Change("pp512", before, now, noise).is_noise is is_noise


def test_rows_of_llama_bench_can_be_compared(tmp_path):
    path = tmp_path / "peer.json"
    path.write_text(json.dumps([{"n_prompt": 512, "n_gen": 0, "avg_ts": 100.0}]))
    assert bench_compare.read_earlier(path)[0]["avg_ts"] == 100.0


@pytest.mark.parametrize(
    ("changes", "is_partner"),
    [
        ({}, True),
        ({"model_type": "llama ?B Q8_0"}, True),  # as many parameters
        ({"model_type": "llama 1B Q8_0", "model_n_params": 5}, False),
        ({"n_threads": 2}, False),
        ({"type_k": "q8_0"}, False),
    ],
    ids=str,
)
def test_rows_of_the_same_test_and_model_are_compared(results_of_json, changes, is_partner):
    row = results_of_json[0]
    assert (bench_compare._partner(row, [row | changes]) is not None) is is_partner


def test_an_earlier_run_of_other_tests_is_told_in_one_line(bench, results_of_json, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps([row | {"n_prompt": 7, "n_gen": 7} for row in results_of_json]))
    result = bench("--compare", tmp_path / "x.json", "-r", 1)
    assert result.code == 0 and "compared" not in result.out
    assert result.err == f"nothing is compared: {tmp_path / 'x.json'} has none of these tests of these models\n"


def test_tests_beyond_the_training_are_told_once_for_a_model(bench):
    assert "trained" not in bench("-p", 512, "-n", 0, "-r", 1).err
    assert bench("-p", 500, "-n", 0, "-d", 13, "-r", 1, "-t", "1,2").err.count("trained on contexts of 512 tokens") == 1


# Refusals.


@pytest.mark.parametrize(
    "arguments",
    [
        ("-p", "0", "-n", "0"),
        ("-p", "abc"),
        ("-t", "0"),
        ("-r", "0"),
        ("-pg", "5"),
        ("-ctk", "f64"),
        ("-o", "sql"),
        ("--json", "--csv"),
        ("--json", "--compare", "x.json"),
        ("--compare", "/nonexistent.json"),
        ("--trace-steps", "0"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_code_2(bench, arguments):
    result = bench(*arguments)
    assert result.code == 2 and result.out == ""
    assert "Error: Invalid value" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("content", ["", "{}", "[]", "[1]", '[{"avg_ts": "x"}]', "nonsense"], ids=repr)
def test_what_is_no_earlier_run_is_refused(bench, tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    result = bench("--compare", tmp_path / "x.json")
    assert result.code == 2 and "--compare" in result.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(bench):
    result = bench("--trace", "/dev/full", "-r", 1)
    assert result.code == 1 and result.out  # what was measured is not lost
    assert result.err.splitlines()[-1] == "tinyllm: error: /dev/full: No space left on device"


def test_a_missing_model_is_an_error(bench, tmp_path):
    result = bench(model=tmp_path / "none.gguf")
    assert result.code == 1 and result.err.startswith("tinyllm: error: ")


# Numbers for people.


@pytest.mark.parametrize(
    ("ms", "expected"),
    [(0, "0"), (0.056, "56 µs"), (0.0994, "99 µs"), (0.1, "0.10"), (0.784, "0.78"), (12.34, "12.3"), (1234.5, "1234")],
)
def test_milliseconds_for_people(ms, expected):
    assert bench_layers.milliseconds(ms) == expected
