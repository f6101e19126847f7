"""The engine as a whole on tiny random models: against a float64 NumPy forward pass, and against itself."""

from __future__ import annotations

import _thread
import os
import threading
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

import tinyllm
from tests import numpy_llama
from tinyllm.errors import (
    ContextFullError,
    InvalidParameterError,
    ModelFileError,
    TinyLLMError,
    UnsupportedModelError,
)
from tinyllm.gguf_file import open_gguf

EPS, VOCAB = 1e-3, 160
PROMPT = np.random.default_rng(5).integers(0, VOCAB, 90).tolist()


def write_llama(
    path: Path,
    kind: str = "F32",
    *,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=32,
    n_embd=192,
    n_ff=160,
    tied=False,
    **metadata,
) -> dict[str, np.ndarray]:
    """A random llama whose matrices have ggml type `kind`; its tensors as float32, after quantization."""
    rng = np.random.default_rng(1)
    shapes = {"token_embd.weight": (VOCAB, n_embd)} | ({} if tied else {"output.weight": (VOCAB, n_embd)})
    for i in range(n_layers):
        shapes |= {
            f"blk.{i}.attn_q.weight": (n_heads * head_dim, n_embd),
            f"blk.{i}.attn_k.weight": (n_kv_heads * head_dim, n_embd),
            f"blk.{i}.attn_v.weight": (n_kv_heads * head_dim, n_embd),
            f"blk.{i}.attn_output.weight": (n_embd, n_heads * head_dim),
            f"blk.{i}.ffn_gate.weight": (n_ff, n_embd),
            f"blk.{i}.ffn_up.weight": (n_ff, n_embd),
            f"blk.{i}.ffn_down.weight": (n_embd, n_ff),
        }
    tensors = {name: (rng.normal(size=s) / np.sqrt(s[1])).astype(np.float32) for name, s in shapes.items()}
    norms = ["output_norm.weight"] + [f"blk.{i}.{n}_norm.weight" for i in range(n_layers) for n in ("attn", "ffn")]
    tensors |= {name: rng.uniform(0.5, 1.5, n_embd).astype(np.float32) for name in norms}
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "block_count": n_layers,
        "context_length": 512,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    } | metadata
    for key, value in values.items():
        if value is not None:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", EPS)
    type_ = gguf.GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        if name in norms or kind == "F32":
            writer.add_tensor(name, tensor)
            continue
        packed = gguf.quants.quantize(tensor, type_)
        writer.add_tensor(name, packed, raw_dtype=type_)
        tensors[name] = gguf.quants.dequantize(packed, type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def reference(tensors: dict[str, np.ndarray], ids: list[int] = PROMPT, **shape) -> np.ndarray:
    return numpy_llama.logits(ids, tensors, **{"n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "eps": EPS} | shape)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2)) / want.std())


@pytest.fixture(scope="module")
def q4_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "q4.gguf"
    write_llama(path, "Q4_0")
    with tinyllm.load(path, n_threads=2) as model:
        yield model


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("F32", 1e-5), ("F16", 1e-5), ("BF16", 1e-5), ("Q8_0", 0.03), ("Q4_0", 0.03), ("Q4_1", 0.03), ("Q5_0", 0.03)],
)
def test_logits_equal_the_reference(tmp_path, kind, limit):
    tensors = write_llama(tmp_path / "m.gguf", kind)
    with tinyllm.load(tmp_path / "m.gguf", kv_type="f32") as model:
        assert relative_error(model.logits(PROMPT), reference(tensors)) < limit


@pytest.mark.parametrize(
    "shape",
    [
        {"n_heads": 1, "n_kv_heads": 1, "head_dim": 16},
        {"n_heads": 7, "n_kv_heads": 1, "head_dim": 24, "n_embd": 168},
        {"n_heads": 5, "n_kv_heads": 5, "head_dim": 64, "n_ff": 37},
        {"n_heads": 70, "n_kv_heads": 1, "head_dim": 8, "n_embd": 40},
    ],
    ids=str,
)
def test_odd_shapes(tmp_path, shape):
    tensors = write_llama(tmp_path / "m.gguf", **shape)
    heads = {key: shape[key] for key in ("n_heads", "n_kv_heads")}
    with tinyllm.load(tmp_path / "m.gguf", kv_type="f32") as model:
        assert relative_error(model.logits(PROMPT), reference(tensors, **heads)) < 1e-5


def test_a_tied_model_uses_its_embedding_as_output(tmp_path):
    tensors = write_llama(tmp_path / "m.gguf", tied=True)
    with tinyllm.load(tmp_path / "m.gguf", kv_type="f32") as model:
        assert relative_error(model.logits(PROMPT), reference(tensors)) < 1e-5


def test_a_half_precision_cache_is_close(tmp_path):
    tensors = write_llama(tmp_path / "m.gguf")
    with tinyllm.load(tmp_path / "m.gguf", kv_type="f16") as model:
        assert relative_error(model.logits(PROMPT), reference(tensors)) < 5e-3


@pytest.mark.parametrize("chunks", [[90], [1] * 90, [89, 1], [31, 1, 1, 33, 24], [64, 26]], ids=lambda c: f"{len(c)}")
def test_chunks_do_not_change_a_bit(q4_model, chunks):
    whole = q4_model.logits(PROMPT)
    sequence, rows, at = q4_model.new_sequence(), [], 0
    for size in chunks:
        rows.append(sequence.evaluate(PROMPT[at : at + size], want="all"))
        at += size
    assert np.array_equal(np.concatenate(rows), whole)


def test_threads_and_batch_size_do_not_change_a_bit(q4_model):
    whole = q4_model.logits(PROMPT)
    for options in ({"n_threads": 1}, {"n_threads": 3}, {"n_batch": 7}):
        with tinyllm.load(q4_model.path, **options) as other:
            assert np.array_equal(other.logits(PROMPT), whole), options


def test_logits_that_somebody_keeps_stay_what_they_were(q4_model):
    ids = list(range(3, 11))
    expected = q4_model.logits(ids)
    sequence = q4_model.new_sequence()
    kept = [sequence.evaluate([token]) for token in ids[:4]]
    views = [memoryview(sequence.evaluate([token])[-1, 5:]) for token in ids[4:]]
    assert np.array_equal(np.concatenate(kept), expected[:4])
    assert np.array_equal(np.array(views), expected[4:, 5:])
    del kept, views
    # Memory that nobody looks at any more is used again.
    assert len({sequence.evaluate([token]).ctypes.data for token in ids}) == 1
    sequence.release()


def test_a_long_context_crosses_partitions(tmp_path):
    ids = np.random.default_rng(3).integers(0, VOCAB, 400).tolist()
    tensors = write_llama(tmp_path / "m.gguf")
    with tinyllm.load(tmp_path / "m.gguf", kv_type="f32") as model:
        whole = model.logits(ids)
        assert relative_error(whole, reference(tensors, ids)) < 1e-5
        sequence = model.new_sequence()
        sequence.evaluate(ids[:-1])
        assert np.array_equal(sequence.evaluate(ids[-1:])[0], whole[-1])


def test_truncate_and_fork_leave_the_other_sequence_alone(q4_model):
    whole = q4_model.logits(PROMPT)
    first = q4_model.new_sequence()
    first.evaluate(PROMPT[:70])
    second = first.fork()
    second.truncate(40)
    second.evaluate([1, 2, 3])  # writes into what were shared pages
    assert np.array_equal(first.evaluate(PROMPT[70:], want="all"), whole[70:])
    second.truncate(40)
    assert np.array_equal(second.evaluate(PROMPT[40:], want="all"), whole[40:])


def test_released_pages_come_back(q4_model):
    free = q4_model.cache.n_free
    for _ in range(5):
        sequence = q4_model.new_sequence()
        sequence.evaluate(PROMPT)
        sequence.fork()
        sequence.release()
    assert q4_model.cache.n_free == free


def test_the_context_is_a_limit_with_both_numbers(tmp_path):
    write_llama(tmp_path / "m.gguf")
    with tinyllm.load(tmp_path / "m.gguf", n_ctx=64) as model:
        sequence = model.new_sequence()
        sequence.evaluate(PROMPT[:60])
        with pytest.raises(ContextFullError, match=r"65 tokens do not fit into the context of 64"):
            sequence.evaluate(PROMPT[:5])
        assert len(sequence) == 60
        assert sequence.evaluate(PROMPT[:4]).shape == (1, VOCAB)


def test_ids_outside_the_vocabulary_are_refused(q4_model):
    for ids in ([VOCAB], [-1], []):
        with pytest.raises(InvalidParameterError):
            q4_model.new_sequence().evaluate(ids)


@pytest.mark.parametrize("options", [{"n_threads": 0}, {"n_ctx": -5}, {"n_batch": 0}, {"kv_type": "q3"}], ids=str)
def test_bad_options_are_refused_by_name(q4_model, options):
    with pytest.raises(InvalidParameterError, match=next(iter(options))):
        tinyllm.load(q4_model.path, **options)


def test_ctrl_c_ends_a_long_prefill_and_leaves_the_sequence_whole(tmp_path):
    write_llama(tmp_path / "m.gguf", n_layers=24, n_embd=512, n_ff=2048)
    ids = np.random.default_rng(2).integers(0, VOCAB, 480).tolist()
    with tinyllm.load(tmp_path / "m.gguf") as model:
        sequence = model.new_sequence()
        sequence.evaluate(ids[:20])
        threading.Timer(0.05, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            while True:  # until the timer has fired
                sequence.evaluate(ids[20:])
                sequence.truncate(20)
        sequence.truncate(20)
        again = sequence.evaluate(ids[20:])
        assert np.array_equal(again[0], model.logits(ids)[-1])


def test_waiting_uses_no_cpu(q4_model):
    q4_model.logits(PROMPT)
    time.sleep(0.1)  # workers may look around for a moment before they park
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_go_on(q4_model):
    whole = q4_model.logits(PROMPT)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(q4_model.logits(PROMPT), whole) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_infinite_weights_are_reported_by_name(tmp_path, caplog):
    write_llama(tmp_path / "m.gguf", "Q8_0")
    with open_gguf(tmp_path / "m.gguf") as file:
        offset = file.tensors["blk.1.ffn_down.weight"].offset
    with open(tmp_path / "m.gguf", "r+b") as file:
        file.seek(offset)
        file.write(np.float16(np.inf).tobytes())
    with tinyllm.load(tmp_path / "m.gguf"):
        assert [r.getMessage() for r in caplog.records if "infinite" in r.getMessage()] == [
            "tensor blk.1.ffn_down.weight has infinite or NaN weights: answers will be broken"
        ]


def test_a_closed_model_says_so(q4_model):
    model = tinyllm.load(q4_model.path, n_threads=2)
    sequence = model.new_sequence()
    sequence.evaluate(PROMPT)
    model.close()
    with pytest.raises(TinyLLMError, match="closed"):
        sequence.evaluate([1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_in_the_middle_of_a_run_is_told(q4_model):
    with tinyllm.load(q4_model.path, n_threads=2) as model, model.team.steps:
        child = os.fork()
        if child == 0:
            try:
                model.logits(PROMPT)
            except TinyLLMError as error:
                os._exit(0 if "load it again in the child" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.logits("abc"),
        lambda model: model.logits([[1, 2]]),
        lambda model: model.new_sequence().evaluate([1], want="bogus"),
        lambda model: model.new_sequence().truncate(-1),
        lambda model: tinyllm.load(None),
        lambda model: tinyllm.load(5),
    ],
    ids=["text", "nested", "want", "truncate", "none", "number"],
)
def test_odd_arguments_are_refused(q4_model, call):
    with pytest.raises(InvalidParameterError):
        call(q4_model)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.head_count": 0}, "head_count"),
        ({"attention.head_count_kv": 4}, "head_count_kv 4 does not divide 6"),
        ({"block_count": 3}, r"blk\.2\..* is missing"),
        ({"embedding_length": 200}, "has shape"),
        ({"block_count": None}, "block_count is missing"),
        ({"rope.dimension_count": 33}, "dimension_count"),
    ],
    ids=str,
)
def test_metadata_that_makes_no_network_is_refused(tmp_path, metadata, message):
    write_llama(tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelFileError, match=message):
        tinyllm.load(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "foo")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'foo' is not supported .*llama"):
        tinyllm.load(tmp_path / "m.gguf")
