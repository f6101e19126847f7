"""The page of a trace: one file, safe whatever is in a prompt, and with what was seen in it, in two languages."""

from __future__ import annotations

import base64
import json
import re
import shutil
import string
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from fake_model import write_chain_model
from traced_models import PROMPT, decoders, few_tokens, tiny_model, write_llama

import tinyllm
from tinyllm.errors import InvalidParameterError
from tinyllm.trace import Trace
from tinyllm.trace.packing import MapCoding, coarse, code_maps
from tinyllm.trace.page import page, page_script
from tinyllm.trace.summary import check, funnel, sentence
from tinyllm.trace.texts import LANGUAGES, TEXTS, Note, page_texts, percent, say


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Trace:
    path = tmp_path_factory.mktemp("page") / "llama.gguf"
    write_llama(path)
    with few_tokens(path) as model:
        return model.trace(PROMPT, max_tokens=3, seed=5)


class Page(HTMLParser):
    """What a browser sees: links, the content policy, scripts by id; elements must nest."""

    VOID = frozenset({"meta", "td", "tr", "th", "br"})

    def __init__(self, text: str):
        super().__init__()
        self.open, self.links, self.scripts, self.policy, self.language = [], [], {}, "", ""
        self._id = None
        self.feed(text)
        assert self.open == []
        self.data = json.loads(self.scripts["data"])

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [value for key, value in attrs.items() if key in ("src", "href")]
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policy = attrs["content"]
        if tag == "html":
            self.language = attrs["lang"]
        if tag not in self.VOID:
            self.open.append(tag)
        self._id = attrs.get("id") if tag == "script" else None

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self._id:
            self.scripts[self._id] = self.scripts.get(self._id, "") + data

    def numbers(self, name: str, dtype: type, *shape: int) -> np.ndarray:
        return np.frombuffer(zlib.decompress(base64.b64decode(self.scripts[name]), -15), dtype).reshape(shape)


def test_it_is_one_file_without_network(traced):
    text = page(traced, "tinyllm trace")
    found = Page(text)
    assert found.links == []
    assert found.policy.startswith("default-src 'none'")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert len(text) < 500_000
    assert len(found.data["tokens"]) == len(traced.tokens)
    assert found.data["command"] == "tinyllm trace"


def test_numbers_are_those_of_the_trace(traced):
    found, lens = Page(page(traced)), traced.lens
    np.testing.assert_array_equal(found.numbers("lens-ranks", np.int32, *lens.ranks.shape), lens.ranks)
    np.testing.assert_array_equal(found.numbers("lens-ids", np.int32, *lens.top_ids.shape), lens.top_ids)
    entropy = found.numbers("lens-entropy", np.uint16, *lens.entropy.shape) / 2000
    np.testing.assert_allclose(entropy, lens.entropy, atol=1e-3)
    norms = found.numbers("norms", np.float32, *traced.norms.shape)
    np.testing.assert_allclose(norms, traced.norms, rtol=2**-12)
    widths = dict.fromkeys((stage for stage, *_ in found.data["shapes"]["stages"]), 0)
    assert set(widths) == {stage for stage, _ in traced.stages} - {"logits", "final_norm"}
    row = found.numbers("row-1", np.uint8, traced.n_layers, 4, traced.positions[1] + 1) / 255
    probs = [layer.probs[:, traced.positions[1], : traced.positions[1] + 1] for layer in traced.attention]
    np.testing.assert_allclose(row**2, probs, atol=5e-3)


def test_it_tells_the_way_of_each_token(traced):
    steps = Page(page(traced)).data["steps"]
    assert [step["token"] for step in steps] == [step.token for step in traced.steps]
    for i, step in enumerate(steps):
        assert step["sentence"] == sentence(traced, i) and step["check"] == check(traced, i)
        assert step["funnel"]["draw"]["u"] == funnel(traced, i)["draw"]["u"]
        assert [stage["stage"] for stage in step["funnel"]["stages"]] == ["top_k", "top_p", "min_p", "temperature"]
        assert sum(step["parts"]) == pytest.approx(traced.contributions[i].centred.sum(), abs=1e-2)
        assert len(step["alternatives"]) == 10


@pytest.mark.parametrize("name", decoders())
def test_every_architecture_has_a_page(name):
    with tiny_model(name) as model:
        found = Page(page(model.trace(PROMPT[:20], max_tokens=2, seed=1)))
    layers = found.data["attention"]
    assert [f"attn-{i}" in found.scripts for i in range(len(layers))] == [layer is not None for layer in layers]


def test_windows_groups_and_experts_are_on_it():
    with tiny_model("gpt-oss") as model:
        traced = model.trace(PROMPT, max_tokens=1, temperature=0)
    found = Page(page(traced))
    assert [layer["window"] for layer in found.data["attention"]] == [16, 0]
    assert {(layer["heads"], layer["kv"]) for layer in found.data["attention"]} == {(4, 2)}
    n_experts, ids, weights = found.data["shapes"]["routers"]["1"]
    assert ids == traced.routers[1].ids.tolist()
    np.testing.assert_allclose(weights, traced.routers[1].weights, rtol=1e-3)
    probs = found.numbers("router-1", np.uint16, traced.n_tokens, n_experts) / 65535
    np.testing.assert_allclose(probs, traced.routers[1].probs, atol=1e-5)


def test_what_was_asked_for_is_shown(traced):
    found = Page(page(traced, layers=[1], heads=[2, 0], selected=7))
    assert "attn-1" in found.scripts and "attn-0" not in found.scripts
    assert found.data["shown_heads"] == [0, 2] and found.data["selected"] == 7
    assert "layers that were asked for" in found.data["about_maps"]
    assert Page(page(traced)).data["selected"] == traced.positions[0]


def test_maps_that_do_not_fit_are_coded_more_coarsely_and_told(traced, monkeypatch):
    whole = Page(page(traced))
    maps = sum(len(text) for name, text in whole.scripts.items() if name.startswith("attn"))
    monkeypatch.setattr("tinyllm.trace.page.LIMIT", len(page(traced)) - maps // 4)
    found = Page(page(traced))
    assert found.data["coding"]["bits"] == 4
    assert sum(len(text) for name, text in found.scripts.items() if name.startswith("attn")) <= 0.75 * maps
    assert whole.data["about_maps"] == "Attention maps: 6 bits per value."
    assert found.data["about_maps"].startswith("Attention maps: 4 bits per value")


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


def test_coarse_numbers_have_twelve_bits():
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32) * np.float32(10) ** np.arange(-5, 5).repeat(
        100
    )
    found = coarse(values)
    np.testing.assert_allclose(found, values, rtol=2**-12)
    assert not (found.view(np.uint32) & 0xFFF).any()


# Hostile text


def test_the_script_is_small_and_writes_text_only():
    script = page_script()
    assert len(script.encode()) <= 60_000
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


@pytest.mark.parametrize("language", LANGUAGES)
def test_hostile_text_stays_text(tmp_path, language):
    bad = b"</script><img src=x onerror=alert(1)>"
    with tinyllm.load(write_chain_model(tmp_path / "chain.gguf", [bad, b"{{data}}<!--"])) as model:
        found = model.trace("<script>alert(1)</script>\u2028{{script}}{token}\n", max_tokens=3, temperature=0)
        text = page(found, "<b>", language=language)
    assert "<img" not in text and "<b>" not in text and "<!--" not in text
    seen = Page(text)
    assert seen.links == []
    assert bad.decode().replace(" ", "·") in [token["text"] for token in seen.data["tokens"]]


# In a browser


def opened(text: str, path: Path, place: str) -> str:
    """The document after its script has run in a browser without a window; fails if the console says anything."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs chromium")
    path.write_text(text, encoding="utf-8")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
    ]
    command = [browser, *options, f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", f"{path.as_uri()}{place}"]
    ran = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=120)
    assert "CONSOLE" not in ran.stderr
    assert 'data-ready="yes"' in ran.stdout
    return ran.stdout.partition('id="page"')[2].partition("<script")[0]


@pytest.mark.parametrize(
    ("place", "language"),
    [("", "en"), ("#t=7&l=2&h=1&m=apart", "zh"), ("#t=39&l=4&s=1&h=3&m=value", "en")],
    ids=["start", "head", "by value"],
)
def test_it_runs_in_a_browser(traced, tmp_path, place, language):
    seen = opened(page(traced, language=language), tmp_path / "page.html", place)
    assert sentence(traced, 1 if "s=1" in place else 0, language) in seen
    assert say(language, "page_overview") in seen
    assert (say(language, "page_on_text") in seen) is ("h=" in place)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("gpt-oss", ["expert 4", "sees the last 16"]), ("qwen35moe", ["expert 3"])],
    ids=["gpt-oss", "qwen35moe"],
)
def test_features_of_architectures_are_drawn(tmp_path, name, shown):
    with tiny_model(name) as model:
        text = page(model.trace(PROMPT, max_tokens=1, temperature=0))
    seen = opened(text, tmp_path / "page.html", "#l=2&t=20")
    assert all(words in seen for words in shown)


# Languages


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def test_languages_have_the_same_keys_and_places():
    english = TEXTS["en"]
    for language in LANGUAGES:
        assert set(TEXTS[language]) == set(english)
        for key, text in TEXTS[language].items():
            assert text and placeholders(text) == placeholders(english[key]), key


def test_chinese_is_chinese():
    chinese = re.compile("[\u4e00-\u9fff]")
    same = {key for key, text in TEXTS["zh"].items() if not chinese.search(text)}
    assert same == {"percent", "maps_end", "page_kv", "page_piece", "page_at_token", "page_key_token"}


def test_the_script_asks_for_words_that_exist():
    script = page_script()
    asked = set(re.findall(r"\bword\('(\w+)'", script)) - {"stat_", "key_"}
    asked |= {f"stat_{name}" for name in re.search(r"STATISTICS = \[(.*?)\]", script)[1].replace("'", "").split(", ")}
    keys = script[script.index("const KEYS") : script.index("const T =")]
    asked |= {f"key_{name}" for name in re.findall(r"\['[^']+', '(\w+)'\]", keys)}
    assert asked <= set(page_texts("en"))
    unasked = set(page_texts("en")) - asked
    assert all(
        f"'{key}'" in script for key in unasked - {"title", "no_script", "piece", "attention_check", "step_check"}
    )


@pytest.mark.parametrize("language", LANGUAGES)
def test_pages_speak_one_language(traced, language):
    found = Page(page(traced, language=language))
    assert found.language == language
    assert found.data["texts"] == page_texts(language)
    assert found.data["steps"][0]["sentence"] == sentence(traced, 0, language)
    assert found.data["about_maps"].startswith(say(language, "maps"))


def test_languages_that_there_are_none_of_are_refused(traced):
    with pytest.raises(InvalidParameterError, match="en, zh"):
        page(traced, language="xx")


def test_sentences_in_chinese(traced):
    assert sentence(traced, 0, "zh").startswith("读完 40 个 token 后，模型说出了 `")
    assert "词表均值" in check(traced, 0, "zh")
    assert Note("note_maps", (("query", 7),)).text("zh").startswith("注意力图从查询 7 开始")
    assert str(Note("note_maps", (("query", 7),))).startswith("attention maps begin at query 7")


@pytest.mark.parametrize(
    ("p", "english", "chinese"),
    [(0.62, "62 %", "62%"), (0.0042, "0.4 %", "0.4%"), (0.0994, "9.9 %", "9.9%"), (1e-5, "<0.1 %", "<0.1%")],
)
def test_probabilities_in_words(p, english, chinese):
    assert (percent(p), percent(p, "zh")) == (english, chinese)
