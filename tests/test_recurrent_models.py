"""Models with recurrent layers, as a whole: tiny random ones of odd sizes against the float64 specification, and cut,
truncated, forked and interrupted ones against fresh ones, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import recurrent_reference
from conftest import reference_dir

import tinyllm
from tinyllm.errors import ModelFileError, UnsupportedModelError
from tinyllm.gguf_file import open_gguf
from tinyllm.model import Model
from tinyllm.step import Run

VOCAB = 96
IDS = np.random.default_rng(3).integers(0, VOCAB, 75).tolist()
OTHER = np.random.default_rng(4).integers(0, VOCAB, 9).tolist()
Shapes = dict[str, tuple[int, ...]]


def attention(e: int, heads: int, kv_heads: int, dim: int, gated: bool = False, norms: bool = True) -> Shapes:
    q = heads * dim * (2 if gated else 1)
    shapes = {"attn_q": (q, e), "attn_k": (kv_heads * dim, e), "attn_v": (kv_heads * dim, e)}
    return (
        shapes | {"attn_output": (e, heads * dim)} | ({"attn_q_norm": (dim,), "attn_k_norm": (dim,)} if norms else {})
    )


def feed_forward(e: int, n: int) -> Shapes:
    return {"ffn_norm": (e,), "ffn_gate": (n, e), "ffn_up": (n, e), "ffn_down": (e, n)}


def experts(e: int, n: int, count: int) -> Shapes:
    return {
        "post_attention_norm": (e,), "ffn_gate_inp": (count, e), "ffn_gate_exps": (count, n, e),
        "ffn_up_exps": (count, n, e), "ffn_down_exps": (count, e, n),
    }  # fmt: skip


def shared_expert(e: int, n: int) -> Shapes:
    return {"ffn_gate_inp_shexp": (e,), "ffn_gate_shexp": (n, e), "ffn_up_shexp": (n, e), "ffn_down_shexp": (e, n)}


def mamba(e: int, n: int, state: int, rank: int, kernel: int) -> Shapes:
    return {
        "ssm_in": (2 * n, e), "ssm_conv1d": (n, kernel), "ssm_conv1d.bias": (n,), "ssm_x": (rank + 2 * state, n),
        "ssm_dt": (n, rank), "ssm_dt.bias": (n,), "ssm_a": (n, state), "ssm_d": (n,), "ssm_out": (e, n),
    }  # fmt: skip


def mamba2(e: int, n: int, heads: int, groups: int, state: int, kernel: int, norm: bool = True) -> Shapes:
    conv = n + 2 * groups * state
    return {
        "ssm_in": (n + conv + heads, e), "ssm_conv1d": (conv, kernel), "ssm_conv1d.bias": (conv,),
        "ssm_dt.bias": (heads,), "ssm_a": (heads, 1), "ssm_d": (heads, 1), "ssm_out": (e, n),
    } | ({"ssm_norm": (groups, n // groups)} if norm else {})  # fmt: skip


def delta_net(e: int, heads: int, keys: int, k_dim: int, v_dim: int, kernel: int, paired: bool) -> Shapes:
    n, conv = heads * v_dim, heads * v_dim + 2 * keys * k_dim
    gates = {"ssm_ba": (2 * heads, e)} if paired else {"ssm_beta": (heads, e), "ssm_alpha": (heads, e)}
    return gates | {
        "attn_qkv": (conv, e), "attn_gate": (n, e), "ssm_conv1d": (conv, kernel), "ssm_dt.bias": (heads,),
        "ssm_a": (heads,), "ssm_norm": (v_dim,), "ssm_out": (e, n),
    }  # fmt: skip


def short_conv(e: int, kernel: int) -> Shapes:
    return {"shortconv.conv": (e, kernel), "shortconv.in_proj": (3 * e, e), "shortconv.out_proj": (e, e)}


def renamed(shapes: Shapes, norm: str = "post_attention_norm") -> Shapes:
    """With another name for the norm before the feed-forward."""
    return {(norm if name.endswith("_norm") else name): shape for name, shape in shapes.items()}


EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
SSM = ("ssm.inner_size", "ssm.time_step_rank", "ssm.group_count", "ssm.state_size", "ssm.conv_kernel")


def ssm(*values: int) -> dict[str, int]:
    return {key: value for key, value in zip(SSM, values, strict=True) if value}


def heads(n_heads: int, n_kv_heads: int | list[int], dim: int) -> dict[str, Any]:
    return {
        "attention.head_count": n_heads, "attention.head_count_kv": n_kv_heads, "attention.key_length": dim,
        "attention.value_length": dim, "rope.dimension_count": dim // 2 // 2 * 2,
    }  # fmt: skip


# Architecture, width, layers' tensors, metadata.
Family = tuple[str, int, list[Shapes], dict[str, Any]]
FAMILIES: dict[str, Family] = {
    "mamba": ("mamba", 48, [mamba(48, 72, 6, 5, 3)] * 2, {"attention.head_count": 0} | ssm(72, 5, 0, 6, 3)),
    "mamba with norms": (
        "mamba", 64, [mamba(64, 96, 8, 32, 4)] * 2,
        {"attention.head_count": 0, "ssm.dt_b_c_rms": True} | ssm(96, 32, 0, 8, 4),
    ),
    "mamba2": ("mamba2", 40, [mamba2(40, 60, 6, 3, 10, 2)] * 2, {"attention.head_count": 0} | ssm(60, 6, 3, 10, 2)),
    "lfm2": (
        "lfm2", 40,
        [short_conv(40, 3) | feed_forward(40, 56), attention(40, 4, 2, 20) | feed_forward(40, 56),
         short_conv(40, 3) | feed_forward(40, 56)],
        {"shortconv.l_cache": 3} | heads(4, [0, 2, 0], 20),
    ),
    "granitehybrid": (
        "granitehybrid", 64,
        [mamba2(64, 96, 4, 1, 16, 4, norm=False) | feed_forward(64, 64),
         attention(64, 4, 1, 16, norms=False) | feed_forward(64, 64)],
        heads(4, [0, 1], 16) | ssm(96, 4, 1, 16, 4)
        | {"rope.scaling.finetuned": False, "attention.scale": 0.3, "residual_scale": 0.4, "logit_scale": 2.0,
           "embedding_scale": 3.0},
    ),
    "qwen35": (
        "qwen35", 48,
        [delta_net(48, 6, 3, 10, 20, 4, False) | renamed(feed_forward(48, 40)),
         attention(48, 3, 1, 20, gated=True) | renamed(feed_forward(48, 40))] * 2,
        heads(3, 1, 20) | ssm(120, 6, 3, 10, 4),
    ),
    "qwen3next": (
        "qwen3next", 64,
        [delta_net(64, 4, 2, 16, 16, 4, True) | experts(64, 32, 4) | shared_expert(64, 32),
         attention(64, 2, 1, 24, gated=True) | experts(64, 32, 4) | shared_expert(64, 32)],
        heads(2, 1, 24) | ssm(64, 4, 2, 16, 4) | EXPERTS,
    ),
    "qwen35moe": (
        "qwen35moe", 48,
        [delta_net(48, 4, 2, 16, 16, 4, False) | experts(48, 16, 4) | shared_expert(48, 24),
         attention(48, 2, 1, 24, gated=True) | experts(48, 16, 4) | shared_expert(48, 24)],
        heads(2, 1, 24) | ssm(64, 4, 2, 16, 4) | EXPERTS | {"expert_feed_forward_length": 16},
    ),
    "lfm2moe": (
        "lfm2moe", 48,
        [short_conv(48, 3) | feed_forward(48, 40),
         attention(48, 3, 1, 16) | renamed(experts(48, 16, 4), "ffn_norm") | {"exp_probs_b.bias": (4,)},
         short_conv(48, 3) | renamed(experts(48, 16, 4), "ffn_norm") | {"exp_probs_b.bias": (4,)}],
        heads(3, [0, 1, 0], 16) | {"shortconv.l_cache": 3} | EXPERTS
        | {"expert_feed_forward_length": 16, "expert_gating_func": 2},
    ),
}  # fmt: skip


def write(path: Path, family: str, kind: str = "F32", **changes: Any) -> Path:
    """A random model; its matrices of whole blocks have ggml type `kind`. A change to None leaves a value out."""
    architecture, width, layers, metadata = FAMILIES[family]
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": len(layers), "context_length": 256, "embedding_length": width,
        "feed_forward_length": next((s[0] for layer in layers for k, s in layer.items() if k == "ffn_gate"), 0),
        "attention.layer_norm_rms_epsilon": 1e-3,
    } | metadata | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in values.items():
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    norm = "token_embd_norm" if architecture.startswith("lfm2") else "output_norm"
    shapes = {"token_embd": (VOCAB, width), "output": (VOCAB, width), norm: (width,)}
    shapes |= {f"blk.{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items()}
    shapes |= {f"blk.{i}.attn_norm": (width,) for i in range(len(layers))}
    type_ = gguf.GGMLQuantizationType[kind]
    for name, shape in shapes.items():
        tensor = rng.normal(size=shape) * 1.3 / np.sqrt(shape[-1])
        if "norm" in name or name.endswith("ssm_d"):
            tensor = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("ssm_a"):
            tensor = -rng.uniform(0.2, 1.5, shape)
        elif name.endswith("bias") or "conv1d" in name or ".conv" in name:
            tensor = rng.normal(size=shape) * 0.5
        tensor = tensor.astype(np.float32)
        full = name if name.endswith(("bias", "ssm_a", "ssm_d")) else f"{name}.weight"
        plain = len(shape) == 1 or kind == "F32" or shape[-1] % 32 or "inp" in name
        if plain:
            writer.add_tensor(full, tensor)
        else:
            writer.add_tensor(full, gguf.quants.quantize(tensor, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write(tmp_path_factory.mktemp("recurrent") / "model.gguf", request.param)
    with tinyllm.load(path, n_threads=2, kv_type="f32") as model:
        yield model


def continued(model: Model, ids: list[int], more: list[int]) -> np.ndarray:
    """Logits of `more` behind `ids`, by a fresh sequence."""
    sequence = model.new_sequence()
    sequence.evaluate(ids, want="none")
    logits = sequence.evaluate(more, want="all")
    sequence.release()
    return logits


def test_logits_equal_the_specification(model: Model) -> None:
    want = recurrent_reference.Reference(model.file).logits(IDS)
    got = model.logits(IDS)
    assert np.sqrt(np.mean((got - want) ** 2)) < 5e-6 * want.std()


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name in ("mamba with norms", "granitehybrid", "qwen3next")]
)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantized_logits_are_the_same_bits_in_chunks_row_by_row_and_with_any_threads(
    tmp_path: Path, family: str, kind: str
) -> None:
    path = write(tmp_path / "model.gguf", family, kind)
    with tinyllm.load(path, n_threads=1) as model:
        whole = model.logits(IDS)
        sequence = model.new_sequence()
        rows = np.concatenate([sequence.evaluate([token]) for token in IDS])
        assert np.array_equal(whole, rows)
    with tinyllm.load(path, n_threads=3, n_batch=17) as model:
        assert np.array_equal(whole, model.logits(IDS))


def test_logits_are_the_same_bits_however_a_prompt_is_cut(model: Model) -> None:
    whole, sequence = model.logits(IDS), model.new_sequence()
    at, parts = 0, []
    for size in (1, 1, 40, 2, 31):
        parts.append(sequence.evaluate(IDS[at : at + size], want="all"))
        at += size
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("n", [0, 1, 39, 40, 50, 73, 74, 75])
def test_truncated_sequence_goes_on_as_a_fresh_one(model: Model, n: int) -> None:
    want = continued(model, IDS[:n], OTHER) if n else model.logits(OTHER)
    sequence = model.new_sequence()
    sequence.evaluate(IDS[:40], want="none")
    for token in IDS[40:]:
        sequence.evaluate([token], want="none")
    sequence.truncate(n)
    assert len(sequence) == n and sequence.tokens == IDS[:n]
    assert np.array_equal(sequence.evaluate(OTHER, want="all"), want)
    assert len(sequence) == sequence.n_computed == n + len(OTHER)


def test_last_logits_after_a_truncation_are_those_of_the_last_token(model: Model) -> None:
    sequence = model.new_sequence()
    sequence.evaluate(IDS, want="none")
    sequence.truncate(60)
    assert np.array_equal(sequence.evaluate(OTHER)[0], continued(model, IDS[:60], OTHER)[-1])


def test_forks_go_their_own_ways(model: Model) -> None:
    sequence = model.new_sequence()
    sequence.evaluate(IDS[:50], want="none")
    fork = sequence.fork()
    there, here = fork.evaluate(OTHER, want="all"), sequence.evaluate(IDS[50:], want="all")
    assert np.array_equal(there, continued(model, IDS[:50], OTHER))
    assert np.array_equal(here, continued(model, IDS[:50], IDS[50:]))
    fork.truncate(20)
    sequence.release()
    assert np.array_equal(fork.evaluate(OTHER, want="all"), continued(model, IDS[:20], OTHER))


def test_interrupted_step_leaves_the_sequence_as_it_was(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = model.new_sequence()
    sequence.evaluate(IDS[:40], want="none")
    run_step = model._step

    def interrupted(*arguments: Any) -> None:
        run_step(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sequence.evaluate(IDS[40:])
    assert len(sequence) == 40
    assert np.array_equal(sequence.evaluate(OTHER, want="all"), continued(model, IDS[:40], OTHER))


def test_stop_request_leaves_whole_chunks(tmp_path: Path) -> None:
    with tinyllm.load(write(tmp_path / "model.gguf", "mamba2"), n_batch=16, kv_type="f32") as model:
        sequence, answers = model.new_sequence(), iter([False, False, True])
        assert sequence.evaluate(IDS, should_stop=lambda: next(answers)) is None
        assert sequence.tokens == IDS[:32]
        assert np.array_equal(sequence.evaluate(OTHER, want="all"), continued(model, IDS[:32], OTHER))


def test_step_of_several_sequences_computes_each_as_alone(model: Model) -> None:
    first, second = model.new_sequence(), model.new_sequence()
    first.evaluate(IDS[:33], want="none")
    runs = []
    for sequence, ids in ((second, OTHER), (first, IDS[33:60])):
        start = len(sequence)
        sequence.pages.reserve(start + len(ids), start)
        runs.append(Run(start, ids, sequence.pages.address, sequence.states.begin(len(ids))))
    n = len(OTHER) + 27
    logits = model._step(runs, list(range(n))).copy()
    assert np.array_equal(logits[: len(OTHER)], model.logits(OTHER))
    assert np.array_equal(logits[len(OTHER) :], model.logits(IDS[:60])[33:])


def test_released_sequences_leave_their_memory_to_others(model: Model) -> None:
    pool = model.cache.states
    for _ in range(3):
        model.logits(IDS)
    n_free = len(pool._free)
    model.logits(IDS)
    assert len(pool._free) == n_free


@pytest.mark.parametrize(
    ("family", "change", "complaint"),
    [
        ("mamba", {"ssm__inner_size": 0}, "mamba.ssm.inner_size is 0"),
        ("mamba", {"ssm__state_size": None}, "mamba.ssm.state_size is missing"),
        ("mamba", {"ssm__conv_kernel": 5}, "ssm_conv1d.weight has shape"),
        ("mamba", {"ssm__conv_kernel": 2**31}, "mamba.ssm.conv_kernel is 2147483648"),
        ("mamba", {"ssm__time_step_rank": 7}, "ssm_x.weight has shape"),
        ("mamba2", {"ssm__group_count": 4}, "mamba2.ssm.group_count is 4, which does not divide"),
        ("mamba2", {"ssm__time_step_rank": 7}, "mamba2.ssm.time_step_rank is 7, which does not divide"),
        ("lfm2", {"shortconv__l_cache": None}, "lfm2.shortconv.l_cache is missing"),
        ("lfm2", {"attention__head_count": 0}, "lfm2.attention.head_count is 0"),
        ("lfm2", {"attention__head_count_kv": [0, 0, 0]}, "lfm2.attention.head_count_kv"),
        ("qwen35", {"attention__value_length": 10}, "qwen35.attention.value_length is 10"),
        ("qwen35", {"ssm__state_size": 11}, "attn_qkv.weight has shape"),
    ],
)
def test_metadata_that_make_no_network_are_refused_in_a_line(
    tmp_path: Path, family: str, change: dict[str, Any], complaint: str
) -> None:
    path = write(tmp_path / "model.gguf", family, **change)
    with pytest.raises((ModelFileError, UnsupportedModelError)) as refusal:
        tinyllm.load(path)
    assert complaint in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["mamba", "mamba2", "lfm2", "granitehybrid", "qwen35", "qwen3next"])
def test_specification_equals_llama_cpp(name: str) -> None:
    folder = reference_dir() / "conformance"
    with (
        open_gguf(folder / "models" / f"{name}.gguf") as file,
        np.load(folder / "expected" / f"{name}.npz") as expected,
    ):
        logits = recurrent_reference.Reference(file).logits(expected["prompt"].tolist())
        want = expected["logits"]
    assert np.sqrt(np.mean((logits - want) ** 2)) < 3e-6 * want.std()
