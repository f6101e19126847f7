"""The command line's frame, and the commands about models: list, pull, show, rm, config."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import clean_environment, reference_dir

from tinyllm.model_info import FILE_TYPES, component_of
from tinyllm.store import files as store
from tinyllm_cli import text
from tinyllm_cli.app import app as _app  # fills the table of subcommands  # noqa: F401
from tinyllm_cli.lazy import LazyGroup, make_command

ESC = "\x1b"
HOSTILE = f"évil{ESC}[31m red\nnext \u202eline"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A tiny mixture of experts with numbers that can be checked by hand, and texts with escape codes in them."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(HOSTILE)
    writer.add_license("mit")
    writer.add_file_type(7)
    writer.add_context_length(10_000)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv([2, 1])
    writer.add_expert_count(4)
    writer.add_expert_used_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(32)])
    writer.add_chat_template("{{ messages }}" + ESC + "[0m\nend")

    def add(name: str, *shape: int, quantized: bool = False) -> None:
        data = np.ones(shape, np.float32)
        if quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)

    add("token_embd.weight", 32, 64, quantized=True)
    add("output_norm.weight", 64)
    for layer in range(2):
        add(f"blk.{layer}.attn_norm.weight", 64)
        add(f"blk.{layer}.attn_q.weight", 64, 64, quantized=True)
        add(f"blk.{layer}.attn_k.weight", 32, 64, quantized=True)
        add(f"blk.{layer}.ffn_gate_inp.weight", 4, 64)
        add(f"blk.{layer}.ffn_up_exps.weight", 4, 96, 64, quantized=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestFrame:
    def test_help_is_quick_and_light(self, tmp_path: Path) -> None:
        code = (
            "import sys; sys.argv = ['tinyllm', '--help']\n"
            "from tinyllm_cli.main import main\n"
            "try: main()\n"
            "finally: print(sorted({'numpy', 'numba', 'rich', 'pydantic', 'huggingface_hub'} & set(sys.modules)))"
        )
        took = []
        for _ in range(5):
            started = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            took.append(time.perf_counter() - started)
        assert done.stdout.endswith("[]\n"), done.stdout
        assert min(took) < 0.3
        assert all(name in done.stdout for name in LazyGroup.table)

    @pytest.mark.parametrize("command", ["list", "config"])
    def test_light_commands_import_no_engine(self, tmp_path: Path, command: str) -> None:
        code = (
            f"import sys; sys.argv = ['tinyllm', '{command}']\n"
            "from tinyllm_cli.main import main\n"
            "try: main()\n"
            "finally: print(sorted({'numpy', 'numba', 'pydantic', 'huggingface_hub'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment(tmp_path)
        )
        assert done.stdout.endswith("[]\n"), done.stdout + done.stderr

    def test_show_needs_no_numba(self, tmp_path: Path, model_file: Path) -> None:
        code = (
            f"import sys; sys.argv = ['tinyllm', 'show', {str(model_file)!r}]\n"
            "from tinyllm_cli.main import main\n"
            "try: main()\n"
            "finally: print(sorted({'numba', 'llvmlite', 'pydantic', 'gguf', 'huggingface_hub'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment(tmp_path)
        )
        assert done.stdout.endswith("[]\n"), done.stdout + done.stderr

    @pytest.mark.parametrize("name", LazyGroup.table)
    def test_every_command_exists(self, tinyllm, name: str) -> None:
        subcommand = LazyGroup.table[name]
        command = make_command(name, subcommand.load())
        assert command.help, "the function has a docstring"
        done = tinyllm(name, "--help")
        assert done.returncode == 0 and f"Usage: tinyllm {name}" in done.stdout and done.stderr == ""
        assert tinyllm(name, "-h").stdout == done.stdout
        for param in command.params:
            assert all(spelling in done.stdout for spelling in param.opts if param.param_type_name == "option")

    def test_version(self, tinyllm) -> None:
        assert re.fullmatch(r"tinyllm \d+\.\d+\.\d+\S*\n", tinyllm("--version").stdout)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["shwo"], "Did you mean 'show'?"),
            (["show", "--nonsense"], "No such option"),
            (["show", "-c", "many"], "Invalid value for '--ctx-size'"),
            (["show", "-c", "-1"], "Invalid value for '--ctx-size'"),
            (["pull"], "Missing argument"),
            ([], "Usage: tinyllm"),
        ],
        ids=["command", "option", "not-a-number", "out-of-range", "missing", "nothing"],
    )
    def test_wrong_usage(self, tinyllm, arguments: list[str], message: str) -> None:
        done = tinyllm(*arguments)
        assert done.returncode == 2
        assert message.replace("'--ctx-size'", "") in done.stderr + done.stdout
        assert "Traceback" not in done.stderr

    def test_an_error_is_one_line(self, tinyllm) -> None:
        done = tinyllm("show", f"no\nsuch{ESC}[31mfile.gguf")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "tinyllm: error: no\\nsuch\\x1b[31mfile.gguf: no such file\n"

    def test_an_unexpected_error_is_one_line(self, tinyllm, tmp_path: Path) -> None:
        code = (
            "import sys; sys.argv = ['tinyllm', 'list']\n"
            "from tinyllm import hub\n"
            "hub.installed = lambda: 1 / 0\n"
            "from tinyllm_cli.main import main; main()"
        )
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, env=clean_environment(tmp_path))
        assert done.returncode == 1
        assert done.stderr == (
            "tinyllm: error: unexpected ZeroDivisionError: division by zero (TINYLLM_TRACEBACK=1 shows where)\n"
        )
        environment = clean_environment(tmp_path) | {"TINYLLM_TRACEBACK": "1"}
        assert "Traceback" in subprocess.run(run, capture_output=True, text=True, env=environment).stderr

    @pytest.mark.parametrize(
        "arguments", ["--help", "--version", "list --help", "list", "show --json MODEL", "show --tensors MODEL"]
    )
    @pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
    def test_closed_pipe(self, arguments: str, buffered: bool, tmp_path: Path, model_file: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        words = [str(model_file) if word == "MODEL" else word for word in arguments.split()]
        command = [sys.executable, *["-u"] * (not buffered), "-m", "tinyllm_cli.main", *words]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=clean_environment(tmp_path))
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, b"")

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
    @pytest.mark.parametrize("arguments", ["--help", "--version", "list", "config"])
    @pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
    def test_full_disk(self, arguments: str, buffered: bool, tmp_path: Path) -> None:
        with open("/dev/full", "w") as full:
            command = [sys.executable, *["-u"] * (not buffered), "-m", "tinyllm_cli.main", arguments]
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, env=clean_environment(tmp_path)
            )
        assert done.returncode == 1
        assert done.stderr.endswith("tinyllm: error: the output cannot be written: No space left on device\n")
        assert done.stderr.count("tinyllm: error:") == 1

    @pytest.mark.parametrize("module", ["typer", "tinyllm_cli.lazy", "tinyllm.hub", "rich.console"])
    def test_ctrl_c_while_modules_are_imported(self, module: str, tmp_path: Path) -> None:
        code = (
            "import signal, sys\n"
            "class Interrupting:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
            "sys.meta_path.insert(0, Interrupting()); sys.argv = ['tinyllm', 'list']\n"
            "from tinyllm_cli.main import main; main()"
        )
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, env=clean_environment(tmp_path))
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

    def test_closed_stdout_and_stderr(self, tmp_path: Path) -> None:
        command = f"{sys.executable} -m tinyllm_cli.main list >&- 2>&-"
        assert subprocess.run(command, shell=True, env=clean_environment(tmp_path)).returncode == 0

    @pytest.mark.parametrize(
        "env",
        [{"LANG": "C"}, {"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
        ids=["LANG=C", "LC_ALL=C", "ascii"],
    )
    def test_any_locale(self, tinyllm, model_file: Path, env: dict[str, str]) -> None:
        done = tinyllm("show", model_file, env=env)
        assert done.returncode == 0 and "évil" in done.stdout, done.stderr

    def test_completion(self, tinyllm, tmp_path: Path) -> None:
        (tmp_path / "store/models").mkdir(parents=True)
        (tmp_path / "store/models/small.gguf").write_bytes(b"GGUF")

        def complete(line: str) -> list[str]:
            words = line.split(" ")
            env = {"_TINYLLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
            return tinyllm(env=env).stdout.split()

        assert complete("tinyllm sh") == ["show"]
        assert set(complete("tinyllm ")) == set(LazyGroup.table)
        assert set(complete("tinyllm show sm")) == {"smollm2", "small"}
        assert "--ctx-size" in complete("tinyllm show --c")
        assert "complete_bash" in tinyllm(env={"_TINYLLM_COMPLETE": "source_bash"}).stdout


class TestTerminal:
    def run_in_terminal(self, tmp_path: Path, *arguments: object, **env: str) -> str:
        """What the command writes to stdout and stderr when both are a terminal."""
        leader, follower = pty.openpty()
        command = [sys.executable, "-m", "tinyllm_cli.main", *map(str, arguments)]
        environment = clean_environment(tmp_path) | {"TERM": "xterm-256color", "COLUMNS": "100"} | env
        process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
        os.close(follower)
        written = b""
        while True:
            try:
                block = os.read(leader, 4096)
            except OSError:  # the last process with the terminal open has ended
                break
            if not block:
                break
            written += block
        os.close(leader)
        process.wait(timeout=30)
        return written.decode()

    def test_colours_only_where_they_are_wanted(self, tmp_path: Path, model_file: Path) -> None:
        assert ESC in self.run_in_terminal(tmp_path, "show", model_file)
        for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            for arguments in (["show", model_file], ["list"], ["--help"], ["show", "nowhere.gguf"], ["shwo"]):
                assert ESC not in self.run_in_terminal(tmp_path, *arguments, **env)

    def test_no_escape_codes_in_pipes(self, tinyllm, model_file: Path) -> None:
        for arguments in ([], ["--json"], ["--metadata"], ["--tensors"], ["--template"]):
            for env in ({"TERM": "xterm-256color"}, {"FORCE_COLOR": "1", "GITHUB_ACTIONS": "true"}):
                done = tinyllm("show", model_file, *arguments, env=env)
                assert done.returncode == 0, done.stderr
                assert ESC not in done.stdout + done.stderr
                assert "\u202e" not in done.stdout or "--json" in arguments

    def test_wide_tables_are_not_cut(self, tinyllm, tmp_path: Path) -> None:
        name = "x" * 150
        (tmp_path / "store/models").mkdir(parents=True)
        (tmp_path / f"store/models/{name}.gguf").write_bytes(b"GGUF")
        assert name in tinyllm("list", env={"COLUMNS": "40"}).stdout
        assert name in self.run_in_terminal(tmp_path, "list", COLUMNS="40").replace("\r\n", "")

    @pytest.mark.parametrize("plain", [False, True], ids=["bar", "plain"])
    def test_progress_of_a_download(self, tmp_path: Path, plain: bool) -> None:
        code = (
            "import time\n"
            "from tinyllm.store.files import Progress\n"
            "from tinyllm_cli import render\n"
            "with render.download_progress() as progress:\n"
            "    progress(Progress('mo[red]del', 0, 0, 'waiting'))\n"
            "    for done in range(0, 101, 20):\n"
            "        progress(Progress('mo[red]del', done * 10**6, 10**8))\n"
            "        time.sleep(0.05)\n"
            "print('answer')"
        )
        script = tmp_path / "script.py"
        script.write_text(code)
        if plain:
            done = subprocess.run([sys.executable, script], capture_output=True, text=True)
            assert done.stdout == "answer\n"
            assert done.stderr == "mo[red]del: waiting\nfetching mo[red]del (100 MB)\n"
        else:
            leader, follower = pty.openpty()
            with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=follower) as process:
                stdout, _ = process.communicate(timeout=30)
            shown = os.read(leader, 1 << 16).decode()
            assert stdout == b"answer\n" and "mo[red]del" in shown and "/100.0 MB" in shown


class TestModels:
    def test_list_of_nothing(self, tinyllm) -> None:
        done = tinyllm("list")
        assert done.stdout.split() == ["NAME", "SIZE", "MODIFIED", "SOURCE"]
        assert "smollm2 (98 MB), gemma3 (253 MB), qwen-0.5b (491 MB), qwen-1.5b (1.1 GB)" in done.stderr

    def test_list(self, tinyllm, tmp_path: Path, model_file: Path) -> None:
        models = tmp_path / "store/models"
        (models / "hub/user/repo").mkdir(parents=True)
        (models / "Ž é 模型.gguf").write_bytes(model_file.read_bytes())
        (models / "hub/user/repo/big-Q4_0-00001-of-00001.gguf").write_bytes(b"x" * 12_345_678)
        (models / "smollm2-135m-instruct-q4_1.gguf.part").write_bytes(b"x" * 1_000_000)
        done = tinyllm("list")
        rows = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()[1:]]
        assert rows[0] == ["user/repo:Q4_0", "12 MB", "just now", "Hugging Face hub"]
        assert rows[1][::3] == ["Ž é 模型", "file"]
        assert "smollm2 is here in part (1.0 MB)" in done.stderr
        answer = json.loads(tinyllm("list", "--json").stdout)
        assert [model["name"] for model in answer["models"]] == ["user/repo:Q4_0", "Ž é 模型"]
        assert answer["models"][0]["size"] == 12_345_678
        assert answer["unfinished"] == {"smollm2": 1_000_000}
        assert answer["available"][0]["name"] == "smollm2"

    def test_rm(self, tinyllm, tmp_path: Path) -> None:
        path = tmp_path / "store/models/own.gguf"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"GGUF")
        done = tinyllm("rm", "own")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "deleted own (4 B)\n")
        assert not path.exists()
        assert tinyllm("rm", "own").returncode == 1

    def test_show_of_what_is_not_here(self, tinyllm) -> None:
        done = tinyllm("show")
        assert done.returncode == 1
        assert "smollm2 is not on this machine yet: fetch it with `tinyllm pull smollm2`" in done.stderr

    def test_pull_without_network(self, tinyllm) -> None:
        env = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": None}
        done = tinyllm("pull", "gemma3", env=env)
        assert (done.returncode, done.stdout) == (1, "")
        last = done.stderr.splitlines()[-1]
        assert last.startswith("tinyllm: error: cannot fetch gemma3") and "check the network" in last


class TestShow:
    def test_summary(self, tinyllm, model_file: Path) -> None:
        done = tinyllm("show", model_file, "-c", "1000")
        assert (done.returncode, done.stderr) == (0, "")
        facts = dict(re.findall(r"^([a-z -]+?) {2,}(.+)$", done.stdout.partition("\n\n")[0], re.MULTILINE))
        assert facts["name"] == "évil\\x1b[31m red\\nnext \\u202eline"
        assert facts["architecture"] == "llama"
        assert facts["quantization"] == "Q8_0"
        assert facts["context"] == "10,000 tokens"
        assert facts["heads"] == "4 of 16, KV 1 to 2"
        assert facts["experts"] == "4, 1 per token"
        assert facts["vocabulary"] == "32"
        assert facts["tokenizer"] == "gpt2, smollm"
        assert facts["chat template"] == "yes"
        assert "output               (the embedding)" in re.sub(r" +\(", "               (", done.stdout)
        assert "MEMORY at 1,000 tokens" in done.stdout

    def test_json(self, tinyllm, model_file: Path) -> None:
        answer = json.loads(tinyllm("show", "-m", model_file, "--json", "--ctx-size", "1000").stdout)
        embedding, attention, experts = 32 * 64, 2 * (64 + 32) * 64, 2 * 4 * 96 * 64
        router, norms = 2 * 4 * 64, 3 * 64
        assert answer["name"] == HOSTILE
        assert answer["parameters"] == embedding + attention + experts + router + norms
        assert answer["active_parameters"] == answer["parameters"] - experts * 3 // 4
        components = {row["name"]: row["parameters"] for row in answer["components"]}
        assert components == {
            "embedding": embedding,
            "attention": attention,
            "experts": experts + router,
            "norms": norms,
        }
        types = {row["name"]: row for row in answer["types"]}
        assert types["Q8_0"]["bits_per_weight"] == 8.5 and types["F32"]["bits_per_weight"] == 32
        assert sum(row["n_bytes"] for row in answer["types"]) == answer["memory"]["weight_bytes"]
        # 3 KV heads in the two layers, keys and values of 16 numbers, 2 bytes each
        assert answer["memory"]["kv_bytes"] == 3 * 2 * 16 * 1000 * 2
        assert answer["n_kv_heads"] == [2, 1] and answer["tied_output"] is True

    def test_default_context_is_bounded(self, tinyllm, model_file: Path) -> None:
        assert json.loads(tinyllm("show", model_file, "--json").stdout)["memory"]["n_ctx"] == 4096

    @pytest.mark.parametrize("more", [[], ["--json"]], ids=["table", "json"])
    def test_an_estimate_beyond_the_training_says_so(self, tinyllm, model_file: Path, more: list[str]) -> None:
        assert tinyllm("show", model_file, "-c", "10000", *more).stderr == ""
        done = tinyllm("show", model_file, "-c", "10001", *more)
        assert done.returncode == 0 and "trained on contexts of 10000 tokens" in done.stderr

    def test_tensors(self, tinyllm, model_file: Path) -> None:
        lines = tinyllm("show", model_file, "--tensors").stdout.splitlines()
        assert len(lines) == 1 + 12
        assert re.split(r" {2,}", lines[1].strip()) == ["token_embd.weight", "32 × 64", "Q8_0", "2.2 KB"]
        rows = json.loads(tinyllm("show", model_file, "--tensors", "--json").stdout)["tensors"]
        assert rows[0] == {"name": "token_embd.weight", "shape": [32, 64], "type": "Q8_0", "n_bytes": 32 * 2 * 34}

    def test_metadata(self, tinyllm, model_file: Path) -> None:
        done = tinyllm("show", model_file, "--metadata").stdout
        assert re.search(r"^llama\.attention\.head_count_kv +\[2, 1\] \(2\)$", done, re.MULTILINE)
        assert '["t0", "t1", "t2", "t3", "t4", "t5", ...] (32)' in done
        answer = json.loads(tinyllm("show", model_file, "--metadata", "--json").stdout)["metadata"]
        assert answer["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(32)]

    def test_template(self, tinyllm, model_file: Path) -> None:
        assert tinyllm("show", model_file, "--template").stdout == "{{ messages }}\\x1b[0m\nend\n"

    def test_metadata_of_the_wrong_kind(self, tinyllm, tmp_path: Path) -> None:
        path = tmp_path / "odd.gguf"
        writer = gguf.GGUFWriter(path, "strange-arch")
        writer.add_string("strange-arch.block_count", "many")
        writer.add_uint64("strange-arch.attention.head_count", 0)
        writer.add_uint64("strange-arch.embedding_length", 1 << 63)
        writer.add_bool("strange-arch.context_length", True)
        writer.add_array("strange-arch.feed_forward_length", ["a", "b"])
        writer.add_uint32("tokenizer.chat_template", 7)
        writer.add_file_type(12345)
        writer.add_tensor("some_tensor", np.zeros((3, 5), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        done = tinyllm("show", path)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(r"^other +1 +15 +60 B +32\.00 +32\.00$", done.stdout, re.MULTILINE)
        answer = json.loads(tinyllm("show", path, "--json").stdout)
        assert answer["architecture"] == "strange-arch" and answer["n_layers"] is None and answer["n_ctx"] is None
        assert tinyllm("show", path, "--template").returncode == 1

    @pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model", b"GGUF\x03\0\0\0" + b"\xff" * 16])
    def test_broken_files(self, tinyllm, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "broken.gguf"
        path.write_bytes(content)
        done = tinyllm("show", path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"tinyllm: error: {path}: ") and done.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("name", "component"),
        [
            ("token_embd.weight", "embedding"),
            ("token_embd_norm.weight", "norms"),
            ("output.weight", "output"),
            ("output_norm.weight", "norms"),
            ("blk.0.attn_output.weight", "attention"),
            ("blk.11.attn_q_norm.weight", "norms"),
            ("blk.0.ffn_norm.weight", "norms"),
            ("blk.0.ffn_down.weight", "ffn"),
            ("blk.0.ffn_down.3.weight", "experts"),
            ("blk.0.ffn_gate_up_exps.weight", "experts"),
            ("blk.0.ffn_up_shexp.weight", "experts"),
            ("blk.0.ffn_gate_inp.weight", "experts"),
            ("blk.0.exp_probs_b.bias", "experts"),
            ("blk.0.ssm_in.weight", "recurrent"),
            ("rope_freqs.weight", "other"),
        ],
    )
    def test_components(self, name: str, component: str) -> None:
        assert component_of(name) == component

    @pytest.mark.shared
    @pytest.mark.parametrize(
        ("name", "numbers"),
        # layers with keys · KV heads · (key + value size)
        [
            ("llama", 2 * 2 * 64),
            ("qwen3next", 1 * 2 * 64),
            ("lfm2", 1 * 2 * 64),
            ("mamba", 0),
            ("bert", 0),
            ("phi3", 2 * 2 * 64),
        ],
    )
    def test_kv_cache_of_architectures(self, tinyllm, name: str, numbers: int) -> None:
        (path,) = (reference_dir() / "conformance").rglob(f"{name}.gguf")
        answer = json.loads(tinyllm("show", path, "-c", "100", "--json").stdout)
        assert answer["memory"]["kv_bytes"] == numbers * 100 * 2

    def test_file_types_are_ggufs(self) -> None:
        named = {value.value: value.name.removeprefix("MOSTLY_").removeprefix("ALL_") for value in gguf.LlamaFileType}
        assert {number: named.get(number) for number in FILE_TYPES} == FILE_TYPES


class TestSettings:
    def config(self, tmp_path: Path, content: str) -> Path:
        path = tmp_path / "config/tinyllm/config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def n_ctx(self, tinyllm, model_file: Path, *arguments: object, **env: str) -> int:
        done = tinyllm("show", *arguments, "--json", env=env)
        return json.loads(done.stdout)["memory"]["n_ctx"]

    def test_the_order_of_places(self, tinyllm, tmp_path: Path, model_file: Path) -> None:
        self.config(tmp_path, f"ctx_size = 100\nmodel = {json.dumps(str(model_file))}\n")
        assert self.n_ctx(tinyllm, model_file) == 100
        self.config(tmp_path, f"ctx_size = 100\nmodel = {json.dumps(str(model_file))}\n[show]\nctx_size = 200\n")
        assert self.n_ctx(tinyllm, model_file) == 200
        assert self.n_ctx(tinyllm, model_file, TINYLLM_CTX_SIZE="300") == 300
        assert self.n_ctx(tinyllm, model_file, TINYLLM_CTX_SIZE="300", TINYLLM_SHOW_CTX_SIZE="400") == 400
        assert self.n_ctx(tinyllm, model_file, "-c", "500", TINYLLM_SHOW_CTX_SIZE="400") == 500

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("ctx_sice = 3", "there is no option 'ctx_sice'"),
            ("[shwo]\nctx_size = 3", "there is no command 'shwo'"),
            ("[show]\nseed = 3", "`show` has no option 'seed'"),
            ("ctx_size = ", "not valid TOML"),
            ("show = 3", "'show' must be a table"),
        ],
    )
    def test_a_wrong_file(self, tinyllm, tmp_path: Path, content: str, message: str) -> None:
        path = self.config(tmp_path, content)
        done = tinyllm("show", "nowhere.gguf")
        assert done.returncode == 1 and done.stderr.startswith(f"tinyllm: error: {path}: {message}")
        assert tinyllm("show", "--help").returncode == 0

    def test_wrong_values_name_their_place(self, tinyllm, tmp_path: Path) -> None:
        done = tinyllm("show", "x.gguf", env={"TINYLLM_CTX_SIZE": "many"})
        assert done.returncode == 2 and "(from TINYLLM_CTX_SIZE)" in done.stderr
        path = self.config(tmp_path, "ctx_size = 'many'")
        done = tinyllm("show", "x.gguf")
        assert done.returncode == 2 and f"(from {path})" in done.stderr

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("ctx_size = true", "true is no number"),
            ("ctx_size = [1, 2]", "a list is not one value"),
            ("model = true", "true is no text"),
            ("json = 1", "1 is neither true nor false"),
            ("[show]\nctx_size = {a = 1}", "{'a': 1} is not one value"),
        ],
    )
    def test_values_of_the_wrong_type(self, tinyllm, tmp_path: Path, content: str, message: str) -> None:
        path = self.config(tmp_path, content)
        done = tinyllm("show", "x.gguf")
        assert done.returncode == 2 and f"{message} (from {path})" in done.stderr

    def test_one_value_serves_an_option_that_others_repeat(self, tinyllm, tmp_path: Path) -> None:
        self.config(tmp_path, "threads = 1\nmodel = 'none.gguf'")
        for command in (["run", "Hi"], ["bench"]):
            assert "no such file" in tinyllm(*command).stderr

    def test_a_named_file_must_exist(self, tinyllm, tmp_path: Path) -> None:
        done = tinyllm("show", "x.gguf", env={"TINYLLM_CONFIG": "/nowhere.toml"})
        assert done.returncode == 1 and "/nowhere.toml: no such file" in done.stderr

    def test_config_tells_what_is_in_force(self, tinyllm, tmp_path: Path) -> None:
        path = self.config(tmp_path, "model = 'qwen-0.5b'\n[show]\nctx_size = 5\n")
        done = tinyllm("config", env={"TINYLLM_TEMPLATE": "1"})
        assert done.returncode == 0, done.stderr
        rows = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]
        assert ["configuration", str(path)] in rows
        assert ["models", str(tmp_path / "store/models")] in rows
        assert ["model", "qwen-0.5b", str(path)] in rows
        assert ["show.ctx_size", "5", str(path)] in rows
        assert ["template", "yes", "TINYLLM_TEMPLATE"] in rows
        assert ["tensors", "no", "default"] in rows
        answer = json.loads(tinyllm("config", "--json").stdout)
        assert {"option": "model", "value": "qwen-0.5b", "source": str(path)} in answer["options"]


class TestText:
    @pytest.mark.parametrize(
        ("n", "shown"),
        [
            *[(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (9949, "9.9 KB"), (9960, "10 KB"), (98_362_432, "98 MB")],
            *[(999_400_000, "999 MB"), (999_900_000, "1.0 GB"), (1_117_320_768, "1.1 GB"), (2.5e12, "2500 GB")],
        ],
    )
    def test_size(self, n: float, shown: str) -> None:
        assert text.size(n) == shown

    @pytest.mark.parametrize(
        ("n", "shown"), [(0, "0"), (999, "999"), (35_136, "35.14 K"), (134_515_008, "134.5 M"), (1.54e9, "1.54 B")]
    )
    def test_count(self, n: float, shown: str) -> None:
        assert text.count(n) == shown

    @pytest.mark.parametrize(
        ("seconds", "shown"),
        [(5, "just now"), (60, "1 minute ago"), (7200, "2 hours ago"), (86400 * 3, "3 days ago"), (4e7, "1 year ago")],
    )
    def test_age(self, seconds: float, shown: str) -> None:
        assert text.age(seconds) == shown

    def test_one_line(self) -> None:
        assert text.one_line("a\nb\tc\x1b\x9b \u202e\u2028é👩‍👧") == "a\\nb\\tc\\x1b\\x9b \\u202e\\u2028é👩‍👧"

    def test_harmless(self) -> None:
        assert text.harmless("a\nb\tc\x1b\r\ud800") == "a\nb\tc\\x1b\\r\\ud800"

    def test_shards(self) -> None:
        assert (store.n_shards("m-00002-of-00003.gguf"), store.n_shards("m.gguf")) == (3, 1)
        assert store.unsharded("m-00002-of-00003.gguf") == "m.gguf"


@pytest.mark.parametrize(
    "command",
    [
        ("trace", "hi", "--html"),
        ("trace", "hi", "--save"),
        ("bench", "--trace"),
        ("perplexity", __file__, "--svg"),
        ("experiment", "languages", "--svg"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
@pytest.mark.parametrize("place", ["no folder", "a directory"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tinyllm, tmp_path, command, place):
    path = tmp_path if place == "a directory" else tmp_path / "nosuch" / "file"
    ran = tinyllm(*command, path, "-m", tmp_path / "model that nobody looks for.gguf")
    assert ran.returncode == 1 and not ran.stdout
    assert len(ran.stderr.splitlines()) == 1 and str(tmp_path) in ran.stderr and "nobody" not in ran.stderr


def test_raw_has_no_template_to_set_things_in(tinyllm, tmp_path):
    for options in (["--think"], ["--chat-template-kwargs", '{"x": 1}']):
        ran = tinyllm("run", "hi", "--raw", *options, "-m", tmp_path / "none.gguf")
        assert ran.returncode == 2 and "--raw" in ran.stderr
