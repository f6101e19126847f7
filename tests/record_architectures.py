"""Writes the tiny models of tests/data/architectures and the numbers that llama.cpp computes on them.

    python tests/record_architectures.py REFERENCE

REFERENCE is the folder of the large collections, whose conformance/ writes models and drives llama.cpp; needs numpy,
gguf and llama-cpp-python. Each model has random weights and one family's peculiarities; the files are F16, and the
numbers are those of their F32 twins.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "data" / "architectures"
N_PROMPT, N_KEPT, N_VOCAB = 40, 6, 48
SIZES = {"E": 40, "H": 4, "G": 2, "D": 10, "F": 20, "V": N_VOCAB, "X": 5, "FX": 12, "FS": 20}


def add_models(make) -> list[str]:
    """Fill the writer's table; the names of the models."""
    make.MODELS.clear()
    make.SIZES.update(SIZES)
    add_vocab = make.add_vocab

    def add_small_vocab(writer, kind: str, n: int) -> None:
        """Ids are all that is needed, but llama.cpp wants the words of a BERT."""
        if kind == "wordpiece":
            add_vocab(writer, kind, n)
        else:
            writer.add_tokenizer_model("no_vocab")
            writer.add_vocab_size(n)

    make.add_vocab = add_small_vocab
    plain, tied = "emb norm head", "emb_tied norm"
    gpt = "attn_norm attn_norm_b qkv_fused qkv_fused_b out out_b ffn_norm ffn_norm_b mlp mlp_b"
    post_norms = "post_attn_norm ffn_norm glu post_ffn_norm"
    window = {"attention.sliding_window": 16}
    experts = make.moe_kv({"X": 5}, expert_feed_forward_length=12)
    add = partial(_add, make.model)
    add("gemma3", f"attn_norm qkv out qk_norm {post_norms}", tied, window, rope=1e6, boost=3.0, L=6, G=1, D=20, F=16)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    olmo = "qkv out qk_norm_full post_attn_norm glu post_ffn_norm"
    add("olmo3", olmo, plain, window | yarn, architecture="olmo2", L=4)
    cohere = "attn_norm qkv out glu"
    add("cohere2", cohere, tied, window | {"logit_scale": 1.25}, norm="ln", boost=2.0, L=4)
    long = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.19}
    phi = "attn_norm qkv_fused out ffn_norm glu_fused"
    add("phi3-longrope", phi, f"{plain} rope_long_short", long, architecture="phi3")
    add("gptneox", gpt, "emb norm norm_b head", {"use_parallel_residual": True}, norm="ln", G=4, NR=8)
    add("bloom", gpt, "emb_tied emb_norm norm norm_b", norm="ln", rope=None, boost=3.0, H=5, G=5, D=8)
    stablelm = "attn_norm attn_norm_b qkv out qk_norm_heads glu"
    add("stablelm-parallel", stablelm, "emb norm norm_b head", architecture="stablelm", norm="ln", NR=4, L=1)
    qwen = "attn_norm qkv qkv_b out ffn_norm moe shared shared_gate"
    add("qwen2moe", qwen, plain, experts | {"expert_shared_feed_forward_length": 20})
    blocks = ["attn_norm qkv out ffn_norm glu", "attn_norm qkv out ffn_norm moe shared"]
    add("llama4", blocks * 2, plain, experts | {"expert_used_count": 1, "interleave_moe_layer_step": 2}, L=4, FS=12)
    oss = "attn_norm qkv qkv_b out out_b sinks post_attn_norm moe moe_b"
    add("gpt-oss", oss, plain, window | experts | {"attention.key_length": 10, "attention.value_length": 10})
    latent = "attn_norm mla_q_lora mla_kv mla_kv_b_split out ffn_norm"
    grouped = make.moe_kv(
        {"X": 8},
        expert_feed_forward_length=16,
        expert_shared_count=1,
        expert_weights_scale=2.5,
        expert_weights_norm=True,
        expert_gating_func=2,
        expert_group_count=4,
        expert_group_used_count=2,
    )
    lengths = {"key_length": 40, "value_length": 32, "key_length_mla": 24, "value_length_mla": 12}
    ranks = {"kv_lora_rank": 32, "q_lora_rank": 24, "head_count_kv": 1} | lengths
    mla = {"leading_dense_block_count": 1} | {f"attention.{key}": value for key, value in ranks.items()}
    sizes = {"DN": 16, "NR": 8, "DV": 12, "RQ": 24, "RKV": 32, "D": 24, "FX": 16, "FS": 16, "X": 8}
    add("deepseek2", [f"{latent} glu", f"{latent} moe probs_b shared"], plain, grouped | mla, **sizes)
    _add_kin(add, experts)
    _add_hybrids(add, make.moe_kv({"X": 4}, expert_feed_forward_length=12))
    encoder = {"attention.causal": False, "pooling_type": 1}
    bert = {"norm": "ln", "tok": "wordpiece", "G": 4, "C": 64, "V": 288}
    add("bert", make.ENC, "emb emb_norm pos types", encoder, rope=None, **bert)
    nomic = "qkv_fused qkv_fused_b out out_b attn_out_norm {} layer_out_norm"
    make.PARTS["experts"] = [
        ("ffn_gate_inp.weight", "E,X", "r2"),
        ("ffn_up_exps.weight", "E,F,X", "w1.2"),
        ("ffn_down_exps.weight", "F,E,X", "w2"),
    ]
    every_second = {"moe_every_n_layers": 2, "expert_count": 5, "expert_used_count": 2}
    blocks = [nomic.format("mlp mlp_b"), nomic.format("experts")]
    add("nomic-bert-moe", blocks, "emb emb_norm types", encoder | every_second, **bert)
    return list(make.MODELS)


def _add_hybrids(add, experts: dict[str, object]) -> None:
    """Recurrent layers and attention, with experts behind both."""
    delta = "attn_norm delta_net delta_b_a post_attn_norm moe shared shared_gate"
    gated = "attn_norm q_gated out qk_norm post_attn_norm moe shared shared_gate"
    sizes = {"conv_kernel": 4, "inner_size": 32, "state_size": 8, "time_step_rank": 4, "group_count": 2}
    ssm = {f"ssm.{key}": value for key, value in sizes.items()}
    heads = {"full_attention_interval": 2, "attention.key_length": 8, "attention.value_length": 8}
    sections = {"rope.dimension_sections": [1, 1, 0, 0], "expert_shared_feed_forward_length": 12}
    state = {"SN": 8, "SG": 2, "SR": 4, "SK": 4, "D": 8, "NR": 4}
    add("qwen35moe", [delta, gated], "emb norm head", ssm | heads | experts | sections, X=4, FS=12, **state)
    convolution = "attn_norm shortconv ffn_norm glu"
    attention = "attn_norm qkv out qk_norm ffn_norm moe probs_b"
    kinds = {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}
    chosen = {"leading_dense_block_count": 1, "expert_gating_func": 2}
    add("lfm2moe", [convolution, attention], "emb_tied emb_norm_only", kinds | experts | chosen, X=4, SK=3)


def _add_kin(add, experts: dict[str, object]) -> None:
    """Architectures that differ from others in little more than their name, with one layer each."""
    plain, biased = "emb norm head", "emb norm norm_b head"
    llama = "attn_norm qkv out ffn_norm glu"
    gpt = "attn_norm attn_norm_b {} ffn_norm ffn_norm_b mlp mlp_b"
    add("codeshell", gpt.format("qkv qkv_b out out_b"), biased, norm="ln", L=1)
    add("orion", "attn_norm attn_norm_b qkv out ffn_norm ffn_norm_b glu", biased, norm="ln", L=1)
    add("pangu-embedded", "attn_norm qkv qkv_b out out_b ffn_norm glu", plain, L=1)
    add("refact", llama, plain, rope=None, G=1, L=1)
    add(
        "starcoder",
        gpt.format("qkv_fused qkv_fused_b out out_b"),
        f"pos {biased}",
        norm="ln",
        rope=None,
        G=1,
        C=64,
        L=1,
    )
    add("xverse", llama, plain, L=1)
    warm = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
    add(
        "mistral3",
        llama,
        plain,
        warm | {"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0},
        L=1,
    )
    shared = {"expert_shared_count": 1, "expert_weights_norm": True, "leading_dense_block_count": 0}
    bailing = "attn_norm qkv out ffn_norm moe shared"
    add("bailingmoe", bailing, plain, experts | shared | {"expert_weights_scale": 1.0}, FS=12, L=1)
    dots = "attn_norm qkv out qk_norm ffn_norm moe probs_b shared"
    scaled = {"expert_weights_scale": 2.5, "expert_gating_func": 2}
    add("dots1", dots, plain, experts | shared | scaled, G=4, FS=12, L=1)
    wide = experts | {"expert_feed_forward_length": 20}
    hunyuan = "attn_norm qkv out qk_norm ffn_norm moe shared"
    add("hunyuan-moe", hunyuan, plain, wide | {"expert_shared_feed_forward_length": 20}, FX=20, L=1)
    minimax = "attn_norm qkv out qk_norm_full ffn_norm moe probs_b"
    add("minimax-m2", minimax, plain, wide | {"expert_gating_func": 2}, FX=20, NR=6, L=1)
    phi = "attn_norm attn_norm_b qkv qkv_b out out_b ffn_norm ffn_norm_b moe"
    long = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.1}
    add("phimoe", phi, f"{biased} head_b rope_long_short", long | experts, F=12, L=1)


def _add(
    model, name: str, layers: str | list[str], head: str, metadata=None, *, architecture: str = "", norm: str = "rms",
    rope: float | None = 10000.0, boost: float = 1.0, tok: str = "spm", **size: int,
) -> None:  # fmt: skip
    model(name, architecture or name, layers, head, kv=metadata, norm=norm, rope=rope, boost=boost, tok=tok, size=size)


def record(reference, path: Path, embeds: bool) -> dict[str, np.ndarray]:
    model = reference.load(path)
    prompt = np.random.default_rng(1).integers(0, N_VOCAB, N_PROMPT)
    result = {"prompt": prompt.astype(np.int32)}
    if embeds:
        return result | {"embedding": reference.embeddings(model, prompt)[0]}
    return result | {"logits": reference.batch_logits(model, prompt)[-N_KEPT:]}


def main(folder: str) -> None:
    sys.path.insert(0, str(Path(folder) / "conformance"))
    import make_models
    import record_expected

    FOLDER.mkdir(parents=True, exist_ok=True)
    expected = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in add_models(make_models):
            make_models.write(FOLDER / f"{name}.gguf", name)
            twin = Path(scratch) / f"{name}.gguf"
            make_models.write(twin, name, f32=True)
            for key, value in record(record_expected, twin, "bert" in name).items():
                expected[f"{name}/{key}"] = value
    np.savez_compressed(FOLDER / "expected.npz", **expected)


if __name__ == "__main__":
    main(*sys.argv[1:])
