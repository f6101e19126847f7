"""The group of experiments: its table, help and settings, and what all experiments share."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY, clean_environment

from tinyllm.errors import InvalidParameterError
from tinyllm_cli.app import app as _app  # fills the table of subcommands  # noqa: F401
from tinyllm_cli.experiment import ExperimentGroup
from tinyllm_cli.experiment_output import numbers_of
from tinyllm_cli.lazy import make_command

NAMES = list(ExperimentGroup.table)


def test_help_lists_every_experiment_and_loads_none(tmp_path):
    code = (
        "import sys; sys.argv = ['tinyllm', 'experiment', '--help']\n"
        "from tinyllm_cli.main import main\n"
        "try: main()\n"
        "finally: print([m for m in sys.modules if m.startswith(('tinyllm_cli.experiment_', 'numpy', 'rich'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment(tmp_path))
    assert done.stdout.endswith("[]\n"), done.stdout
    for name, experiment in ExperimentGroup.table.items():
        assert re.search(rf"^  {name} +{re.escape(experiment.help[:30])}", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_exists(tinyllm, name):
    command = make_command(name, ExperimentGroup.table[name].load())
    assert command.help, "the function has a docstring"
    done = tinyllm("experiment", name, "--help")
    assert done.returncode == 0 and f"Usage: tinyllm experiment {name}" in done.stdout and done.stderr == ""
    for param in command.params:
        assert all(spelling in done.stdout for spelling in param.opts if param.param_type_name == "option")
    assert "--json" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_is_explained(name):
    text = (REPOSITORY / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert f"tinyllm experiment {name}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["experiment"], "Usage: tinyllm experiment"), (["experiment", "memry"], "Did you mean 'memory'?")],
    ids=["nothing", "unknown"],
)
def test_wrong_usage(tinyllm, arguments, message):
    done = tinyllm(*arguments)
    assert done.returncode == 2 and message in done.stderr + done.stdout


def test_completion_knows_the_experiments(tinyllm):
    def complete(line: str) -> list[str]:
        words = line.split(" ")
        env = {"_TINYLLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        return tinyllm(env=env).stdout.split()

    assert complete("tinyllm experiment ") == NAMES
    assert "--lengths" in complete("tinyllm experiment memory --l")


class TestSettings:
    """Settings reach experiments by names with the group's in front."""

    def lengths(self, tinyllm, **env: str) -> list[int]:
        done = tinyllm("experiment", "memory", "--published", "gpt-3", "--json", env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["lengths"]

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        from bench_model import write_bench_model

        model = write_bench_model(tmp_path / "tiny.gguf")
        self.path = tmp_path / "config/tinyllm/config.toml"
        self.path.parent.mkdir(parents=True)
        self.top = f"model = {json.dumps(str(model))}\n"
        self.path.write_text(self.top)

    def test_the_order_of_places(self, tinyllm):
        self.path.write_text(f"{self.top}[experiment_memory]\nlengths = '100'\n")
        assert self.lengths(tinyllm) == [100]
        assert self.lengths(tinyllm, TINYLLM_LENGTHS="200") == [200]
        assert self.lengths(tinyllm, TINYLLM_LENGTHS="200", TINYLLM_EXPERIMENT_MEMORY_LENGTHS="300") == [300]

    def test_a_wrong_file(self, tinyllm):
        self.path.write_text(f"{self.top}[experiment_memory]\nlength = 1\n")
        done = tinyllm("experiment", "memory")
        assert done.returncode == 1 and "`experiment_memory` has no option 'length'" in done.stderr
        self.path.write_text(f"{self.top}[experiment_memry]\nlengths = 1\n")
        assert "there is no command 'experiment_memry'" in tinyllm("experiment", "memory").stderr

    def test_config_tells_them(self, tinyllm):
        self.path.write_text(f"{self.top}[experiment_memory]\nlengths = '100'\n")
        options = json.loads(tinyllm("config", "--json").stdout)["options"]
        assert {"option": "experiment_memory.lengths", "value": "100", "source": str(self.path)} in options
        # What experiments have in common with other commands is told once.
        assert [row["option"] for row in options if row["option"].endswith("model")] == ["model"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], []),
        (["16"], [16]),
        (["64,16", " 1k, 64"], [16, 64, 1024]),
        (["128K"], [131072]),
    ],
    ids=str,
)
def test_lists_of_numbers(texts, expected):
    assert numbers_of("-l", texts) == expected


@pytest.mark.parametrize("text", ["", "1,", "-1", "1.5", "1m", "9" * 12, "²"], ids=repr)
def test_what_is_no_list_names_the_option(text):
    with pytest.raises(InvalidParameterError, match="--lengths"):
        numbers_of("--lengths", [text])
