"""Looking inside: observed values against unobserved runs and a float64 forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import traced_models
from fake_model import write_chain_model
from traced_models import HEAD_DIM, N_HEADS, N_KV_HEADS, PROMPT, Reference, few_tokens, tiny_model, write_llama

import tinyllm
from tinyllm.errors import InvalidParameterError, UnsupportedModelError
from tinyllm.sampler import Sampler, SamplingParams
from tinyllm.sampling.record import Recorder
from tinyllm.trace import Trace
from tinyllm.trace.attention import AttentionReader
from tinyllm.trace.lens import read_lens
from tinyllm.trace.observation import STAGES
from tinyllm.trace.output_head import OutputHead
from tinyllm.trace.summary import as_dict, check, funnel, layer_rows, sentence
from tinyllm.trace.tokens import describe_tokens, display

REAL = "The capital of France is"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trace") / "llama.gguf"


@pytest.fixture(scope="module")
def tensors(path) -> dict[str, np.ndarray]:
    return write_llama(path)


@pytest.fixture(scope="module")
def llama(path, tensors):
    with few_tokens(path) as model:
        yield model


@pytest.fixture(scope="module")
def traced(llama) -> Trace:
    return llama.trace(PROMPT, max_tokens=3, seed=5, stages=STAGES)


@pytest.fixture(scope="module")
def reference(traced, tensors) -> Reference:
    return Reference(tensors, [token.id for token in traced.tokens[:-1]])


# Numbers against the float64 reference


def test_residual_states_agree_with_the_reference(traced, reference):
    want = np.stack(reference.states)
    assert np.abs(traced.residual - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_weights_agree_with_the_reference(traced, reference, layer):
    np.testing.assert_allclose(traced.attention[layer].probs, reference.probs[layer], atol=2e-6)


def test_the_lens_agrees_with_the_reference_at_every_state(traced, reference):
    assert traced.lens.read.all()
    for state in range(len(reference.states)):
        logits = reference.lens(state)
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        assert (traced.lens.top_ids[state, :, 0] == logits.argmax(-1)).all()
        np.testing.assert_allclose(traced.lens.top_probs[state, :, 0], probs.max(-1), rtol=1e-4)
        entropy = -(probs * np.log2(probs)).sum(-1)
        np.testing.assert_allclose(traced.lens.entropy[state], entropy, rtol=1e-4)
        at = np.arange(traced.n_tokens), traced.lens.answer
        assert (traced.lens.ranks[state] == (logits > logits[at][:, None]).sum(-1)).all()


def test_divergence_and_log_probabilities_agree_with_the_reference(traced, reference):
    final = reference.lens(-1)
    log_final = final - np.log(np.exp(final).sum(-1, keepdims=True))
    middle = reference.lens(2)
    log_middle = middle - np.log(np.exp(middle).sum(-1, keepdims=True))
    kl = (np.exp(log_final) * (log_final - log_middle)).sum(-1) / np.log(2)
    np.testing.assert_allclose(traced.lens.kl[2], kl, rtol=1e-3, atol=1e-5)
    ids = [token.id for token in traced.tokens]
    np.testing.assert_allclose(traced.lens.log_probs, log_final[np.arange(len(ids) - 1), ids[1:]], rtol=1e-4)


def test_contributions_add_up_to_the_reference_logit(traced, reference):
    for i, part in enumerate(traced.contributions):
        want = reference.lens(-1)[traced.positions[i], part.token]
        assert part.sum == pytest.approx(want, abs=1e-4)
        assert part.logit == pytest.approx(want, abs=1e-4)
        mean = reference.lens(-1)[traced.positions[i]].mean()
        assert part.centred.sum() == pytest.approx(want - mean, abs=1e-3)


def test_value_weights_are_the_norms_of_what_a_source_adds(traced, reference):
    """‖W_O v‖ of head 0, from the recorded values and the file's matrix."""
    layer = traced.attention[0]
    head_dim = traced.arrays["q", 0].shape[1] // layer.n_heads
    v = traced.arrays["v", 0][:, :head_dim]
    output = reference.w["blk.0.attn_output.weight"][:, :head_dim]
    np.testing.assert_allclose(layer.value_norms[0], np.linalg.norm(v @ output.T, axis=1), rtol=1e-4)


# Observed and unobserved runs


@pytest.mark.parametrize("name", traced_models.decoders())
def test_observed_values_are_those_of_an_unobserved_run(name):
    with tiny_model(name, kv_type="f16") as model:
        found = model.trace(PROMPT, max_tokens=3, seed=5)
        steps = list(model.generate(PROMPT, max_tokens=3, seed=5))
        assert [step.token for step in found.steps] == [step.token for step in steps]
        assert [step.logprob for step in found.steps] == [step.logprob for step in steps]
        sequence = model.new_sequence()
        for i, token in enumerate([None, *(step.token for step in steps[:-1])]):
            logits = sequence.evaluate(PROMPT if token is None else [token])
            np.testing.assert_array_equal(found.logits[i], logits[0])
        assert found.attention_error < 1e-5
        assert all(abs(part.rounding) < 1e-4 * max(1, abs(part.logit)) for part in found.contributions)
        assert found.sinks == tuple(sorted(set(found.sinks)))
        assert len(found.lens.read) == len(found.residual) == 2 * found.n_layers + 1


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("name", ["gemma3", "deepseek2"])
def test_maps_are_read_from_windows_and_latent_caches(name, kv_type):
    with tiny_model(name, kv_type=kv_type) as model:
        assert model.trace(PROMPT, max_tokens=1, temperature=0).attention_error < 1e-5


@pytest.mark.parametrize("kv_type", ["f16", "f32", "q8_0"])
def test_maps_are_read_from_every_kind_of_cache(path, tensors, kv_type):
    with few_tokens(path, kv_type=kv_type) as model:
        assert model.trace(PROMPT, max_tokens=1, temperature=0).attention_error < 1e-5


def test_windows_hide_what_lies_before_them():
    with tiny_model("gemma3") as model:
        found = model.trace(PROMPT, max_tokens=1, temperature=0)
    for layer, window in zip(found.attention, found.windows, strict=True):
        rows, columns = np.indices(layer.probs.shape[1:])
        outside = columns > rows
        if window:
            outside |= columns <= rows - window
        assert not layer.probs[:, outside].any()
        np.testing.assert_allclose(layer.probs.sum(axis=2), 1, rtol=1e-5)
    assert 0 in found.windows and max(found.windows) > 0


def test_the_last_state_gives_the_logits_bit_for_bit(llama, traced):
    head = OutputHead(llama)
    for position, logits in zip(traced.positions, traced.logits, strict=True):
        np.testing.assert_array_equal(head.logits(traced.residual[-1:, position])[0], logits)
        with_others = head.logits(traced.residual[:, position])
        np.testing.assert_array_equal(with_others[-1], logits)


def test_chunks_do_not_change_what_is_seen(path, traced):
    with few_tokens(path, n_threads=1, n_batch=7) as model:
        found = model.trace(PROMPT, max_tokens=3, seed=5)
    np.testing.assert_array_equal(found.residual, traced.residual)
    np.testing.assert_array_equal(found.logits, traced.logits)
    np.testing.assert_allclose(found.attention[1].probs, traced.attention[1].probs, atol=1e-6)
    for key, want in traced.stages.items():
        got = found.stages[key]
        for name in ("norm", "low", "high", "histogram"):
            np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-6, err_msg=f"{key} {name}")
    for layer, want in traced.activations.items():
        np.testing.assert_array_equal(found.activations[layer].active, want.active)
        np.testing.assert_array_equal(found.activations[layer].index, want.index)
        at = traced.positions
        np.testing.assert_array_equal(found.activations[layer].carriers[at], want.carriers[at])


def test_stages_are_measured_as_they_are_kept(traced):
    for key, rows in traced.arrays.items():
        if key[0] == "logits":
            continue
        found = traced.stages[key]
        np.testing.assert_allclose(found.norm, np.linalg.norm(rows, axis=1), rtol=1e-5, err_msg=str(key))
        np.testing.assert_array_equal(found.low, rows.min(axis=1))
        np.testing.assert_array_equal(found.high, rows.max(axis=1))
        assert found.width == rows.shape[1] and found.histogram.sum() == found.width


def test_activations_are_counted_as_the_arrays_say(traced):
    for layer, found in traced.activations.items():
        size = np.abs(traced.arrays["ffn_act", layer])
        np.testing.assert_allclose(found.active, (size > 0.1 * size.max(axis=1, keepdims=True)).mean(axis=1))
        np.testing.assert_array_equal(found.index[:, 0], size.argmax(axis=1))
        for position in traced.positions:
            energy = np.cumsum(np.sort(size[position].astype(np.float64) ** 2)[::-1])
            few, many = found.carriers[position]
            assert energy[few - 1] >= 0.5 * energy[-1] > (energy[few - 2] if few > 1 else 0)
            assert energy[many - 1] >= 0.9 * energy[-1] > energy[many - 2]


def test_gate_and_up_are_seen_where_they_are_one_product(traced):
    gate, up, act = (traced.arrays[f"ffn_{part}", 0] for part in ("gate", "up", "act"))
    np.testing.assert_allclose(gate / (1 + np.exp(-gate.astype(np.float64))) * up, act, rtol=1e-4, atol=1e-6)


def test_heads_of_a_group_share_keys_and_values(traced):
    """GQA: each head's row times the values of its group is what the kernel made of it."""
    layer, group = traced.attention[1], N_HEADS // N_KV_HEADS
    assert (layer.n_heads, layer.n_kv_heads) == (N_HEADS, N_KV_HEADS)
    values = traced.arrays["v", 1].reshape(-1, N_KV_HEADS, HEAD_DIM)
    out = traced.arrays["attn_out", 1].reshape(-1, N_HEADS, HEAD_DIM)
    for head in range(N_HEADS):
        np.testing.assert_allclose(layer.probs[head] @ values[:, head // group], out[:, head], atol=1e-5)


@pytest.mark.parametrize("without", [(), (0,), (0, 3)], ids=str)
def test_entropy_is_a_share_of_the_largest_possible(traced, without):
    layer = traced.attention[0]
    probs = layer.probs.astype(np.float64)
    probs[:, :, list(without)] = 0
    probs /= np.maximum(probs.sum(axis=2, keepdims=True), 1e-30)
    found = layer.entropy(without)
    for query in (5, 20, 41):
        row = probs[:, query, : query + 1]
        bits = -np.sum(row * np.log(row, out=np.zeros_like(row), where=row > 0), axis=1)
        np.testing.assert_allclose(found[:, query], bits / np.log(query + 1 - len(without)), rtol=1e-4)
    assert np.isnan(found[:, 0]).all()


def test_few_maps_are_those_of_the_last_queries(llama, traced, monkeypatch):
    """Long prompts have more queries than there is memory for maps."""
    monkeypatch.setattr("tinyllm.trace.attention.MAP_BYTES", 4 * 10 * N_HEADS * 2 * (len(PROMPT) + 3))
    found = llama.trace(PROMPT, max_tokens=3, seed=5)
    first = found.attention[0].first_query
    assert first == traced.n_tokens - 10
    np.testing.assert_allclose(found.attention[0].probs, traced.attention[0].probs[:, first:], atol=1e-6)
    assert [note.key for note in found.notes] == ["note_maps"]
    assert AttentionReader(llama, None, len(PROMPT) + 3).max_queries == 10


def test_prompts_may_be_arrays(llama, traced):
    found = llama.trace(np.array(PROMPT), max_tokens=1, temperature=0)
    np.testing.assert_array_equal(found.residual, traced.residual[:, : len(PROMPT)])


def test_a_trace_leaves_the_model_as_it_was(llama):
    before = llama.logits(PROMPT)
    llama.trace(PROMPT, max_tokens=2)
    np.testing.assert_array_equal(llama.logits(PROMPT), before)


def test_a_budget_skips_layers_of_old_tokens_only(llama, traced):
    lens = read_lens(OutputHead(llama), traced.residual, [t.id for t in traced.tokens], {39: 5}, budget_s=0.0)
    assert lens.read[-1].all() and lens.read[2::2, -32:].all() and lens.read[:, 39].all()
    assert not lens.read[2, 0]
    assert not lens.complete
    np.testing.assert_array_equal(lens.ranks[-1, :39], 0)


@pytest.mark.parametrize("name", ["qwen2moe", "gpt-oss"])
def test_experts_are_those_that_the_router_scores_highest(name):
    with tiny_model(name) as model:
        found = model.trace(PROMPT, max_tokens=2, temperature=0)
    assert set(found.routers) == {0, 1}
    for router in found.routers.values():
        best = np.argsort(-router.probs, axis=1, kind="stable")[:, : router.ids.shape[1]]
        np.testing.assert_array_equal(router.ids, best)
        np.testing.assert_allclose(router.probs.sum(axis=1), 1, rtol=1e-5)
        chosen = np.take_along_axis(router.probs, best, 1)
        weights = chosen / chosen.sum(axis=1, keepdims=True) if name == "gpt-oss" else chosen
        np.testing.assert_allclose(router.weights, weights, rtol=1e-5)
    row = layer_rows(found, 5)[1]
    assert [expert["expert"] for expert in row["experts"]] == found.routers[0].ids[5].tolist()


def test_neurons_are_the_strongest_writers(llama, traced, reference):
    act = traced.arrays["ffn_act", 1][traced.positions[0]]
    strength = np.abs(act) * np.linalg.norm(reference.w["blk.1.ffn_down.weight"], axis=0)
    found = traced.neurons[1][0]
    np.testing.assert_allclose(found.strength[0], strength.max(), rtol=1e-4)
    vector = reference.w["blk.1.ffn_down.weight"][:, found.index[0]] * np.sign(found.activation[0])
    change = (vector * reference.w["output_norm.weight"]) @ reference.w["output.weight"].T
    assert found.promoted[0, 0] == change.argmax() and found.suppressed[0, 0] == change.argmin()


def test_stages_have_the_names_of_the_field(traced):
    assert {stage for stage, _ in traced.stages} <= set(STAGES)
    assert {("q", 0), ("attn_out", 1), ("resid_post", 1), ("logits", None)} <= set(traced.stages)


def test_kept_arrays_are_saved_under_their_stages(traced, tmp_path):
    traced.save(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as saved:
        np.testing.assert_array_equal(saved["blk.1.resid_post"], traced.residual[-1])
        np.testing.assert_array_equal(saved["blk.0.attn_scores"], traced.attention[0].probs)
        assert saved["blk.0.ffn_act"].shape[0] == traced.n_tokens
        assert saved["tokens"].tolist() == [token.id for token in traced.tokens]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stages": ["q", "qq"]}, "no stage 'qq'"), ({"max_tokens": -1}, "max_tokens"), ({"layers": [9]}, "no layer 9")],
)
def test_bad_options_are_refused_by_name(llama, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        llama.trace(PROMPT, **options)


def test_what_is_no_prompt_is_refused(llama):
    for prompt in (None, 5, ["a"], [1.5]):
        with pytest.raises(InvalidParameterError, match="a prompt is a text or a list of token ids"):
            llama.trace(prompt)


def test_encoders_are_refused():
    with (
        tinyllm.load(traced_models.FOLDER / "bert.gguf") as model,
        pytest.raises(UnsupportedModelError, match="encoder"),
    ):
        model.trace([2, 5, 6])


# Sampling


def test_the_funnel_is_the_way_of_the_real_sampler(llama, traced):
    recorder = Recorder()
    sampler = Sampler(SamplingParams(seed=5), llama.config.n_vocab, recorder=recorder)
    for token in PROMPT:
        sampler.accept(token)
    for i, step in enumerate(traced.steps):
        assert sampler.sample(traced.logits[i]).token == step.token
        sampler.accept(step.token)
        found = funnel(traced, i)
        assert [stage["stage"] for stage in found["stages"]] == [s.name for s in recorder.tokens[i].stages]
        draw = found["draw"]
        assert draw["token"] == step.token and draw["u"] == recorder.tokens[i].draw.u
        assert draw["below"] <= draw["u"] < draw["below"] + draw["probability"]


# Tokens and words


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b" the", "·the"), (b"\n", "⏎"), (b"\t\r", "⇥␍"), (b"\xe6\xad", "⟨e6 ad⟩"), ("é".encode(), "é"),
        ("\u202e".encode(), "⟨U+202E⟩"), (b"a\x1b[", "a⟨U+001B⟩["), (b"\xe2\x80\x8b", "⟨U+200B⟩"),
    ],
)  # fmt: skip
def test_pieces_are_visible_and_harmless(data, shown):
    assert display(data) == shown


def test_tokens_that_share_a_character_are_grouped_and_templates_marked(tmp_path):
    with tinyllm.load(write_chain_model(tmp_path / "chain.gguf", [b"Hello", b" world"])) as model:
        found = model.trace([{"role": "user", "content": "\u6b63 <|im_end|>"}], max_tokens=2, temperature=0)
        tokens = describe_tokens(model.tokenizer, model.tokenizer.encode("\u6b63a"), [], None)
    assert [token.group for token in tokens] == [0, 0, 0, None]
    typed = b"".join(token.data for token in found.tokens if not token.template and not token.generated)
    assert typed == "\u6b63 <|im_end|>".encode()
    assert [token.text for token in found.tokens if token.generated] == ["Hello", "·world"]
    assert all(token.control is False for token in found.tokens if not token.template)


def test_the_sentence_names_the_token_and_its_writers(traced):
    words = sentence(traced)
    assert words.startswith("After 40 tokens the model said ")
    assert "written by" in words or "number" in words
    assert "logit" in check(traced)


def test_rows_are_json_without_nan(traced):
    found = as_dict(traced, 0, stages=STAGES)
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text)["rows"][0]["layer"] == "embed"
    assert len(layer_rows(traced, 39)) == traced.n_layers + 1
    assert layer_rows(traced, 39)[1]["looks_at"][0]["share"] <= 1
