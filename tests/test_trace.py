"""Looking inside: observed values against unobserved runs and a float64 forward pass, and what the page is made of."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import reference_dir
from fake_model import write_chain_model

import tinyllm
from tinyllm.errors import InvalidParameterError, UnsupportedModelError
from tinyllm.sampler import Sampler, SamplingParams
from tinyllm.sampling.record import Recorder
from tinyllm.store.files import home
from tinyllm.trace import Trace
from tinyllm.trace.lens import read_lens
from tinyllm.trace.observation import STAGES
from tinyllm.trace.output_head import OutputHead
from tinyllm.trace.packing import MapCoding, code_maps
from tinyllm.trace.page import page
from tinyllm.trace.summary import as_dict, check, funnel, layer_rows, sentence
from tinyllm.trace.tokens import describe_tokens, display

PROMPT = np.random.default_rng(7).integers(3, 280, 45).tolist()
EVERY_BLOCK = ["llama-f32", "qwen2", "gemma2", "gemma3", "gpt-oss", "mixtral", "deepseek2", "phi2", "olmo2", "bloom"]
REAL = "The capital of France is"


def model_file(name: str) -> Path:
    path = reference_dir() / "conformance/models" / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    return path


@pytest.fixture(scope="module")
def llama():
    with tinyllm.load(model_file("llama-f32"), n_threads=2, kv_type="f32") as model:
        yield model


@pytest.fixture(scope="module")
def traced(llama) -> Trace:
    return llama.trace(PROMPT, max_tokens=3, seed=5, stages=STAGES)


class Reference:
    """The llama network in float64 from the file's tensors, keeping residual states and attention probabilities."""

    def __init__(self, path: Path, ids: list[int]):
        reader = gguf.GGUFReader(path)
        w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}

        def field(key):
            return reader.fields[f"llama.{key}"].contents()

        self.w, self.eps = w, field("attention.layer_norm_rms_epsilon")
        n_heads, n_kv = field("attention.head_count"), field("attention.head_count_kv")
        n_rot = field("rope.dimension_count")
        base = field("rope.freq_base") if "llama.rope.freq_base" in reader.fields else 10000.0
        n, positions = len(ids), np.arange(len(ids))
        angles = positions[:, None] * base ** (-np.arange(0, n_rot, 2) / n_rot)

        def rotated(x):
            a, b = x[..., 0:n_rot:2], x[..., 1:n_rot:2]
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            turned = np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(*x.shape[:-1], n_rot)
            return np.concatenate((turned, x[..., n_rot:]), -1)

        x = w["token_embd.weight"][ids]
        self.states, self.probs = [x], []
        for i in range(field("block_count")):
            h = self.norm(x, w[f"blk.{i}.attn_norm.weight"])
            q, k, v = (h @ w[f"blk.{i}.attn_{part}.weight"].T for part in "qkv")
            q, k = rotated(q.reshape(n, n_heads, -1)), rotated(k.reshape(n, n_kv, -1))
            k, v = (np.repeat(part.reshape(n, n_kv, -1), n_heads // n_kv, axis=1) for part in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
            scores[:, positions[:, None] < positions] = -np.inf
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            self.probs.append(probs)
            x = x + np.einsum("hqk,khd->qhd", probs, v).reshape(n, -1) @ w[f"blk.{i}.attn_output.weight"].T
            self.states.append(x)
            h = self.norm(x, w[f"blk.{i}.ffn_norm.weight"])
            gate = h @ w[f"blk.{i}.ffn_gate.weight"].T
            up = h @ w[f"blk.{i}.ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{i}.ffn_down.weight"].T
            self.states.append(x)

    def norm(self, x, weight):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.eps) * weight

    def lens(self, state: int) -> np.ndarray:
        output = self.w.get("output.weight", self.w["token_embd.weight"])
        return self.norm(self.states[state], self.w["output_norm.weight"]) @ output.T


@pytest.fixture(scope="module")
def reference(traced) -> Reference:
    return Reference(model_file("llama-f32"), [token.id for token in traced.tokens[:-1]])


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


@pytest.mark.parametrize("name", EVERY_BLOCK)
def test_observed_values_are_those_of_an_unobserved_run(name):
    with tinyllm.load(model_file(name), n_threads=2) as model:
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
        _parse(page(found))


@pytest.mark.parametrize(
    ("name", "kv_type"),
    [("llama-f32", "f16"), ("llama-f32", "q8_0"), ("gemma3", "f32"), ("gemma3", "f16"), ("deepseek2", "f16")],
)
def test_maps_are_read_from_every_kind_of_cache(name, kv_type):
    with tinyllm.load(model_file(name), kv_type=kv_type) as model:
        assert model.trace(PROMPT, max_tokens=1, temperature=0).attention_error < 1e-5


def test_windows_hide_what_lies_before_them():
    with tinyllm.load(model_file("gemma3")) as model:
        found = model.trace(PROMPT * 2, max_tokens=1, temperature=0)
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


def test_chunks_do_not_change_what_is_seen(traced):
    with tinyllm.load(model_file("llama-f32"), n_threads=1, kv_type="f32", n_batch=7) as model:
        found = model.trace(PROMPT, max_tokens=3, seed=5)
    np.testing.assert_array_equal(found.residual, traced.residual)
    np.testing.assert_array_equal(found.logits, traced.logits)
    np.testing.assert_allclose(found.attention[1].probs, traced.attention[1].probs, atol=1e-6)


def test_a_trace_leaves_the_model_as_it_was(llama):
    before = llama.logits(PROMPT)
    llama.trace(PROMPT, max_tokens=2)
    np.testing.assert_array_equal(llama.logits(PROMPT), before)


def test_a_budget_skips_layers_of_old_tokens_only(llama, traced):
    lens = read_lens(OutputHead(llama), traced.residual, [t.id for t in traced.tokens], {44: 5}, budget_s=0.0)
    assert lens.read[-1].all() and lens.read[2::2, -32:].all() and lens.read[:, 44].all()
    assert not lens.read[2, 0]
    assert not lens.complete
    np.testing.assert_array_equal(lens.ranks[-1, :44], 0)


def test_experts_are_those_that_the_router_scores_highest():
    with tinyllm.load(model_file("mixtral")) as model:
        found = model.trace(PROMPT, max_tokens=1, temperature=0)
    for router in found.routers.values():
        best = np.argsort(-router.probs, axis=1, kind="stable")[:, : router.ids.shape[1]]
        np.testing.assert_array_equal(router.ids, best)
        np.testing.assert_allclose(router.weights.sum(axis=1), 1, rtol=1e-5)


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


def test_encoders_are_refused():
    with tinyllm.load(model_file("bert")) as model, pytest.raises(UnsupportedModelError, match="encoder"):
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
    assert words.startswith("After 45 tokens the model said ")
    assert "written by" in words or "number" in words
    assert "logit" in check(traced)


def test_rows_are_json_without_nan(traced):
    found = as_dict(traced, 0, stages=STAGES)
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text)["rows"][0]["layer"] == "embed"
    assert len(layer_rows(traced, 44)) == traced.n_layers + 1
    assert layer_rows(traced, 44)[1]["looks_at"][0]["share"] <= 1


# The page


class _Parser(HTMLParser):
    VOID = frozenset({"meta", "td", "tr", "th", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.links, self.texts, self.policy = [], [], {}, ""
        self._id = None

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [value for key, value in attrs.items() if key in ("src", "href")]
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policy = attrs["content"]
        if tag not in self.VOID:
            self.open.append(tag)
        self._id = attrs.get("id") if tag == "script" else None

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self._id:
            self.texts[self._id] = self.texts.get(self._id, "") + data


def _parse(text: str) -> _Parser:
    parser = _Parser()
    parser.feed(text)
    assert parser.open == []
    return parser


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text), -15)


def test_the_page_is_one_file_without_network(traced):
    text = page(traced, "tinyllm trace")
    parser = _parse(text)
    assert parser.links == []
    assert parser.policy.startswith("default-src 'none'")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert len(text) < 500_000
    data = json.loads(parser.texts["data"])
    assert len(data["tokens"]) == len(traced.tokens)
    ranks = np.frombuffer(_unpacked(parser.texts["lens-ranks"]), np.int32).reshape(traced.lens.ranks.shape)
    np.testing.assert_array_equal(ranks, traced.lens.ranks)


def test_the_script_is_small_and_writes_text_only():
    script = (Path(tinyllm.__file__).parent / "trace/page.js").read_text("utf-8")
    assert len(script.encode()) <= 60_000
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_hostile_text_stays_text(tmp_path):
    bad = b"</script><img src=x onerror=alert(1)>"
    with tinyllm.load(write_chain_model(tmp_path / "chain.gguf", [bad, b"{{data}}<!--"])) as model:
        found = model.trace("<script>alert(1)</script>\u2028{{script}}\n", max_tokens=3, temperature=0)
        text = page(found, "<b>")
    assert "<img" not in text and "<b>" not in text and "<!--" not in text
    parser = _parse(text)
    assert parser.links == []
    assert bad.decode().replace(" ", "·") in [token["text"] for token in json.loads(parser.texts["data"])["tokens"]]


@pytest.mark.parametrize(
    ("coding", "limit"),
    [(MapCoding(6), 0.017), (MapCoding(4), 0.068), (MapCoding(4, least=0.004), 0.068)],
    ids=["6 bits", "4 bits", "4 bits without small ones"],
)
def test_coded_maps_are_near_the_real_ones(traced, coding, limit):
    layer = traced.attention[0]
    codes = code_maps(layer, coding)
    if coding.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=1).ravel()
    visible = np.tril(np.ones(layer.probs.shape[1:], bool))
    got = (codes[: visible.sum() * layer.n_heads].reshape(layer.n_heads, -1) / (2**coding.bits - 1)) ** 2
    assert np.abs(got - layer.probs[:, visible]).max() < limit


# A real model


@pytest.mark.model
def test_a_real_model_says_paris_and_shows_its_sink(smollm2_path):
    with tinyllm.load(smollm2_path) as model:
        found = model.trace(REAL, max_tokens=2, temperature=0, lens_budget_s=2.0)
        logits = model.logits([token.id for token in found.tokens[:-1]])
    np.testing.assert_array_equal(found.logits[0], logits[found.positions[0]])
    assert found.tokens[5].text == "·Paris"
    assert 0 in found.sinks
    assert found.attention_error < 1e-5
    for part in found.contributions:
        assert abs(part.rounding) < 0.01 * abs(part.logit)  # activations of the last product have 8 bits
    assert "·Paris" in sentence(found)


@pytest.mark.model
def test_a_page_of_200_tokens_is_below_five_megabytes(smollm2_path):
    words = "The lighthouse keeper wrote a letter about the storm, the island and the long winter. " * 12
    with tinyllm.load(smollm2_path) as model:
        ids = model.tokenizer.encode(words)[:200]
        assert len(page(model.trace(ids, max_tokens=4, seed=1, lens_budget_s=1.5)).encode()) < 5_000_000


@pytest.mark.model
def test_the_command_prints_rows_and_writes_files(tinyllm, smollm2_path, tmp_path):
    env = {"TINYLLM_HOME": str(home())}  # where the kernels are
    files = ["--html", tmp_path / "t.html", "--save", tmp_path / "t.npz", "--layers", "0,28-", "--stages", "q,ffn_act"]
    ran = tinyllm("trace", "-m", smollm2_path, "--raw", REAL, "-n", "2", "--temp", "0", *files, env=env)
    assert ran.returncode == 0, ran.stderr
    assert "·Paris" in ran.stdout and "looks at" in ran.stdout
    assert all(len(line) <= 80 for line in ran.stdout.splitlines())
    _parse((tmp_path / "t.html").read_text("utf-8"))
    with np.load(tmp_path / "t.npz") as saved:
        assert "blk.28.q" in saved and "blk.5.q" not in saved
    ran = tinyllm("trace", "-m", smollm2_path, REAL, "-n", "1", "--seed", "2", "--json", env=env)
    assert json.loads(ran.stdout)["steps"][0]["sampling"]["draw"]["u"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--stages", "nothing", "x"], "no stage"), (["--raw", "--system", "s", "x"], "--raw uses no chat template")],
)
def test_wrong_usage_is_told_before_a_model_is_loaded(tinyllm, arguments, message):
    ran = tinyllm("trace", *arguments)
    assert ran.returncode == 2
    assert message in ran.stderr
