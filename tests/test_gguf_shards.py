"""Models in several files open as one, from any of them, and only if they belong together."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf_builders as build
import numpy as np
import pytest
from gguf_builders import refusal, write

from tinyllm.errors import ModelFileError
from tinyllm.gguf_file import open_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build.write_sample(tmp_path / "model.gguf")


def shard_paths(folder: Path, stem: str = "model", count: int = 3) -> list[Path]:
    return [folder / f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def write_shards(folder: Path, stem: str = "model", prefix: str = "", n_tensors: int = 5) -> list[Path]:
    """Three shards of two tensors each (the last may have one); only the first has the model's metadata."""
    tensors = {f"{prefix}t{i}": np.full(40, i, np.float32) for i in range(n_tensors)}
    build.write_model(folder / f"{stem}.gguf", tensors, {"general.name": stem}, tensors_per_shard=2)
    paths = shard_paths(folder, stem)
    assert all(path.exists() for path in paths)
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_set(tmp_path: Path, given: int):
    paths = write_shards(tmp_path)
    with open_gguf(paths[given]) as file:
        assert file.paths == tuple(paths)
        assert file.path == paths[0]
        assert file.n_bytes == sum(path.stat().st_size for path in paths)
        assert file.metadata["general.name"] == "model"
        assert list(file.tensors) == ["t0", "t1", "t2", "t3", "t4"]
        for i, tensor in enumerate(file.tensors.values()):
            assert np.array_equal(tensor.data.view(np.float32), np.full(40, i, np.float32))


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_shard_is_named(tmp_path: Path, missing: int):
    paths = write_shards(tmp_path)
    paths[missing].unlink()
    for path in paths:
        if path.exists():
            assert f"and '{paths[missing].name}' is missing beside it" in refusal(path)


def test_broken_shard_is_named(tmp_path: Path):
    paths = write_shards(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-200])
    with pytest.raises(ModelFileError, match=f"^{re.escape(str(paths[1]))}: tensor 't"):
        open_gguf(paths[2])


def forged_shard(path: Path, number: int, count: int = 3, total: int = 5, names: str = "", extra: tuple = ()) -> Path:
    entries = [
        build.entry("split.no", build.U16, struct.pack("<H", number)),
        build.entry("split.count", build.U16, struct.pack("<H", count)),
        build.entry("split.tensors.count", build.I32, struct.pack("<i", total)),
        *extra,
    ]
    tensors = [build.tensor(name, offset=32 * i) for i, name in enumerate(names)]
    return write(path, build.forge(entries, tensors, bytes(32 * len(names))))


def test_shard_of_another_model_is_refused(tmp_path: Path):
    paths = write_shards(tmp_path)
    (tmp_path / "other").mkdir()
    sound = paths[1].read_bytes()
    name = build.entry("general.name", build.STRING, build.text("other"))
    cases = {
        "split.tensors.count': 6, where 'model-00001-of-00003.gguf' asks for 5": {
            "number": 1,
            "total": 6,
            "names": "ab",
        },
        "'split.tensors.count': 5, but its 3 shards hold 6 tensors": {"number": 1, "names": "abc"},
        "'split.no': 2, where": {"number": 2, "names": "ab"},
        "'general.name': other, where": {"number": 1, "names": "ab", "extra": (name,)},
        "is not one of 3 shards": {"number": 1, "count": 4, "names": "ab"},
    }
    for message, shard in cases.items():
        forged_shard(paths[1], **shard)
        for given in (paths[0], paths[2]):
            with pytest.raises(ModelFileError, match="model-00") as caught:
                open_gguf(given)
            assert message in str(caught.value)
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(ModelFileError, match=r"'split\.no': 0, where"):
        open_gguf(paths[2])
    paths[1].write_bytes(sound)
    paths[2].write_bytes(write_shards(tmp_path / "other", n_tensors=6)[2].read_bytes())
    with pytest.raises(ModelFileError, match="another model"):
        open_gguf(paths[0])


def test_tensor_in_two_shards_is_refused(tmp_path: Path):
    paths = shard_paths(tmp_path)
    for number, names in enumerate(("ab", "cb", "d")):
        forged_shard(paths[number], number, names=names)
    with pytest.raises(ModelFileError, match="tensor 'b': is in an earlier shard too"):
        open_gguf(paths[0])


def test_renamed_shard_is_refused(tmp_path: Path):
    paths = write_shards(tmp_path)
    assert "must be named ...-00002-of-00003.gguf" in refusal(paths[1].rename(tmp_path / "second.gguf"))
    paths[0].rename(paths[1])
    assert "'split.no': the file is shard 1 of 3, which its name contradicts" in refusal(paths[1])


def test_whole_model_among_shards_is_refused(tmp_path: Path, model: Path):
    paths = write_shards(tmp_path, "set")
    model.rename(paths[0])
    with pytest.raises(ModelFileError, match=r"00001-of-00003\.gguf: is not one of 3 shards"):
        open_gguf(paths[1])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00003.gguf"])
def test_shards_joined_by_cat_are_recognised(tmp_path: Path, order: tuple[int, ...], name: str):
    parts = [path.read_bytes() for path in write_shards(tmp_path)]
    path = write(tmp_path / name, b"".join(parts[i] for i in order))
    assert "tensor data: another GGUF file begins at byte" in refusal(path)


def test_joined_after_a_first_shard_without_tensors(tmp_path: Path):
    first = forged_shard(tmp_path / "first", 0, count=2, total=1).read_bytes()
    second = forged_shard(tmp_path / "second", 1, count=2, total=1, names="t").read_bytes()
    assert "as when `cat` joins shards" in refusal(write(tmp_path / "m.gguf", first + second))


@pytest.mark.parametrize(
    ("field", "kind", "payload"),
    [
        ("split.count", build.STRING, build.text("3")),
        ("split.count", build.I32, struct.pack("<i", -3)),
        ("split.count", build.F32, struct.pack("<f", 3)),
        ("split.no", build.BOOL, b"\1"),
        ("split.no", build.STRING, build.text("1")),
        ("split.tensors.count", build.I32, struct.pack("<i", -1)),
        ("split.tensors.count", None, b""),
    ],
)
def test_senseless_split_values_are_refused(tmp_path: Path, field: str, kind: int | None, payload: bytes):
    values = {
        "split.no": build.entry("split.no", build.U16, b"\0\0"),
        "split.count": build.entry("split.count", build.U16, b"\3\0"),
        "split.tensors.count": build.entry("split.tensors.count", build.I32, build.u32(5)),
    }
    del values[field]
    entries = [*values.values(), *([] if kind is None else [build.entry(field, kind, payload)])]
    assert f"key '{field}': must be a whole number" in refusal(write(shard_paths(tmp_path)[0], build.forge(entries)))


@pytest.mark.parametrize("count", [2**16 - 1, 2**60])
def test_huge_shard_counts_are_refused_at_once(tmp_path: Path, count: int):
    entries = [
        build.entry("split.no", build.U16, b"\0\0"),
        build.entry("split.count", build.U64, struct.pack("<Q", count)),
        build.entry("split.tensors.count", build.I32, build.u32(5)),
    ]
    path = write(tmp_path / "m-00001-of-65535.gguf", build.forge(entries))
    assert "is shard 1 of" in refusal(path)


def test_one_shard_of_one_is_a_model(tmp_path: Path):
    path = forged_shard(tmp_path / "m.gguf", 0, count=1, total=2, names="ab")
    with open_gguf(path) as file:
        assert list(file.tensors) == ["a", "b"]
