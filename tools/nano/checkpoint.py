#!/usr/bin/env python3
"""The nano model's configuration and its official checkpoint layout: writing, reading, and names for transformers.

    python3 checkpoint.py --plan DIR [--tokenizer TOKENIZER_DIR]   writes one of random weights and prints its size (no torch needed)
"""
import argparse, hashlib, json, math, os, shutil
import numpy as np

import formats
import tokenizer_layout

CONFIG = dict(
    architectures=["DeepseekV4ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0,
    compress_ratios=[0, 4, 128, 0], compress_rope_theta=160000, eos_token_id=1, expert_dtype="fp4", hc_eps=1e-6, hc_mult=4,
    hc_sinkhorn_iters=20, head_dim=128, hidden_act="silu", hidden_size=256, index_head_dim=128, index_n_heads=8, index_topk=32,
    initializer_range=0.02, max_position_embeddings=65536, model_type="deepseek_v4", moe_intermediate_size=256,
    n_routed_experts=16, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=4, num_experts_per_tok=4,
    num_hash_layers=1, num_hidden_layers=4, num_key_value_heads=1, num_nextn_predict_layers=0, o_groups=2, o_lora_rank=128,
    q_lora_rank=256, qk_rope_head_dim=64,
    quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]),
    rms_norm_eps=1e-6,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=16, original_max_position_embeddings=4096, type="yarn"),
    rope_theta=10000, routed_scaling_factor=1.5, scoring_func="sqrtsoftplus", sliding_window=128, swiglu_limit=10.0,
    tie_word_embeddings=False, topk_method="noaux_tc", torch_dtype="bfloat16", transformers_version="4.57.1", use_cache=True,
    vocab_size=tokenizer_layout.VOCABULARY)
GENERATION = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0,
              "top_p": 1.0, "transformers_version": "4.57.1"}
SHARDS = 3

# official leaf name -> (transformers leaf name, stored form)
LEAVES = {
    "attn_norm.weight": ("input_layernorm.weight", "bf16"), "ffn_norm.weight": ("post_attention_layernorm.weight", "bf16"),
    "hc_attn_fn": ("attn_hc.fn", "f32"), "hc_attn_base": ("attn_hc.base", "f32"), "hc_attn_scale": ("attn_hc.scale", "f32"),
    "hc_ffn_fn": ("ffn_hc.fn", "f32"), "hc_ffn_base": ("ffn_hc.base", "f32"), "hc_ffn_scale": ("ffn_hc.scale", "f32"),
    "attn.attn_sink": ("self_attn.sinks", "f32"), "attn.wq_a.weight": ("self_attn.q_a_proj.weight", "fp8"),
    "attn.q_norm.weight": ("self_attn.q_a_norm.weight", "bf16"), "attn.wq_b.weight": ("self_attn.q_b_proj.weight", "fp8"),
    "attn.wkv.weight": ("self_attn.kv_proj.weight", "fp8"), "attn.kv_norm.weight": ("self_attn.kv_norm.weight", "bf16"),
    "attn.wo_a.weight": ("self_attn.o_a_proj.weight", "fp8"), "attn.wo_b.weight": ("self_attn.o_b_proj.weight", "fp8"),
    "attn.compressor.ape": ("self_attn.compressor.position_bias", "f32"),
    "attn.compressor.norm.weight": ("self_attn.compressor.kv_norm.weight", "bf16"),
    "attn.compressor.wkv.weight": ("self_attn.compressor.kv_proj.weight", "bf16"),
    "attn.compressor.wgate.weight": ("self_attn.compressor.gate_proj.weight", "bf16"),
    "attn.indexer.wq_b.weight": ("self_attn.compressor.indexer.q_b_proj.weight", "fp8"),
    "attn.indexer.weights_proj.weight": ("self_attn.compressor.indexer.scorer.weights_proj.weight", "bf16"),
    "attn.indexer.compressor.ape": ("self_attn.compressor.indexer.position_bias", "f32"),
    "attn.indexer.compressor.norm.weight": ("self_attn.compressor.indexer.kv_norm.weight", "bf16"),
    "attn.indexer.compressor.wkv.weight": ("self_attn.compressor.indexer.kv_proj.weight", "bf16"),
    "attn.indexer.compressor.wgate.weight": ("self_attn.compressor.indexer.gate_proj.weight", "bf16"),
    "ffn.gate.weight": ("mlp.gate.weight", "bf16"), "ffn.gate.bias": ("mlp.gate.e_score_correction_bias", "f32"),
    "ffn.gate.tid2eid": ("mlp.gate.tid2eid", "i64"),
    "ffn.shared_experts.w1.weight": ("mlp.shared_experts.gate_proj.weight", "fp8"),
    "ffn.shared_experts.w2.weight": ("mlp.shared_experts.down_proj.weight", "fp8"),
    "ffn.shared_experts.w3.weight": ("mlp.shared_experts.up_proj.weight", "fp8")}
ROOT = {"embed.weight": ("model.embed_tokens.weight", "bf16"), "norm.weight": ("model.norm.weight", "bf16"), "head.weight": ("lm_head.weight", "bf16"),
        "hc_head_fn": ("model.hc_head.hc_fn", "f32"), "hc_head_base": ("model.hc_head.hc_base", "f32"), "hc_head_scale": ("model.hc_head.hc_scale", "f32")}


def stored(name, form, w):
    """The tensor(s) of the checkpoint for one matrix or vector: list of (name, (dtype, array))."""
    if form == "f32": return [(name, ("F32", np.asarray(w, np.float32)))]
    if form == "i64": return [(name, ("I64", np.asarray(w, np.int64)))]
    if form == "bf16": return [(name, ("BF16", formats.to_bf16(w)))]
    code, scale = (formats.quantize_fp8 if form == "fp8" else formats.quantize_fp4)(np.asarray(w, np.float32))
    return [(name, ("F8_E4M3" if form == "fp8" else "I8", code)), (name[:-len("weight")] + "scale", ("F8_E8M0", scale))]


def official(state, config=CONFIG):
    """transformers' state (name -> numpy) -> the official tensors, in the order of the official shards."""
    out, left = [], set(state)
    def put(name, source, form):
        out.extend(stored(name, form, state[source])); left.discard(source)
    put("embed.weight", *ROOT["embed.weight"])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for leaf, (source, form) in LEAVES.items():
            if prefix + source in state: put(f"layers.{layer}.{leaf}", prefix + source, form)
        gate_up, down = state[prefix + "mlp.experts.gate_up_proj"], state[prefix + "mlp.experts.down_proj"]
        left -= {prefix + "mlp.experts.gate_up_proj", prefix + "mlp.experts.down_proj"}
        width = config["moe_intermediate_size"]
        for e in range(config["n_routed_experts"]):
            name = f"layers.{layer}.ffn.experts.{e}."
            out.extend(stored(name + "w1.weight", "fp4", gate_up[e, :width])); out.extend(stored(name + "w2.weight", "fp4", down[e]))
            out.extend(stored(name + "w3.weight", "fp4", gate_up[e, width:]))
    for name in ("norm.weight", "head.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"): put(name, *ROOT[name])
    if left: raise ValueError(f"no official name for {sorted(left)}")
    return out


def write(directory, state, tokenizer_directory, config=CONFIG):
    """Writes the whole release (shards, index, configs, tokenizer). Returns its size in bytes."""
    os.makedirs(directory, exist_ok=True)
    tensors = official(state, config)
    for name, (dtype, array) in tensors:
        if dtype == "F32" and not np.isfinite(array).all(): raise ValueError(f"{name}: not finite")
    half = (config["num_hidden_layers"] + 1) // 2
    def shard(name):
        if name.startswith("layers."): return 0 if int(name.split(".")[1]) < half else 1
        return 0 if name == "embed.weight" else 2
    weight_map, total = {}, 0
    for s in range(SHARDS):
        file = f"model-{s + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = [t for t in tensors if shard(t[0]) == s]
        total += formats.write_safetensors(os.path.join(directory, file), part, {"format": "pt"})
        weight_map.update({name: file for name, _ in part})
    def dump(file, value, indent=2):
        with open(os.path.join(directory, file), "w", encoding="utf-8") as f: json.dump(value, f, indent=indent, ensure_ascii=False)
    dump("model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, 0)
    dump("config.json", config); dump("generation_config.json", GENERATION)
    for file in ("tokenizer.json", "tokenizer_config.json"): shutil.copyfile(os.path.join(tokenizer_directory, file), os.path.join(directory, file))
    names = sorted(f for f in os.listdir(directory) if f != "SHA256SUMS")
    with open(os.path.join(directory, "SHA256SUMS"), "w") as f:
        for file in names: f.write(f"{hashlib.sha256(open(os.path.join(directory, file), 'rb').read()).hexdigest()}  {file}\n")
    return sum(os.path.getsize(os.path.join(directory, f)) for f in os.listdir(directory))


def load(directory):
    """Official names -> exact dequantized values."""
    raw = {}
    for file in sorted(os.listdir(directory)):
        if file.endswith(".safetensors"): raw.update(formats.read_safetensors(os.path.join(directory, file)))
    return {name: formats.dequantize(dtype, array, raw[name[:-6] + "scale"][1] if name[:-6] + "scale" in raw and name.endswith("weight") else None)
            for name, (dtype, array) in raw.items() if not (name.endswith(".scale"))}


def transformers_state(weights, config=CONFIG):
    """Official names -> transformers' names, experts stacked."""
    out = {ROOT[n][0]: w for n, w in weights.items() if n in ROOT}
    for name, w in weights.items():
        if name.startswith("layers.") and ".ffn.experts." not in name:
            _, layer, leaf = name.split(".", 2); out[f"model.layers.{layer}.{LEAVES[leaf][0]}"] = w
    for layer in range(config["num_hidden_layers"]):
        get = lambda e, w: weights[f"layers.{layer}.ffn.experts.{e}.{w}.weight"]
        experts = range(config["n_routed_experts"])
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack([np.concatenate([get(e, "w1"), get(e, "w3")]) for e in experts])
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack([get(e, "w2") for e in experts])
    return out


def rotary_frequencies(config=CONFIG):
    """(plain, compressed) angles per position, f64: see the YaRN ramp of DeepSeek V4, which has no magnitude factor."""
    width, scaling = config["qk_rope_head_dim"], config["rope_scaling"]
    steps = np.arange(0, width, 2) / width
    plain, base = float(config["rope_theta"]) ** -steps, float(config["compress_rope_theta"]) ** -steps
    pair = lambda turns: width * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(config["compress_rope_theta"]))
    low, high = max(math.floor(pair(scaling["beta_fast"])), 0), min(math.ceil(pair(scaling["beta_slow"])), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain, base / scaling["factor"] * ramp + base * (1 - ramp)


def shapes(config=CONFIG):
    """transformers' names -> shapes, from the configuration alone."""
    c = config
    D, d, H, Q, E, W = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["q_lora_rank"], c["n_routed_experts"], c["moe_intermediate_size"]
    G, R, I, N, M, V = c["o_groups"], c["o_lora_rank"], c["index_head_dim"], c["index_n_heads"], c["hc_mult"], c["vocab_size"]
    out = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D), "model.norm.weight": (D,), "model.hc_head.hc_fn": (M, M * D),
           "model.hc_head.hc_base": (M,), "model.hc_head.hc_scale": (1,)}
    for layer, ratio in enumerate(c["compress_ratios"][:c["num_hidden_layers"]]):
        leaf = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,), "self_attn.sinks": (H,), "self_attn.q_a_proj.weight": (Q, D),
                "self_attn.q_a_norm.weight": (Q,), "self_attn.q_b_proj.weight": (H * d, Q), "self_attn.kv_proj.weight": (d, D), "self_attn.kv_norm.weight": (d,),
                "self_attn.o_a_proj.weight": (G * R, H * d // G), "self_attn.o_b_proj.weight": (D, G * R), "mlp.gate.weight": (E, D),
                "mlp.experts.gate_up_proj": (E, 2 * W, D), "mlp.experts.down_proj": (E, D, W), "mlp.shared_experts.gate_proj.weight": (W, D),
                "mlp.shared_experts.up_proj.weight": (W, D), "mlp.shared_experts.down_proj.weight": (D, W)}
        for hc in ("attn_hc", "ffn_hc"): leaf.update({f"{hc}.fn": ((2 + M) * M, M * D), f"{hc}.base": ((2 + M) * M,), f"{hc}.scale": (3,)})
        if layer < c["num_hash_layers"]: leaf["mlp.gate.tid2eid"] = (V, c["num_experts_per_tok"])
        else: leaf["mlp.gate.e_score_correction_bias"] = (E,)
        def compressor(prefix, width, overlap):
            leaf.update({prefix + "kv_proj.weight": (overlap * width, D), prefix + "gate_proj.weight": (overlap * width, D),
                         prefix + "position_bias": (ratio, overlap * width), prefix + "kv_norm.weight": (width,)})
        if ratio: compressor("self_attn.compressor.", d, 2 if ratio == 4 else 1)
        if ratio == 4:
            compressor("self_attn.compressor.indexer.", I, 2)
            leaf["self_attn.compressor.indexer.q_b_proj.weight"] = (N * I, Q)
            leaf["self_attn.compressor.indexer.scorer.weights_proj.weight"] = (N, D)
        out.update({f"model.layers.{layer}.{n}": s for n, s in leaf.items()})
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", required=True); parser.add_argument("--tokenizer", required=True)
    a = parser.parse_args()
    rng = np.random.default_rng(5)
    state = {n: rng.integers(0, CONFIG["n_routed_experts"], s) if n.endswith("tid2eid") else rng.standard_normal(s).astype(np.float32) * 0.06 for n, s in shapes().items()}
    size = write(a.plan, state, a.tokenizer)
    back = transformers_state(load(a.plan))
    if set(back) != set(state): raise SystemExit(f"names lost: {set(back) ^ set(state)}")
    for name, w in back.items():
        if w.shape != tuple(state[name].shape): raise SystemExit(f"{name}: {w.shape}")
        error = np.abs(w - state[name]).max() / max(np.abs(state[name]).max(), 1e-9)
        if error > 0.18: raise SystemExit(f"{name}: rounding moved a weight by {error:.3f} of the largest")
    requantized = dict(official(back))
    for file in sorted(os.listdir(a.plan)):
        if not file.endswith(".safetensors"): continue
        for name, (dtype, array) in formats.read_safetensors(os.path.join(a.plan, file)).items():
            if dtype in ("BF16", "F32", "I64") and not np.array_equal(array, requantized[name][1]): raise SystemExit(f"{name}: writing what was read differs")
    print(f"{len(state)} tensors, {sum(int(np.prod(s)) for s in shapes().values())} parameters, {size} bytes in all")
    for file in sorted(os.listdir(a.plan)): print(f"{os.path.getsize(os.path.join(a.plan, file)):>10} {file}")


if __name__ == "__main__":
    main()
