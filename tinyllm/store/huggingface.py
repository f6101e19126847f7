"""GGUF repositories of the Hugging Face hub: `user/repo[:QUANT]` goes in, the files of one quantization come out.

Names, tokens and connections are huggingface_hub's, which honours HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and HF_HOME. It
starts interrupted downloads anew, so the transfer itself is ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from tinyllm.errors import DownloadError, ModelNotFoundError
from tinyllm.store.files import Progress, ProgressCallback, check_space, n_shards, sha256_of, unsharded
from tinyllm.store.transfer import download

PREFERRED = ("Q4_K_M", "Q4_0", "Q4_K_S", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "Q5_K_M", "Q6_K", "Q8_0")
"""Which quantization is taken when none is asked for: the first of these that there is, else the first file."""

_REFERENCE = re.compile(
    r"(?:hf:(?://)?|(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:/(?:blob|resolve)/[^/]+/(?P<file>[^?#]+\.gguf)(?:\?.*)?|/tree/[^/]+/?|/|:(?P<quant>[^:/]+))?"
)
_QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|FP16|FP32|MXFP4\w*))$", re.IGNORECASE)
_NOT_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True)
class HubReference:
    """What a user typed: a repository, and perhaps the quantization (or the file's name) wanted from it."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def parse_reference(text: str) -> HubReference | None:
    """`user/repo[:QUANT]`, perhaps with `hf:` or `hf.co/` in front, or the web address of a repository or a file."""
    match = _REFERENCE.fullmatch(text.strip())
    return HubReference(match["repo"], match["quant"] or match["file"]) if match else None


def quant_of(filename: str) -> str | None:
    """`Q4_K_M` from `Model-7B-Q4_K_M-00001-of-00003.gguf`; None when the name does not end in a format's name."""
    match = _QUANT.search(PurePosixPath(unsharded(filename)).stem)
    return match[1].upper() if match else None


def choose(filenames: Iterable[str], quant: str | None) -> list[str]:
    """The files (one, or all shards in order) of the quantization asked for, compared without regard to case.

    `filenames` are paths in the repository. Empty when nothing fits.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(filenames):
        if name.lower().endswith(".gguf") and not _NOT_MODELS.search(PurePosixPath(name).name):
            models.setdefault(unsharded(name), []).append(name)
    if quant is None:
        by_quant = {quant_of(name): files for name, files in reversed(models.items())}
        return next((by_quant[q] for q in PREFERRED if q in by_quant), next(iter(models.values()), []))
    wanted = quant.casefold()
    for same in (_names_file, _is_quant, _ends_with):
        for name, files in models.items():
            if same(name, files, wanted):
                return files
    return []


def _names_file(name: str, files: list[str], wanted: str) -> bool:
    spellings = {
        s.casefold() for path in (name, *files) for s in (path, PurePosixPath(path).name, PurePosixPath(path).stem)
    }
    return wanted in spellings


def _is_quant(name: str, files: list[str], wanted: str) -> bool:
    return (quant_of(name) or "").casefold() == wanted


def _ends_with(name: str, files: list[str], wanted: str) -> bool:
    return re.search(rf"(?:^|[-._]){re.escape(wanted)}$", PurePosixPath(name).stem.casefold()) is not None


def cached(reference: HubReference) -> Path | None:
    """A file of the repository that another program has left in Hugging Face's own cache, if it is there in full."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = "models--" + reference.repo.replace("/", "--")
    repos = [path for path in Path(HF_HUB_CACHE).glob("models--*") if path.name.casefold() == folder.casefold()]
    snapshots = [path for repo in repos for path in (repo / "snapshots").glob("*")]
    for snapshot in sorted(snapshots, key=lambda path: path.stat().st_mtime, reverse=True):
        files = choose((str(p.relative_to(snapshot).as_posix()) for p in snapshot.rglob("*.gguf")), reference.quant)
        if files and len(files) == n_shards(files[0]):
            return snapshot / files[0]
    return None


def fetch(reference: HubReference, folder: Path, report: ProgressCallback) -> Path:
    """Download one quantization of a repository below `folder`; returns its (first) file. The caller holds the lock.

    An interrupted download is continued by the next call; until a file is complete it has no name of its own.

    Raises:
        ModelNotFoundError: no such repository, or nothing in it fits; the message lists what there is.
        DownloadError: the hub cannot be reached, refuses, or sends other bytes than it announced.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # it reports about the machine in each request
    import huggingface_hub

    name = str(reference)
    with _explained(reference):
        info = huggingface_hub.HfApi().model_info(reference.repo, files_metadata=True, timeout=15)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
        files = choose(siblings, reference.quant)
        if not files:
            raise ModelNotFoundError(_nothing_fits(reference, siblings))
        if len(files) != n_shards(files[0]):
            raise ModelNotFoundError(
                f"{name}: the repository lacks shards of {files[0]} ({len(files)} of {n_shards(files[0])})"
            )
        target = folder / info.id
        target.mkdir(parents=True, exist_ok=True)
        sizes = [siblings[file].size or 0 for file in files]
        check_space(folder, sum(sizes) - _bytes_there(target), name)
        done, total = 0, sum(sizes)
        for file, size in zip(files, sizes, strict=True):

            def told(n: int, note: str = "", before: int = done) -> None:
                report(Progress(name, before + n, total, note))

            checking = partial(told, note="checking")

            sha256 = siblings[file].lfs.sha256 if siblings[file].lfs else None
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if not (path.is_file() and path.stat().st_size == size and sha256_of(path, checking) == sha256):
                told(0)
                url = huggingface_hub.hf_hub_url(info.id, file, revision=info.sha)
                download(partial(_open_from, url), path, size, sha256, told, checking)
            done += size
    return target / files[0]


@contextmanager
def _open_from(url: str, offset: int) -> Iterator[tuple[bool, Iterable[bytes]]]:
    """Open a file of the hub at an offset, with the user's token; see `transfer.OpenFrom`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers(library_name="tinyllm") | {"Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        yield response.status_code == 206, response.iter_bytes()


def _bytes_there(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _nothing_fits(reference: HubReference, filenames: Iterable[str]) -> str:
    models = dict.fromkeys(unsharded(f) for f in filenames if f.lower().endswith(".gguf") and not _NOT_MODELS.search(f))
    if not models:
        return f"{reference.repo}: this repository holds no GGUF file; look for one whose name ends in -GGUF"
    have = ", ".join(dict.fromkeys(quant_of(name) or PurePosixPath(name).name for name in models))
    return f"{reference.repo}: no {reference.quant} here; there are {have}"


@contextmanager
def _explained(reference: HubReference) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP client raise into one line that says what to do."""
    from huggingface_hub import constants, errors

    try:
        yield
    except (ModelNotFoundError, DownloadError):
        raise
    except errors.OfflineModeIsEnabled:
        raise DownloadError(f"{reference} is not on this machine, and HF_HUB_OFFLINE forbids fetching it") from None
    except errors.GatedRepoError:
        raise DownloadError(
            f"{reference.repo} is gated: accept its terms at {constants.ENDPOINT}/{reference.repo} and set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{reference.repo}: no such file, catalogue name or repository on the hub (a private one needs HF_TOKEN)"
        ) from None
    except errors.HfHubHTTPError as error:
        raise DownloadError(f"{reference}: {constants.ENDPOINT} answered: {_first_line(error)}") from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{reference}: {_first_line(error)}") from error
    except Exception as error:  # the HTTP client's own family differs between versions of huggingface_hub
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise DownloadError(f"{reference}: cannot be written: {error}") from error
        raise DownloadError(
            f"cannot fetch {reference}: {constants.ENDPOINT} cannot be reached ({_first_line(error)}); "
            "check the network, or give the path of a GGUF file"
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
