"""Every text that a trace shows, in each language: a key goes in, a sentence comes out, for page and terminal alike.

Names that the field writes in English everywhere (attn, ffn, logit, top-k) stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LANGUAGES = ("en", "zh")
DEFAULT = "en"

# key: (English, Chinese); `{name}` is filled in.
_TEXTS = {
    # What both show.
    "percent": ("{n} %", "{n}%"),
    "embedding": ("embedding", "词嵌入"),
    "layer": ("layer", "层"),
    "layer_n": ("layer {n}", "第 {n} 层"),
    "not_read": ("not read", "未读取"),
    "greedy": ("greedy", "贪心"),
    "temperature": ("temperature", "温度"),
    "penalties": ("penalties", "惩罚项"),
    "settings": (
        "temperature {temperature:g}, top-k {top_k}, top-p {top_p:g}, min-p {min_p:g}",
        "温度 {temperature:g}，top-k {top_k}，top-p {top_p:g}，min-p {min_p:g}",
    ),
    # One step in words.
    "said": ("After {n} tokens the model said `{token}`", "读完 {n} 个 token 后，模型说出了 `{token}`"),
    "would_say": ("After {n} tokens the model would say `{token}`", "读完 {n} 个 token 后，模型会说 `{token}`"),
    "next_was": (" ({p}; next `{other}` {q}).", "（{p}；其次是 `{other}`，{q}）。"),
    "first_was": (" ({p}; first was `{other}` {q}).", "（{p}；排第一的是 `{other}`，{q}）。"),
    "drawn_all_the_same": (
        " It was number {n} of the distribution, and drawn all the same.",
        "它在分布中只排第 {n}，但抽样仍然抽中了它。",
    ),
    "leads_at_once": (" It leads from the embedding on.", "它从词嵌入开始就一直领先。"),
    "leads_from": (" It leads from {state} on.", "它从 {state} 起一直领先。"),
    "written_by": (" Most of its logit was written by {a}.", "它的 logit 主要由 {a} 写入。"),
    "written_by_two": (" Most of its logit was written by {a} and {b}.", "它的 logit 主要由 {a} 和 {b} 写入。"),
    "check": (
        "Σ parts {sum:.3f} = logit {logit:.3f} (rounding of the last product {rounding:+.3f})",
        "Σ 各部分 {sum:.3f} = logit {logit:.3f}（最后一次乘积的舍入误差 {rounding:+.3f}）",
    ),
    "check_centred": (
        "Σ parts {sum:.3f} = logit {logit:.3f} − vocabulary's mean {mean:.3f}"
        " (rounding of the last product {rounding:+.3f})",
        "Σ 各部分 {sum:.3f} = logit {logit:.3f} − 词表均值 {mean:.3f}（最后一次乘积的舍入误差 {rounding:+.3f}）",
    ),
    # Notes.
    "note_neighbours": (
        "nearest tokens of embeddings are left out: the table has {millions:.0f} M numbers",
        "未查找词嵌入的最近邻：词嵌入表有 {millions:.0f} 百万个数",
    ),
    "note_lens": (
        "the lens skips layers of older tokens to stay within its time",
        "为了不超出时间预算，透镜跳过了较早 token 的部分层",
    ),
    "note_maps": (
        "attention maps begin at query {query}: those of the whole prompt would not fit in memory",
        "注意力图从查询 {query} 开始：整个提示词的图放不进内存",
    ),
    "maps": ("Attention maps: ", "注意力图："),
    "maps_bits": ("{bits} bits per value", "每个值 {bits} 比特"),
    "maps_least": (", shares below {percent:g} % are dropped", "，低于 {percent:g}% 的份额已略去"),
    "maps_top": (", only the {n} largest of each query are kept", "，每个查询只保留最大的 {n} 个"),
    "maps_every": (", only every second layer has maps", "，每两层只保存一层"),
    "maps_last": (", only the last {n} queries have maps", "，只保存最后 {n} 个查询"),
    "maps_layers": (", only the layers that were asked for have maps", "，只保存指定的层"),
    "maps_end": (".", "。"),
    # The terminal.
    "view_layers": ("{n} layers", "{n} 层"),
    "view_heads": ("{n} heads on {kv} KV", "{n} 个头共用 {kv} 组 KV"),
    "view_tokens": ("{n} tokens + {m} new", "{n} 个 token + 新生成 {m} 个"),
    "view_at": ("at {i} {token}, which predicts {next}", "位置 {i} {token}，预测位置 {next}"),
    "view_more": ("… {n} more …", "… 另有 {n} 个 …"),
    "view_cut": ("… {n} layers, the lead does not change …", "… {n} 层，领先者不变 …"),
    "view_cut_one": ("… 1 layer, the lead does not change …", "… 1 层，领先者不变 …"),
    "view_entropy": ("heads: entropy", "各头的熵"),
    "view_looks_at": ("looks at (sink apart)", "关注（注意力汇另计）"),
    "view_near": ("near", "近似"),
    "view_sink": ("sink {n}%", "汇 {n}%"),
    "view_lens": ("lens", "透镜"),
    "view_second": ("2nd", "第二"),
    "view_rank": ("rank", "排名"),
    "view_stage": ("stage", "阶段"),
    "view_width": ("width", "宽度"),
    "view_norm": ("norm", "范数"),
    "view_min": ("min", "最小"),
    "view_max": ("max", "最大"),
    "view_keeps": ("keeps {n}", "保留 {n}"),
    "view_temperature": ("temp", "温度"),
    "view_hint": (
        "attention maps and all tokens: --html FILE; arrays: --save FILE.npz",
        "注意力图和全部 token：--html 文件；数组：--save 文件.npz",
    ),
    # The page.
    "page_title": ("{model}: a trace", "{model}：内部追踪"),
    "page_no_script": (
        "This page draws its charts with JavaScript, which is switched off. The tokens:",
        "本页用 JavaScript 绘图，而它已被关闭。token 如下：",
    ),
    "page_piece": ("piece", "token"),
    "page_attention_check": (
        "Attention: Σ α·v differs from the computed attn_out by {error:.1g} (relative RMS).",
        "注意力：Σ α·v 与实际算出的 attn_out 相差 {error:.1g}（相对均方根）。",
    ),
    "page_step_check": ("Step {n}: {check}.", "第 {n} 步：{check}。"),
    "page_facts": ("{architecture} · {quantization} · seed {seed} · {settings}",
                   "{architecture} · {quantization} · 随机种子 {seed} · {settings}"),
    "page_lens": ("What each layer would say", "每一层会说什么（logit 透镜）"),
    "page_lens_note": (
        "top token of each state; colour: rank of the answer",
        "每个状态的首选 token；颜色：答案的排名",
    ),
    "page_halves": ("half layers", "半层"),
    "page_table": ("as table", "表格"),
    "page_find": ("find token", "查找 token"),
    "page_theme": ("theme", "主题"),
    "page_close": ("close", "关闭"),
    "page_selected": ("selected", "当前选中"),
    "page_stages": ("Stages", "各阶段"),
    "page_heads": ("Attention heads: {n} on {kv} keys and values", "注意力头：{n} 个头共用 {kv} 组键和值"),
    "page_sees_last": (", sees the last {n}", "，只看最近 {n} 个"),
    "page_neurons": ("Strongest neurons", "最强的神经元"),
    "page_experts": ("Experts", "专家"),
    "page_nearest": ("Nearest embeddings", "最近的词嵌入"),
    "page_funnel": ("How the token was chosen", "token 是怎样选出的"),
    "page_writes": ("Who wrote the logit", "logit 由谁写入"),
    "page_choices": ("Generated tokens", "生成的 token"),
    "page_curve": ("Rank along the layers", "排名随层的变化"),
    "page_overview": ("All heads", "所有注意力头"),
    "page_raw": ("raw", "原始"),
    "page_apart": ("without sinks", "去掉注意力汇"),
    "page_value": ("value-weighted", "按值加权"),
    "page_measured": ("measured", "实测"),
    "page_derived": ("derived", "推算"),
    "page_recomputed": ("recomputed", "重新计算"),
    "page_no_inflate": (
        "This browser cannot unpack the numbers (DecompressionStream is missing): texts, sampling and contributions"
        " still work.",
        "此浏览器无法解压数据（缺少 DecompressionStream）：文字、采样和贡献仍可查看。",
    ),
    "page_no_map": ("No map of this layer is stored (see the note below).", "没有保存这一层的注意力图（见页尾说明）。"),
    "page_no_row": ("No map of this query is stored.", "没有保存这个查询的注意力。"),
    "page_not_cause": (
        "A reading of the sum with the final norm held fixed, not a statement about causes.",
        "这是在固定最终归一化系数时对求和的一种读法，并不说明因果。",
    ),
    "page_attention_note": (
        "Where attention looks is not an explanation of what the model does.",
        "注意力看向哪里，并不等于解释了模型在做什么。",
    ),
    "page_derived_note": (
        "Maps, lens and contributions are derived from measured states; everything else is measured.",
        "注意力图、透镜和贡献由实测状态推算得出，其余均为实测。",
    ),
    "page_what_if": ("What if", "假设"),
    "page_reset": ("reset", "还原"),
    "page_rest": ("rest of the vocabulary", "词表其余部分"),
    "page_rank_of": ("rank {n}", "排名 {n}"),
    "page_token": ("token {i} {token}, id {id}, bytes {bytes}", "token {i} {token}，编号 {id}，字节 {bytes}"),
    "page_surprise": (", {n} bits of surprise", "，惊异度 {n} 比特"),
    "page_is_sink": ("a sink", "注意力汇"),
    "page_rows": ("{n} rows, {m} tokens", "{n} 行，{m} 个 token"),
    "page_at_token": ("{state}, token {i} '{token}'", "{state}，token {i} “{token}”"),
    "page_lens_words": ("'{token}' {p}, answer '{answer}' at rank {rank}", "“{token}” {p}，答案“{answer}”排第 {rank}"),
    "page_first": ("first", "首选"),
    "page_second": ("second", "次选"),
    "page_rank_of_answer": ("rank of answer", "答案排名"),
    "page_entropy_bits": ("entropy, bits", "熵（比特）"),
    "page_kl_bits": ("KL to final, bits", "与最终分布的 KL 散度（比特）"),
    "page_behind_attention": ("{layer}, behind attention", "{layer}，注意力之后"),
    "page_crumb": ("step {step} › token {i} {token}", "第 {step} 步 › token {i} {token}"),
    "page_id": ("id {id}", "编号 {id}"),
    "page_bytes": ("bytes {bytes}", "字节 {bytes}"),
    "page_predicts": ("predicts {i} {token}", "预测 {i} {token}"),
    "page_would_say": ("Would say", "此处会说"),
    "page_answer_rank": ("answer {token}: rank {rank}", "答案 {token}：第 {rank} 名"),
    "page_entropy": ("entropy {n} bits", "熵 {n} 比特"),
    "page_kl": ("KL to the end {n} bits", "与最终分布的 KL 散度 {n} 比特"),
    "page_active_above": (
        "{p} of the neurons above a tenth of the largest",
        "{p} 的神经元超过最大值的十分之一",
    ),
    "page_active": ("{p} active", "{p} 活跃"),
    "page_carriers": (
        "{a} carry half of the energy, {b} carry 90 %",
        "{a} 个神经元占一半能量，{b} 个占 90%",
    ),
    "page_looks_at": ("looks at {list}", "关注 {list}"),
    "page_ends_at": ("{token} ends at rank {rank}", "{token} 最终排第 {rank}"),
    "page_neuron": ("neuron", "神经元"),
    "page_activation": ("act.", "激活值"),
    "page_promotes": ("promotes", "提升"),
    "page_suppresses": ("suppresses {list}", "压低 {list}"),
    "page_expert": ("expert {n}", "专家 {n}"),
    "page_chosen_weight": ("chosen, weight {w}", "被选中，权重 {w}"),
    "page_not_chosen": ("not chosen", "未选中"),
    "page_stage": ("stage", "阶段"),
    "page_width": ("width", "宽度"),
    "page_norm": ("norm", "范数"),
    "page_min": ("min", "最小"),
    "page_max": ("max", "最大"),
    "page_last_token": ("last token", "最后一个 token"),
    "page_head": ("head {n}", "头 {n}"),
    "page_kv": ("KV {n}", "KV {n}"),
    "page_head_title": ("layer {l} › head {h} (KV {g})", "第 {l} 层 › 头 {h}（KV {g}）"),
    "page_hatched": ("hatched: not visible to the query", "斜线：该查询看不到"),
    "page_hatched_sinks": ("hatched: not visible to the query, or a sink", "斜线：该查询看不到，或是注意力汇"),
    "page_query": ("Query {i} {token} looks at", "查询 {i} {token} 关注"),
    "page_sinks": ("sinks {p}", "注意力汇 {p}"),
    "page_window": ("window {n}", "窗口 {n}"),
    "page_on_text": ("The same row on the text", "同一行，标在文本上"),
    "page_head_words": ("layer {l}, head {h}, query {i}: {words}", "第 {l} 层，头 {h}，查询 {i}：{words}"),
    "page_overview_words": ("{what} of {n} layers by {m} heads", "{n} 层 × {m} 个头的{what}"),
    "page_overview_note": ("columns: layers, rows: heads; click opens one", "列为层，行为头；点击可打开"),
    "page_stat_entropy": ("entropy", "熵"),
    "page_stat_sink": ("share of sinks", "注意力汇占比"),
    "page_stat_distance": ("distance", "距离"),
    "page_stat_previous": ("previous token", "前一个 token"),
    "page_stat_induction": ("induction", "归纳"),
    "page_step_chosen": (
        "step {step}: after {i} {token}, chosen {chosen}",
        "第 {step} 步：在 {i} {token} 之后，选中 {chosen}",
    ),
    "page_keeps": ("keeps {a} of {b}: {p}", "从 {b} 个中保留 {a} 个：{p}"),
    "page_candidates": ("{n} candidates", "{n} 个候选"),
    "page_most_probable": ("most probable", "概率最高者"),
    "page_draw": ("draw", "抽样"),
    "page_falls_on": ("the random number {u} falls on {token}", "随机数 {u} 落在 {token} 上"),
    "page_u_in": ("u = {u} in [{a}, {b})", "u = {u}，落在 [{a}, {b})"),
    "page_over_mean": ("{token}, over the mean of the vocabulary", "{token}，相对词表均值"),
    "page_uncentred": ("{token}, raw", "{token}，原始值"),
    "page_sum_so_far": ("sum so far", "累计"),
    "page_none_generated": ("none were asked for", "没有要求生成"),
    "page_instead": ("Instead of {token}", "候选（选中 {token}）"),
    "page_instead_number": ("Instead of {token} (number {n})", "候选（选中 {token}，排第 {n}）"),
    "page_cell": (
        "answer {token} rank {rank}, entropy {entropy} bits, KL {kl}",
        "答案 {token} 第 {rank} 名，熵 {entropy} 比特，KL {kl}",
    ),
    "page_not_found": ("not found", "未找到"),
    "page_keys": ("Keys", "按键"),
    "page_keys_note": ("Letters act while a chart has the focus.", "图表获得焦点时，字母键才起作用。"),
    "page_key_token": ("token", "token"),
    "page_key_layer": ("layer", "层"),
    "page_key_head": ("head", "注意力头"),
    "page_key_step": ("next or previous generated token", "下一个或上一个生成的 token"),
    "page_key_open": ("open the head", "打开注意力头"),
    "page_key_close": ("close, go up", "关闭，返回上层"),
    "page_key_sinks": ("set sinks apart", "去掉注意力汇"),
    "page_key_value": ("weight by value", "按值加权"),
    "page_key_theme": ("dark or light", "深色或浅色"),
    "page_key_find": ("find a token", "查找 token"),
    "page_key_help": ("these keys", "显示这些按键"),
}  # fmt: skip

TEXTS = {language: {key: texts[i] for key, texts in _TEXTS.items()} for i, language in enumerate(LANGUAGES)}
"""By language and key."""

_SHARED_WITH_PAGE = ("percent", "embedding", "layer", "layer_n", "not_read", "greedy", "temperature", "penalties")


def say(language: str, key: str, **values: Any) -> str:
    """A text with its values filled in."""
    return TEXTS[language][key].format(**values)


def page_texts(language: str) -> dict[str, str]:
    """What the page's script needs, by the names that it uses: without `page_`."""
    table = TEXTS[language]
    own = {key.removeprefix("page_"): value for key, value in table.items() if key.startswith("page_")}
    return own | {key: table[key] for key in _SHARED_WITH_PAGE}


def percent(p: float, language: str = DEFAULT) -> str:
    """A probability: `62 %`, `0.4 %`, `<0.1 %`."""
    value = 100 * p
    number = f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.1 else "<0.1"
    return say(language, "percent", n=number)


@dataclass(frozen=True)
class Note:
    """Something that readers of a trace must know; `str(note)` is English."""

    key: str
    values: tuple[tuple[str, Any], ...] = ()

    def text(self, language: str = DEFAULT) -> str:
        return say(language, self.key, **dict(self.values))

    def __str__(self) -> str:
        return self.text()
