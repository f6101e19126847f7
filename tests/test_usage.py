"""Command lines that cannot be meant: each is refused in one line that names the option, before a model is loaded."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tinyllm.store import wheels
from tinyllm_cli import main, outputs
from tinyllm_cli.app import app as _app  # fills the table of subcommands  # noqa: F401
from tinyllm_cli.experiment import ExperimentGroup
from tinyllm_cli.lazy import LazyGroup, make_command, with_option


class Output(NamedTuple):
    code: int
    out: str
    err: str


class Keyboard(io.StringIO):
    """Standard input where nobody types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path) -> Callable[..., Output]:
    """Runs a command line in this process, in an empty folder with an empty store: `cli("show -c many")`."""
    monkeypatch.setenv("TINYLLM_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "stdin", Keyboard())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda line: Output(main._run(line if isinstance(line, list) else line.split()), *capsys.readouterr())


def error(result: Output) -> str:
    """The line of an error, which is all that was told but for the usage before it."""
    assert result.out == "" and "Traceback" not in result.err
    line = result.err.splitlines()[-1]
    assert line.startswith(("Error: ", "tinyllm: error: "))
    return line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("perplexity text.txt --full -w 512", "--window has no effect with --full"),
        ("tokenize a --compare x y -m z", "--model has no effect with --compare"),
        ("tokenize a --ids --json", "--ids has no effect with --json"),
        ("show a.gguf -m b.gguf", "--model has no effect beside a.gguf"),
        ("show a.gguf --template --tensors", "choose one of --template"),
        ("show a.gguf --template -c 3", "--ctx-size has no effect"),
        ("embed --neighbours cat -t 2", "--threads has no effect on the embedding table"),
        ("embed --analogy a b c --no-normalize -t 1", "--no-normalize and --threads have no effect"),
        ("embed a b --similarity --no-normalize", "--no-normalize has no effect with --similarity"),
        ("bench --trace-steps 3", "--trace-steps has no effect without --trace"),
        ("bench --no-trace-args", "--no-trace-args has no effect without --trace"),
        ("bench --roofline --json", "--roofline has no effect with -o json"),
        ("trace a --json --lang zh", "--lang has no effect with --json"),
    ],
)
def test_options_without_effect(cli, line, message):
    Path("text.txt").write_text("text")
    result = cli(line)
    assert result.code == 2 and message in error(result)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("kv_type 'x' is unknown", "--cache-type 'x' is unknown"),
        ("n_ctx must be more", "--ctx-size must be more"),
        ("logit_bias of token 5", "--logit-bias of token 5"),
        ("prompt must be read", "prompt must be read"),
        ("the seed must be 1", "the seed must be 1"),
        ("max_depth of layers", "max_depth of layers"),
    ],
)
def test_messages_of_the_engine_name_options(message, told):
    command = make_command("run", LazyGroup.table["run"].load())
    assert with_option(message, command) == told
    perplexity = make_command("perplexity", LazyGroup.table["perplexity"].load())
    assert with_option("n_ctx must be more", perplexity) == "--window must be more"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["run", ""], "there is no prompt"),
        (["trace", ""], "there is no prompt"),
        (["trace", "  "], "there is no prompt"),
        (["experiment", "sampling", ""], "there is no prompt: give it as an argument or on standard input"),
        (["embed"], "there is no text: give it as an argument or on standard input"),
        (["tokenize"], "there is no text"),
    ],
)
def test_missing_texts(cli, line, message):
    result = cli(line)
    assert result.code == 2 and message in error(result)


TEXTS = {"run": "a", "trace": "a", "perplexity": "text.txt", "tokenize": "a", "embed": "a", "experiment_sampling": "a"}


def commands() -> dict[str, object]:
    """Every command by its words: `run`, `experiment cache`."""
    found = {name: make_command(name, command.load()) for name, command in LazyGroup.table.items()}
    del found["experiment"]
    return found | {
        f"experiment {n}": make_command(f"experiment_{n}", c.load()) for n, c in ExperimentGroup.table.items()
    }


@pytest.mark.parametrize("name", ["nosuch", "./none.gguf", "folder", "text.txt"])
def test_models_that_cannot_be_opened_are_errors_of_every_command(cli, name):
    Path("text.txt").write_text("text")
    Path("folder").mkdir()
    for words, command in commands().items():
        if any("--model" in param.opts for param in command.params):
            result = cli([*words.split(), *filter(None, [TEXTS.get(command.name)]), "-m", name])
            assert (words, result.code) == (words, 1) and name.removeprefix("./") in error(result)


def test_settings_that_do_not_apply_are_no_mistake(cli, monkeypatch, tmp_path):
    """`window` in the file is for calls without --full: this one fails for another reason."""
    (tmp_path / "config/tinyllm").mkdir(parents=True)
    (tmp_path / "config/tinyllm/config.toml").write_text("window = 64")
    Path("text.txt").write_text("text")
    result = cli("perplexity text.txt --full -m none.gguf")
    assert result.code == 1 and "none.gguf" in error(result)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trace a --html same --save ./same", "--save ./same would overwrite --html"),
        ("trace -f text.txt --html text.txt", "--html text.txt would overwrite a file that is read"),
        ("trace a -m text.txt --save link.txt", "--save link.txt would overwrite a file"),
        ("perplexity text.txt --svg text.txt", "--svg text.txt would overwrite a file"),
        ("bench --compare text.txt --trace text.txt", "--trace text.txt would overwrite a file"),
        ("experiment languages -f en=text.txt --svg text.txt", "--svg text.txt would overwrite a file"),
    ],
)
def test_outputs_overwrite_nothing(cli, line, message):
    Path("text.txt").write_text("text")
    Path("link.txt").symlink_to("text.txt")
    result = cli(line)
    assert result.code == 2 and message in error(result)
    assert Path("text.txt").read_text() == "text"


def test_all_outputs_are_known():
    params = [param for command in commands().values() for param in command.params]
    found = {param.name for param in params if (param.help or "").startswith("Write ")}
    assert found == set(outputs.OUTPUTS)
    assert set(outputs.INPUTS) <= {param.name for param in params}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(cli):
    model = next((Path(__file__).parent / "data/architectures").glob("olmo*.gguf"))
    result = cli(["experiment", "memory", "-m", str(model), "--svg", "/dev/full", "--json"])
    assert result.code == 1
    assert result.err.splitlines()[-1] == "tinyllm: error: /dev/full: No space left on device"


@pytest.mark.parametrize("line", ["pull smollm2", "run -m smollm2 Hi"])
def test_a_disk_that_a_download_fills_is_named(cli, monkeypatch, tmp_path, line):
    def fetch(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wheels, "fetch", fetch)
    result = cli(line)
    assert result.code == 1
    place = tmp_path / "store/models"
    assert error(result) == f"tinyllm: error: smollm2: {place} cannot be written: No space left on device"
