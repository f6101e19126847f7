"""The GGUF reader equals the `gguf` package in all that it reads, whatever the file is called."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import gguf_builders as build
import numpy as np
import pytest
from conftest import reference_dir
from gguf_builders import refusal, write

from tinyllm.errors import ModelFileError, ModelNotFoundError
from tinyllm.gguf_file import BLOCK_SIZES, GGMLType, open_gguf


def contents(value: object) -> object:
    """A value in a form that `==` compares."""
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build.write_sample(tmp_path / "model.gguf")


def test_types_are_those_of_the_gguf_package():
    assert {kind.name: kind.value for kind in GGMLType} == {t.name: t.value for t in gguf.GGMLQuantizationType}
    assert dict(gguf.GGML_QUANT_SIZES) == BLOCK_SIZES


def assert_equals_gguf_reader(path: Path) -> None:
    oracle = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        fields = {name: field for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for name, field in fields.items():
            assert contents(file.metadata[name]) == contents(field.contents()), name
        assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
        for tensor in oracle.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(reversed(tensor.shape.tolist()))
            assert ours.type == tensor.tensor_type
            assert (ours.n_bytes, ours.n_elements) == (tensor.n_bytes, tensor.n_elements)
            assert ours.data.tobytes() == tensor.data.tobytes()


def test_equals_gguf_reader(model: Path):
    assert_equals_gguf_reader(model)


@pytest.mark.shared
@pytest.mark.parametrize("folder", ["models", "quants", "tokenizers"])
def test_conformance_files_equal_gguf_reader(folder: str):
    paths = sorted((reference_dir() / "conformance" / folder).glob("*.gguf"))
    assert paths
    for path in paths:
        assert_equals_gguf_reader(path)


SCALAR_VALUES = [
    ("u8", build.U8, "<B", 200),
    ("i8", build.I8, "<b", -100),
    ("u16", build.U16, "<H", 60_000),
    ("i16", build.I16, "<h", -30_000),
    ("u32", build.U32, "<I", 4_000_000_000),
    ("i32", build.I32, "<i", -2_000_000_000),
    ("f32", build.F32, "<f", -0.15625),
    ("u64", build.U64, "<Q", 1 << 63),
    ("i64", build.I64, "<q", -(1 << 62)),
    ("f64", build.F64, "<d", 1e300),
    ("bool", build.BOOL, "<?", True),
]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("kind", "layout", "value"), [row[1:] for row in SCALAR_VALUES], ids=[r[0] for r in SCALAR_VALUES]
)
def test_every_value_type_alone_and_in_arrays(tmp_path: Path, version: int, kind: int, layout: str, value):
    item = struct.pack(layout, value)
    entries = [
        build.entry("alone", kind, item),
        build.entry("array", build.ARRAY, build.array(kind, 3, item * 3)),
        build.entry("none", build.ARRAY, build.array(kind, 0)),
    ]
    with open_gguf(write(tmp_path / "m.gguf", build.forge(entries, version=version))) as file:
        assert file.version == version
        assert file.metadata["alone"] == value
        assert type(file.metadata["alone"]) is type(value)
        assert file.metadata["array"].tolist() == [value] * 3
        assert file.metadata["array"].dtype.itemsize == len(item)
        assert not file.metadata["array"].flags.writeable
        assert file.metadata["none"].tolist() == []


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment_is_honoured(tmp_path: Path, alignment: int):
    path = tmp_path / "m.gguf"
    tensors = {name: np.arange(n, dtype=np.float32) for name, n in (("a", 3), ("b", 50), ("c", 1))}
    build.write_model(path, tensors, alignment=alignment)
    with open_gguf(path) as file:
        for name, values in tensors.items():
            assert file.tensors[name].offset % alignment == 0
            assert np.array_equal(file.tensors[name].data.view(np.float32), values)


def test_strings_with_any_bytes_come_back(tmp_path: Path):
    rng = random.Random(5)
    alphabet = [b"a", b"\0", b"\xff", b"\xe2\x96\x81", b"\xe2\x96", b"\xed\xa0\x80", "😀".encode(), b"\xf0\x9f", b" "]
    for strings in (
        [b"".join(rng.choices(alphabet, k=rng.randrange(6))) for _ in range(3000)],
        [b"".join(rng.choices([a for a in alphabet if a != b"\0"], k=rng.randrange(6))) for _ in range(3000)],
        [b""] * 70_000,
        [b"", b"\0", b""],
        [],
    ):
        tokens = build.array(build.STRING, len(strings), b"".join(map(build.text, strings)))
        entries = [
            build.entry("tokens", build.ARRAY, tokens),
            build.entry("alone", build.STRING, build.text(b"\xff\0a")),
        ]
        with open_gguf(write(tmp_path / "m.gguf", build.forge(entries))) as file:
            decoded = file.metadata["tokens"]
            assert decoded == [string.decode("utf-8", "surrogateescape") for string in strings]
            assert [string.encode("utf-8", "surrogateescape") for string in decoded] == strings
            assert file.metadata["alone"] == "\udcff\0a"


def test_rows_of_matrices_and_of_stacks(model: Path):
    with open_gguf(model) as file:
        table = file.tensors["token_embd.weight"]
        matrix = table.data.view(np.float32).reshape(table.shape)
        assert np.array_equal(table.rows([5, 0, 5]).view(np.float32), matrix[[5, 0, 5]])
        assert table.rows([]).shape == (0, table.row_bytes)
        experts = file.tensors["blk.0.ffn_up_exps.weight"]
        assert experts.row_bytes == 68
        assert np.array_equal(experts.rows([[4]])[0, 0], experts.data.reshape(2, 3, 68)[1, 1])
        for index in (6, -7):
            with pytest.raises(IndexError):
                table.rows([index])


def test_tensor_without_dimensions_is_one_value(tmp_path: Path):
    path = write(tmp_path / "m.gguf", build.forge(tensors=[build.tensor("scale", ())], data=np.float32(2.5).tobytes()))
    with open_gguf(path) as file:
        scale = file.tensors["scale"]
        assert (scale.shape, scale.n_elements, scale.n_bytes, scale.row_bytes) == ((), 1, 4, 4)
        assert scale.data.view(np.float32) == 2.5


def test_tensor_views_cannot_be_written_and_outlive_the_file(model: Path):
    file = open_gguf(model)
    data = file.tensors["token_embd.weight"].data
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    before = data.tobytes()
    file.close()
    assert data.tobytes() == before
    del data
    file.close()
    with pytest.raises(ValueError, match="closed"):
        _ = file.tensors["token_embd.weight"].data


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_release_gives_the_pages_back(tmp_path: Path):
    def mapped_kb() -> int:
        return int(re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    n_bytes = 1 << 25
    tensors = [build.tensor("small"), build.tensor("big", (n_bytes // 4,), offset=32)]
    path = write(tmp_path / "m.gguf", build.forge(tensors=tensors, data=bytes(range(32)) + b"\1" * n_bytes))
    with open_gguf(path) as file:
        untouched = mapped_kb()
        assert file.tensors["big"].data.sum(dtype=np.int64) == n_bytes
        touched = mapped_kb()
        file.tensors["big"].release()
        released = mapped_kb()
        assert touched - untouched > n_bytes // 1024 * 0.9
        assert touched - released > n_bytes // 1024 * 0.9
        assert file.tensors["small"].data.tobytes() == bytes(range(32))
        assert file.tensors["big"].data[-1] == 1


def test_large_vocabulary_opens_fast(tmp_path: Path):
    n = 262_144
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefgh▁你", k=rng.randint(1, 12))) for _ in range(n)]
    entries = [
        build.entry("tokens", build.ARRAY, build.array(build.STRING, n, b"".join(map(build.text, words)))),
        build.entry("scores", build.ARRAY, build.array(build.F32, n, np.arange(n, dtype="<f4").tobytes())),
        build.entry("types", build.ARRAY, build.array(build.I32, n, np.ones(n, "<i4").tobytes())),
    ]
    path = write(tmp_path / "m.gguf", build.forge(entries))
    times = []
    for _ in range(5):
        start = time.process_time()
        with open_gguf(path) as file:
            tokens, scores, types = (file.metadata[key] for key in ("tokens", "scores", "types"))
        times.append(time.process_time() - start)
    assert tokens == words
    assert (scores[-1], types.sum()) == (n - 1, n)
    assert min(times) < 0.5


def test_imports_nothing_slow():
    code = (
        "import sys, tinyllm.gguf_file; print([m for m in ('gguf', 'numba', 'llvmlite', 'rich') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_missing_file(tmp_path: Path):
    assert refusal(tmp_path / "none.gguf", ModelNotFoundError) == "no such file"
    assert refusal(write(tmp_path / "file", b"") / "none.gguf", ModelNotFoundError) == "no such file"


def test_dangling_and_circular_links(tmp_path: Path):
    link, loop = tmp_path / "link.gguf", tmp_path / "loop.gguf"
    link.symlink_to("nowhere.gguf")
    loop.symlink_to(loop)
    assert refusal(link, ModelNotFoundError) == "is a link to 'nowhere.gguf', which does not exist"
    assert refusal(loop).startswith("cannot be read: ")


def test_things_that_are_no_files(tmp_path: Path):
    assert refusal(tmp_path) == "is a folder; name the .gguf file in it"
    os.mkfifo(tmp_path / "fifo")
    assert refusal(tmp_path / "fifo") == "is not an ordinary file"
    assert refusal(Path("/dev/zero")) == "is not an ordinary file"


def test_impossible_names(tmp_path: Path):
    assert refusal(tmp_path / ("x" * 300)).startswith("cannot be read: ")
    with pytest.raises(ModelFileError, match=re.escape("a\\x00b: cannot be read")):
        open_gguf("a\0b")


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
def test_file_without_read_right(model: Path):
    model.chmod(0)
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        assert refusal(model) == "cannot be read: Permission denied"
    finally:
        os.seteuid(me)


@pytest.mark.parametrize(
    "name", ["with space.gguf", "Žluťoučký é.gguf", "模型/м .gguf", "-m.gguf", "~.gguf", "no extension"]
)
def test_file_names(model: Path, tmp_path: Path, name: str):
    path = tmp_path / "names" / name
    path.parent.mkdir(parents=True)
    model.rename(path)
    with open_gguf(str(path)) as file:
        assert file.path == path
        assert file.metadata["general.architecture"] == "llama"
    assert "header: " in refusal(write(path, b"nothing"))


def test_file_name_that_is_no_text_is_shown_escaped(tmp_path: Path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.gguf")
    with pytest.raises(ModelNotFoundError) as caught:
        open_gguf(path)
    assert str(caught.value) == f"{tmp_path}/\\udcff\\n.gguf: no such file"
