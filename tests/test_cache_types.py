"""The types of the KV cache: what a page holds and costs, what precision costs the logits, and who is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.conftest import reference_dir
from tests.test_engine import PROMPT, relative_error, write_llama
from tinyllm import load
from tinyllm.errors import InvalidParameterError
from tinyllm.kernels.abi import CACHE_TYPES, PAGE
from tinyllm.model_info import describe

N_KV_HEADS, HEAD_DIM, N_LAYERS = 2, 64, 2
BYTES_PER_NUMBER = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}
LONG = np.random.default_rng(6).integers(0, 160, 300).tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama.gguf"
    write_llama(path, head_dim=HEAD_DIM, n_kv_heads=N_KV_HEADS, n_layers=N_LAYERS)
    return path


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "latent.gguf"
    write_latent(path)
    return path


def write_latent(path: Path, n_rot: int = 32) -> None:
    """A random DeepSeek-V2 without experts: two layers of four heads over a latent vector of 64 numbers."""
    rng = np.random.default_rng(1)
    n_embd, n_heads, kv_rank, n_plain, v_dim, n_ff = 128, 4, 64, 32, 32, 96
    shapes = {"token_embd.weight": (160, n_embd), "output.weight": (160, n_embd), "output_norm.weight": (n_embd,)}
    for block in ("blk.0.", "blk.1."):
        shapes |= {
            f"{block}attn_norm.weight": (n_embd,),
            f"{block}attn_q.weight": (n_heads * (n_plain + n_rot), n_embd),
            f"{block}attn_kv_a_mqa.weight": (kv_rank + n_rot, n_embd),
            f"{block}attn_kv_a_norm.weight": (kv_rank,),
            f"{block}attn_kv_b.weight": (n_heads * (n_plain + v_dim), kv_rank),
            f"{block}attn_output.weight": (n_embd, n_heads * v_dim),
            f"{block}ffn_norm.weight": (n_embd,),
            f"{block}ffn_gate.weight": (n_ff, n_embd),
            f"{block}ffn_up.weight": (n_ff, n_embd),
            f"{block}ffn_down.weight": (n_embd, n_ff),
        }
    writer = gguf.GGUFWriter(path, "deepseek2")
    numbers = {
        "context_length": 512, "embedding_length": n_embd, "block_count": 2, "feed_forward_length": n_ff,
        "attention.head_count": n_heads, "attention.head_count_kv": n_heads, "attention.kv_lora_rank": kv_rank,
        "attention.key_length": n_plain + n_rot, "attention.value_length": v_dim, "rope.dimension_count": n_rot,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"deepseek2.{key}", value)
    writer.add_float32("deepseek2.attention.layer_norm_rms_epsilon", 1e-3)
    for name, shape in shapes.items():
        tensor = rng.normal(size=shape) / np.sqrt(shape[1]) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
        writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(model, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a position of the first page in layer 0: float32 [n_kv_heads, head_dim] each."""
    pool, n = model.cache.layers[0], HEAD_DIM
    heads = pool.page(0).reshape(N_KV_HEADS, -1)
    keys, values = heads[:, : pool.v_offset], heads[:, pool.v_offset :]
    if model.kv_type != "q8_0":
        number = {"f16": np.float16, "f32": np.float32}[model.kv_type]
        keys, values = keys.view(number).reshape(-1, n, PAGE), values.view(number).reshape(-1, PAGE, n)
        return keys[:, :, position].astype(np.float32), values[:, position].astype(np.float32)
    codes, scales = keys[:, : n * PAGE].view(np.int8), keys[:, n * PAGE :].view(np.float16)
    key_codes = codes.reshape(-1, n, PAGE)[:, :, position]
    key_scales = scales.reshape(-1, n // 32, PAGE)[:, :, position]
    codes, scales = values[:, : n * PAGE].view(np.int8), values[:, n * PAGE :].view(np.float16)
    value_codes = codes.reshape(-1, PAGE, n)[:, position]
    value_scales = scales.reshape(-1, PAGE, n // 32)[:, position]
    return tuple(
        code.astype(np.float32) * np.repeat(scale.astype(np.float32), 32, axis=1)
        for code, scale in ((key_codes, key_scales), (value_codes, value_scales))
    )


def q8_0(x: np.ndarray) -> np.ndarray:
    """float32 [..., n] after a journey through q8_0: what the type is defined to be."""
    blocks = x.reshape(*x.shape[:-1], -1, 32).astype(np.float64)
    peak = np.abs(blocks).max(axis=-1, keepdims=True)
    codes = np.rint(blocks * np.where(peak > 0, 127 / np.where(peak > 0, peak, 1), 0))
    return (codes * (peak / 127).astype(np.float16)).reshape(x.shape).astype(np.float32)


@pytest.mark.parametrize("position", [0, 17, 31])
def test_a_page_holds_what_its_type_makes_of_keys_and_values(llama, position):
    kept = {}
    for kv_type in CACHE_TYPES:
        with load(llama, kv_type=kv_type) as model:
            sequence = model.new_sequence()
            sequence.evaluate(PROMPT[:40])
            kept[kv_type] = stored(model, position)
    for exact, half, codes in zip(kept["f32"], kept["f16"], kept["q8_0"], strict=True):
        assert np.array_equal(half, exact.astype(np.float16))
        # Where the product with 127 / peak lies next to a half, float32 may round it to the other side.
        same = codes == q8_0(exact)
        step = np.abs(exact).max() / 127
        assert same.mean() > 0.99 and np.abs(codes - exact).max() < 0.51 * step


@pytest.mark.parametrize("kv_type", CACHE_TYPES)
def test_a_page_costs_what_is_claimed(llama, kv_type):
    numbers = N_LAYERS * N_KV_HEADS * 2 * HEAD_DIM * PAGE
    with load(llama, kv_type=kv_type) as model:
        page_bytes = sum(pool.page_bytes for pool in model.cache.layers)
        assert page_bytes == numbers * BYTES_PER_NUMBER[kv_type] == describe(model.file).kv_bytes(PAGE, kv_type)


@pytest.mark.parametrize("name", ["llama", "latent"])
def test_logits_are_close_to_those_of_a_full_precision_cache(request, name):
    path = request.getfixturevalue(name)
    logits = {}
    for kv_type in ("f32", "q8_0"):
        with load(path, kv_type=kv_type) as model:
            logits[kv_type] = model.logits(LONG)
    assert 1e-5 < relative_error(logits["q8_0"], logits["f32"]) < 0.02


@pytest.mark.parametrize("name", ["llama", "latent"])
@pytest.mark.parametrize("kv_type", ["q8_0"])
def test_neither_chunks_nor_threads_change_a_bit(request, name, kv_type):
    path = request.getfixturevalue(name)
    with load(path, kv_type=kv_type, n_threads=2) as model:
        whole = model.logits(LONG)
        for chunks in ([299, 1], [31, 1, 1, 33, 200, 34], [1] * 40 + [260]):
            sequence, rows, at = model.new_sequence(), [], 0
            for size in chunks:
                rows.append(sequence.evaluate(LONG[at : at + size], want="all"))
                at += size
            assert np.array_equal(np.concatenate(rows), whole), chunks
    for options in ({"n_threads": 1}, {"n_threads": 3}, {"n_batch": 7}):
        with load(path, kv_type=kv_type, **options) as model:
            assert np.array_equal(model.logits(LONG), whole), options


@pytest.mark.parametrize("name", ["llama", "latent"])
def test_a_fork_copies_a_page_with_its_scales(request, name):
    with load(request.getfixturevalue(name), kv_type="q8_0") as model:
        whole = model.logits(PROMPT)
        first = model.new_sequence()
        first.evaluate(PROMPT[:70])
        second = first.fork()
        second.truncate(40)
        second.evaluate([1, 2, 3])  # writes into what was a shared page
        assert np.array_equal(first.evaluate(PROMPT[70:], want="all"), whole[70:])
        second.truncate(40)
        assert np.array_equal(second.evaluate(PROMPT[40:], want="all"), whole[40:])


@pytest.mark.parametrize("peak", [0.0, 1e-38, 1e-9, 1e5], ids=str)
def test_values_of_any_size_stay_finite(tmp_path, peak):
    """Blocks of zeros, of what is zero in half precision, and of more than half precision can hold."""
    tensors = write_llama(tmp_path / "m.gguf", n_layers=1)
    reader = gguf.GGUFReader(tmp_path / "m.gguf", "r+")
    for tensor in reader.tensors:
        if tensor.name == "blk.0.attn_v.weight":
            tensor.data[:] = tensors[tensor.name] * np.float32(peak)
    reader.data.flush()
    with load(tmp_path / "m.gguf", kv_type="f32") as model:
        exact = model.logits(PROMPT)
    with load(tmp_path / "m.gguf", kv_type="q8_0") as model:
        assert relative_error(model.logits(PROMPT), exact) < 0.02


def refused(path: Path, message: str, **options) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        load(path, **options)


@pytest.mark.parametrize("head_dim", [16, 48, 80])
def test_heads_that_do_not_fit_are_refused_with_what_can_be_used(tmp_path, head_dim):
    write_llama(tmp_path / "m.gguf", head_dim=head_dim)
    refused(tmp_path / "m.gguf", rf"multiple of 32 .* heads of {head_dim}: use f16 or f32$", kv_type="q8_0")


def test_values_that_do_not_fit_are_refused(tmp_path):
    write_llama(tmp_path / "m.gguf", **{"attention.value_length": 24})
    refused(tmp_path / "m.gguf", r"heads of 24: use f16 or f32", kv_type="q8_0")


def test_latent_keys_that_do_not_fit_are_refused(tmp_path):
    write_latent(tmp_path / "m.gguf", n_rot=16)
    refused(tmp_path / "m.gguf", r"heads of 80: use f16 or f32", kv_type="q8_0")


def test_an_unknown_type_is_refused_with_those_that_are_known(llama):
    refused(llama, "use one of f16, f32, q8_0", kv_type="q4_0")


@pytest.mark.parametrize(
    ("command", "option"), [(["run", "--raw", "x"], "--cache-type"), (["bench", "-p", "8", "-n", "0"], "-ctk")], ids=str
)
def test_the_command_line_refuses_it_as_wrong_usage(tinyllm, tmp_path, command, option):
    write_llama(tmp_path / "m.gguf", head_dim=48)
    done = tinyllm(*command, "-m", tmp_path / "m.gguf", option, "q8_0")
    assert done.returncode == 2 and done.stdout == ""
    assert "heads of 48: use f16 or f32" in " ".join(done.stderr.split()) and "Traceback" not in done.stderr


@pytest.mark.model
@pytest.mark.shared
def test_perplexity_stays_within_one_percent(smollm2_path):
    """The first two windows of the protocol of llama-perplexity: ids 257 … 511 of each are scored."""
    ids = np.load(reference_dir() / "reference" / "generation" / "smollm2.perplexity.npz")["ids"]
    perplexity = {}
    for kv_type in ("f16", "q8_0"):
        losses = []
        with load(smollm2_path, kv_type=kv_type, n_ctx=512) as model:
            for window in (ids[:512], ids[512:1024]):
                logits = model.logits(window.tolist())[256:511].astype(np.float64)
                logits -= logits.max(axis=1, keepdims=True)
                chosen = logits[np.arange(255), window[257:512]]
                losses += (np.log(np.exp(logits).sum(axis=1)) - chosen).tolist()
        perplexity[kv_type] = np.exp(np.mean(losses))
    assert perplexity["q8_0"] == pytest.approx(perplexity["f16"], rel=0.01)
