"""Every architecture against what llama.cpp computes, and against itself: chunks, steps, threads, caches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import tinyllm
from tests.conftest import REPOSITORY
from tinyllm.config import ARCHITECTURES, ModelConfig
from tinyllm.errors import ContextFullError, InvalidParameterError, ModelFileError, UnsupportedModelError
from tinyllm.gguf_file import GGUFFile, open_gguf
from tinyllm.kernels.abi import PAGE
from tinyllm.model import Model
from tinyllm.transformer import load_weights
from tinyllm.weights import Weights

SMALL = Path(__file__).parent / "data" / "architectures"
LARGE = Path(os.environ.get("TINYLLM_REFERENCE") or REPOSITORY.parent / "shared") / "conformance"
# What a GELU looked up in a half-precision table differs by, and what is left without one.
GELU_TOLERANCE, TOLERANCE = 1.5e-3, 1e-4


class Case(NamedTuple):
    path: Path
    expected: dict[str, np.ndarray]
    n_ctx: int

    @property
    def prompt(self) -> list[int]:
        return self.expected["prompt"].tolist()


def small_case(path: Path) -> Case:
    with np.load(SMALL / "expected.npz") as file:
        mine = {key.partition("/")[2]: file[key] for key in file if key.startswith(f"{path.stem}/")}
    return Case(path, mine, 64)


def large_case(path: Path) -> Case:
    with np.load(LARGE / "expected" / f"{path.stem}.npz") as file:
        return Case(path, dict(file), 256)


PATHS = [*sorted(SMALL.glob("*.gguf")), *sorted((LARGE / "models").glob("*.gguf"))]


@pytest.fixture(scope="module", params=PATHS, ids=lambda path: f"{'small-' if path.parent == SMALL else ''}{path.stem}")
def case(request: pytest.FixtureRequest) -> Case:
    return (small_case if request.param.parent == SMALL else large_case)(request.param)


@pytest.fixture(scope="module")
def model(case: Case) -> Iterator[Model]:
    with tinyllm.load(case.path, n_ctx=case.n_ctx, kv_type="f32", n_threads=2) as model:
        yield model


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got.astype(np.float64) - want) ** 2)) / want.std())


def tolerance(case: Case, model: Model) -> float:
    recorded = case.expected.get("tolerance")
    return (
        float(recorded) if recorded is not None else GELU_TOLERANCE if model.config.activation == "gelu" else TOLERANCE
    )


def test_results_are_the_references(case: Case, model: Model) -> None:
    for which in ("", "short_", "long_"):
        ids = case.expected.get(f"{which}prompt")
        for kind, results in (
            ("logits", lambda ids: model.logits(ids)),
            ("embedding", lambda ids: model.embed(ids)),
            ("token_embeddings", lambda ids: model.embed(ids, pooling="none")),
        ):
            want = case.expected.get(which + kind)
            if want is not None:
                got = results(ids.tolist())
                assert relative_error(got[-len(want) :], want) <= tolerance(case, model), which + kind


def test_greedy_steps_through_the_cache_are_the_references(case: Case, model: Model) -> None:
    if "greedy" not in case.expected:
        return  # an encoder, or one of the small models
    want = case.expected["greedy"].tolist()
    rows = dict(zip(case.expected["greedy_rows"].tolist(), case.expected["greedy_logits"], strict=True))
    sequence = model.new_sequence()
    logits = sequence.evaluate(case.prompt)[0]
    for step, token in enumerate(want):
        assert logits.argmax() == token, f"step {step}"
        if step in rows:
            assert relative_error(logits, rows[step]) <= tolerance(case, model)
        logits = sequence.evaluate([token])[0]


def test_chunks_steps_and_threads_agree_bit_for_bit(case: Case) -> None:
    n_ctx = case.n_ctx
    with tinyllm.load(case.path, n_ctx, n_threads=1) as one, tinyllm.load(case.path, n_ctx, n_threads=2) as two:
        if not one.config.causal:
            assert np.array_equal(one.embed(case.prompt, pooling="none"), two.embed(case.prompt, pooling="none"))
            return
        whole = one.logits(case.prompt)
        assert np.isfinite(whole).all()
        assert np.array_equal(two.logits(case.prompt), whole)
        for model, size in ((one, 13), (two, 1)):
            sequence = model.new_sequence()
            pieces = [case.prompt[start : start + size] for start in range(0, len(case.prompt), size)]
            assert np.array_equal(np.concatenate([sequence.evaluate(ids, want="all") for ids in pieces]), whole)


def test_truncated_and_forked_sequences_go_on_as_fresh_ones(case: Case, model: Model) -> None:
    if not model.config.causal:
        return  # encoders read a text at once
    ids = (case.prompt * 2)[: case.n_ctx]
    whole = model.logits(ids)
    sequence = model.new_sequence()
    sequence.evaluate(ids[:-4], want="none")
    fork = sequence.fork()
    for keep in (len(ids) - 8, 5):
        fork.truncate(keep)
        assert len(fork) == keep
        assert np.array_equal(fork.evaluate(ids[keep:], want="all"), whole[keep:])
    assert np.array_equal(sequence.evaluate(ids[-4:], want="all"), whole[-4:])


def test_windowed_layers_keep_only_what_they_see() -> None:
    with tinyllm.load(SMALL / "gemma3.gguf", n_ctx=512, n_batch=64) as model:
        everywhere, windowed = model.cache.groups
        assert (everywhere.window, windowed.window) == (0, 16)
        sequence = model.new_sequence()
        for start in range(0, 480, 48):
            sequence.evaluate([7] * 48, want="none")
            used = [group.n_pages - group.n_free for group in (everywhere, windowed)]
            assert used[0] == -(-(start + 48) // PAGE)
            assert used[1] <= -(-16 // PAGE) + 2
        sequence.release()
        assert everywhere.n_free == windowed.n_free == everywhere.n_pages


def test_every_architecture_is_covered() -> None:
    if not (LARGE / "models").is_dir():
        pytest.skip("needs the large collection")
    seen = {open_gguf(path).metadata["general.architecture"] for path in PATHS}
    assert set(ARCHITECTURES) == seen


# Refusals


class Altered:
    """An open file with other metadata and fewer or more tensors."""

    def __init__(self, file: GGUFFile, metadata: dict[str, object] | None = None, without: str = "", extra: str = ""):
        self.path = file.path
        self.metadata = {key: file.metadata[key] for key in file.metadata} | (metadata or {})
        self.metadata = {key: value for key, value in self.metadata.items() if value is not None}
        self.tensors = {name: tensor for name, tensor in file.tensors.items() if name != without}
        if extra:
            self.tensors[extra] = next(iter(file.tensors.values()))


def load_altered(name: str, **changes: object) -> None:
    file = Altered(open_gguf(SMALL / f"{name}.gguf"), **changes)
    load_weights(ModelConfig.from_file(file), Weights(file))


@pytest.mark.parametrize("path", sorted(SMALL.glob("*.gguf")), ids=lambda path: path.stem)
def test_an_unknown_tensor_is_refused(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_spin\.weight"):
        load_altered(path.stem, extra="blk.0.attn_spin.weight")


@pytest.mark.parametrize("path", sorted(SMALL.glob("*.gguf")), ids=lambda path: path.stem)
def test_no_tensor_can_be_missing(path: Path) -> None:
    """One of the last block's: which tensors there are tells architectures apart, but all blocks must have the same."""
    file = open_gguf(path)
    last = max(int(name.split(".")[1]) for name in file.tensors if name.startswith("blk."))
    needed = [
        name
        for name in file.tensors
        if name.startswith(f"blk.{last}.") and name.replace(f".{last}.", ".0.") in file.tensors
    ]
    for name in needed if last else ():
        with pytest.raises((ModelFileError, UnsupportedModelError), match=r"blk\."):
            load_altered(path.stem, without=name)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gemma3", "attention.head_count", 0, "head_count is 0"),
        ("gemma3", "attention.head_count_kv", 3, "3 does not divide 4"),
        ("gemma3", "attention.layer_norm_rms_epsilon", None, "epsilon is missing"),
        ("gemma3", "attention.layer_norm_rms_epsilon", float("nan"), "not a finite number"),
        ("gemma3", "attention.sliding_window", 0, "sliding_window is 0"),
        ("gemma3", "attention.sliding_window_pattern", np.array([True]), "has 1 values for 6 layers"),
        ("gemma3", "attention.key_length", 2**20, "key_length is 1048576"),
        ("gemma3", "block_count", 7, r"blk\.6\.attn_q\.weight is missing"),
        ("gemma3", "block_count", 0, "block_count is 0"),
        ("gemma3", "embedding_length", "40", "not a whole number"),
        ("gemma3", "embedding_length", True, "not a whole number"),
        ("gemma3", "rope.dimension_count", 21, "dimension_count is 21"),
        ("gemma3", "rope.freq_base", 0.0, "freq_base is 0"),
        ("gemma3", "rope.freq_base", -1.0, "freq_base is -1"),
        ("gemma3", "rope.scaling.type", "spiral", "'spiral' is not supported"),
        ("gemma3", "feed_forward_length", 17, "has shape"),
        ("gemma3", "context_length", None, "context_length is missing"),
        ("olmo3", "rope.scaling.original_context_length", 0, "original_context_length is 0"),
        ("bert", "attention.causal", "no", "neither true nor false"),
        ("qwen2moe", "expert_used_count", 6, "expert_used_count is 6"),
        ("qwen2moe", "expert_used_count", 0, "expert_used_count is 0"),
        ("qwen2moe", "expert_gating_func", 9, "expert_gating_func 9 is not supported"),
        ("deepseek2", "expert_group_count", 3, "3 does not divide 8 experts"),
        ("deepseek2", "attention.kv_lora_rank", 33, "kv_lora_rank is 33"),
        ("deepseek2", "attention.key_length_mla", 8, "key_length_mla is 8"),
        ("deepseek2", "nextn_predict_layers", 2, "nextn_predict_layers is 2"),
    ],
)  # fmt: skip
def test_metadata_from_hell_are_refused_by_name(name: str, key: str, value: object, message: str) -> None:
    architecture = open_gguf(SMALL / f"{name}.gguf").metadata["general.architecture"]
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message) as caught:
        load_altered(name, metadata={f"{architecture}.{key}": value})
    assert "\n" not in str(caught.value) and name in str(caught.value)


# Positions, scales, embeddings


def test_linear_scaling_divides_positions() -> None:
    """Also from old files, which say so by `rope.scale_linear`, and from those that give a factor without a type."""
    file = open_gguf(SMALL / "qwen2moe.gguf")
    plain = ModelConfig.from_file(file).ropes[0]
    for keys in (
        {"qwen2moe.rope.scaling.factor": 4.0, "qwen2moe.rope.scaling.type": "linear"},
        {"qwen2moe.rope.scaling.factor": 4.0},
        {"qwen2moe.rope.scale_linear": 4.0},
    ):
        scaled = ModelConfig.from_file(Altered(file, keys)).ropes[0]
        assert np.allclose(scaled.table(np.arange(0, 64, 4)), plain.table(np.arange(16)), atol=1e-7)
    unscaled = {"qwen2moe.rope.scaling.factor": 4.0, "qwen2moe.rope.scaling.type": "none"}
    assert np.array_equal(ModelConfig.from_file(Altered(file, unscaled)).ropes[0].frequencies, plain.frequencies)


def test_the_base_of_the_file_wins_over_the_usual_one() -> None:
    frequencies = ModelConfig.from_file(open_gguf(SMALL / "gemma3.gguf")).ropes[0].frequencies
    assert np.allclose(frequencies, 1e6 ** (-np.arange(0, 20, 2) / 20))


@pytest.mark.parametrize(("n_ctx", "which"), [(32, "short"), (33, "long")])
def test_the_context_decides_between_long_and_short_factors(n_ctx: int, which: str) -> None:
    file = open_gguf(SMALL / "phi3-longrope.gguf")
    factors = file.tensors[f"rope_factors_{which}.weight"].data.view(np.float32)
    rope = ModelConfig.from_file(file, n_ctx).ropes[0]
    assert np.allclose(rope.frequencies, 1e4 ** (-np.arange(0, 10, 2) / 10) / factors)
    assert rope.amplitude == pytest.approx(1.19)


def test_learned_positions_limit_the_context() -> None:
    with tinyllm.load(SMALL / "bert.gguf", n_ctx=1000) as model:
        assert model.n_ctx == 64
        with pytest.raises(ContextFullError, match="65 tokens do not fit"):
            model.embed([5] * 65)


@pytest.fixture(scope="module")
def encoder() -> Iterator[Model]:
    with tinyllm.load(SMALL / "bert.gguf") as model:
        yield model


def test_a_text_is_embedded_as_text_also_when_it_is_bytes(encoder: Model) -> None:
    assert np.array_equal(encoder.embed(b"ab"), encoder.embed("ab"))


def test_pooling_of_an_encoder(encoder: Model) -> None:
    ids = [2, 10, 11, 12, 3]
    rows = encoder.embed(ids, pooling="none")
    assert rows.shape == (5, 40)
    assert np.allclose(encoder.embed(ids), rows.mean(axis=0), atol=1e-6)
    assert np.array_equal(encoder.embed(ids, pooling="cls"), rows[0])
    assert np.array_equal(encoder.embed(ids, pooling="last"), rows[-1])
    assert np.linalg.norm(encoder.embed(ids, normalize=True)) == pytest.approx(1.0)
    assert np.allclose(np.linalg.norm(encoder.embed(ids, pooling="none", normalize=True), axis=1), 1.0)


def test_an_encoder_embeds_texts_and_refuses_the_rest(encoder: Model) -> None:
    assert np.array_equal(encoder.embed("the cat"), encoder.embed(encoder.tokenizer.encode("the cat")))
    assert encoder.embed("").shape == (40,)  # [CLS] and [SEP] remain
    with pytest.raises(InvalidParameterError, match="no tokens"):
        encoder.embed([])
    with pytest.raises(InvalidParameterError, match="pooling 'max' is not supported"):
        encoder.embed("the cat", pooling="max")
    with pytest.raises(UnsupportedModelError, match="is an encoder"):
        encoder.logits([2, 3])


def test_a_language_model_embeds_by_the_mean_of_its_last_states() -> None:
    with tinyllm.load(SMALL / "olmo3.gguf", n_ctx=64) as model:
        rows = model.embed([5, 6, 7], pooling="none")
        assert rows.shape == (3, 40)
        assert np.allclose(model.embed([5, 6, 7]), rows.mean(axis=0), atol=1e-6)
        # The head makes logits of the same rows.
        head = model.network.weights.output
        assert np.allclose(model.logits([5, 6, 7]), rows @ _matrix(model, head.name).T, atol=1e-4)


def _matrix(model: Model, name: str) -> np.ndarray:
    tensor = model.file.tensors[name]
    return tensor.data.view(np.float16).reshape(tensor.shape).astype(np.float32)
