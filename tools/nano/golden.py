#!/usr/bin/env python3
"""Golden numbers of the released nano model, made by transformers in f32 on the dequantized weights.

train.py calls this; alone it makes them again, on any machine with torch and transformers:

    python3 golden.py --release DIR --data .nano --out DIR
"""
import argparse, copy, json, os

import numpy as np
import torch

import formats
import tokenizer_layout as layout

KINDS = ("prose", "code", "tables", "chat")
# name, kind, tokens with BOS
PASSAGES = (("prose", "prose", 300), ("code", "code", 300), ("tables", "tables", 300), ("chat", "chat", 150), ("long", "prose", 1000))
CANDIDATES = 8
QUESTIONS = ("What is the capital of France?", "What is 12 plus 30?", "Who are you?", "Sort these numbers: 9, 4, 17.",
             "Make a markdown table: apple 3, rope 7.", "Clara lives in Oslo and bought a lamp. Where does Clara live?")


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f: json.dump(value, f, indent=1, ensure_ascii=False)


def tokenizer(directory):
    from tokenizers import Tokenizer
    return Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))


def logits_of(model, ids):
    with torch.no_grad(): return model(input_ids=torch.tensor(ids, device=next(model.parameters()).device)[None], use_cache=False).logits[0].float()


class Margins:
    """Smallest gap between the last chosen and the first left out, of experts and of index rows, per position."""
    def __init__(self, model, raw):
        self.model, self.raw = model, raw

    def __call__(self, ids):
        router, index, handles, n = [], [], [], len(ids)
        def routed(module, arguments, output):
            biased = torch.nn.functional.softplus(output[0].float()).sqrt() + module.e_score_correction_bias
            v = biased.sort(-1, descending=True).values; k = self.raw["num_experts_per_tok"]
            router.append(v[:, k - 1] - v[:, k])
        def indexed(module, arguments, output):
            scores, k = output[0].float(), self.raw["index_topk"]
            visible = (torch.arange(n, device=scores.device) + 1) // 4
            scores = scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device)[None] >= visible[:, None], float("-inf"))
            if scores.shape[-1] <= k: return
            v = scores.sort(-1, descending=True).values
            gap = v[:, k - 1] - v[:, k]
            index.append(torch.where(visible > k, gap, torch.full_like(gap, float("inf"))))
        for layer in self.model.model.layers:
            if hasattr(layer.mlp.gate, "e_score_correction_bias"): handles.append(layer.mlp.gate.register_forward_hook(routed))
            compressor = layer.self_attn.compressor
            if compressor is not None and hasattr(compressor, "indexer"): handles.append(compressor.indexer.scorer.register_forward_hook(indexed))
        try: logits = logits_of(self.model, ids)
        finally:
            for h in handles: h.remove()
        least = lambda parts: torch.stack(parts).amin(0) if parts else torch.full((n,), float("inf"), device=logits.device)
        return logits, least(router), least(index)


def passages(model, raw, data, tokenizer_directory, out, most):
    """golden.safetensors and passages.json. Of several places in each text the one farthest from near ties is taken."""
    torch.set_num_threads(max(1, min(16, os.cpu_count() or 1)))
    reader, margins = tokenizer(tokenizer_directory), Margins(model, raw)
    reference = copy.deepcopy(model).cpu()
    tensors, report = [], {}
    for name, kind, length in PASSAGES:
        stream = data.heldout[kind].long().cpu().numpy()
        if kind == "chat": starts = [int(s) + 1 for s in np.nonzero(stream == layout.BOS_ID)[0] if s + length < stream.size][:CANDIDATES]
        else: starts = [int(s) for s in np.linspace(0, max(0, stream.size - length), CANDIDATES + 1)][:-1]
        best = None
        for start in starts:
            ids = [layout.BOS_ID, *map(int, stream[start:start + length - 1])]
            logits, router, index = margins(ids)
            worst = min(float(router.min()), float(index.min()))
            if best is None or worst > best[0]: best = (worst, start, ids, logits.cpu(), router.cpu(), index.cpu())
        worst, start, ids, accelerated, router, index = best
        logits = logits_of(reference, ids)
        log_p = torch.log_softmax(logits.double(), -1)
        nll = -log_p[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        two, top = logits.topk(2).values, log_p.topk(8)
        f32 = lambda t: ("F32", t.detach().to(torch.float32).contiguous().numpy())
        i32 = lambda t: ("I32", np.ascontiguousarray(np.asarray(t), np.int32))
        noise = (logits - accelerated).abs().amax(-1)
        tensors += [(f"{name}.ids", i32(ids)), (f"{name}.nll", f32(nll)), (f"{name}.argmax", i32(logits.argmax(-1).numpy())),
                    (f"{name}.margin", f32(two[:, 0] - two[:, 1])), (f"{name}.noise", f32(noise)), (f"{name}.last_logits", f32(logits[-1])),
                    (f"{name}.top8_ids", i32(top.indices.numpy())), (f"{name}.top8_log_probabilities", f32(top.values)),
                    (f"{name}.router_margin", f32(router)), (f"{name}.index_margin", f32(index.clamp_max(1e30)))]
        report[name] = {"kind": kind, "tokens": len(ids), "from_token": start, "text": reader.decode(ids[1:], skip_special_tokens=False), "ids": ids,
                        "mean_nll": float(nll.mean()), "largest_difference_cpu_gpu": float(noise.max()), "logits_deviation": float(logits.std()),
                        "smallest_router_margin": float(router.min()), "smallest_index_margin": min(float(index.min()), 1e30),
                        "same_top1_cpu_gpu": float((accelerated.argmax(-1) == logits.argmax(-1)).float().mean())}
    formats.write_safetensors(os.path.join(out, "golden.safetensors"), tensors, {"format": "np"})
    write_json(os.path.join(out, "passages.json"), report)
    return {n: {k: v for k, v in r.items() if k not in ("text", "ids")} for n, r in report.items()}


def expert_use(model, raw, data, tokenizer_directory, out, most):
    """experts.json: how often each expert of each layer was chosen on the held-out windows, by kind."""
    counts = {k: [[0] * raw["n_routed_experts"] for _ in range(raw["num_hidden_layers"])] for k in KINDS}
    for kind in KINDS:
        handles = []
        for n, layer in enumerate(model.model.layers):
            def count(module, arguments, output, n=n):
                found = torch.bincount(output[2].reshape(-1), minlength=raw["n_routed_experts"]).tolist()
                counts[kind][n] = [a + b for a, b in zip(counts[kind][n], found)]
            handles.append(layer.mlp.gate.register_forward_hook(count))
        try:
            windows = data.windows(kind, most=most)
            with torch.no_grad():
                for at in range(0, windows.shape[0], 16): model(input_ids=windows[at:at + 16], use_cache=False)
        finally:
            for h in handles: h.remove()
    write_json(os.path.join(out, "experts.json"), counts)
    total = [[sum(counts[k][n][e] for k in KINDS) for e in range(raw["n_routed_experts"])] for n in range(raw["num_hidden_layers"])]
    return [f"layer {n}: least {min(t) / sum(t):.3f}, most {max(t) / sum(t):.3f}, unused {t.count(0)}" for n, t in enumerate(total)]


def answers(model, raw, data, tokenizer_directory, out, most):
    """answers.json: greedy answers to a few questions in the chat form, without a cache."""
    reader, report = tokenizer(tokenizer_directory), []
    for question in QUESTIONS[:2] if most < 100 else QUESTIONS:
        prompt = f"{layout.BOS}{layout.USER}{question}{layout.ASSISTANT}{layout.END_THINK}"
        ids = reader.encode(prompt, add_special_tokens=False).ids
        made, gaps = [], []
        while len(made) < (8 if most < 100 else 48):
            two = logits_of(model, ids + made)[-1].topk(2)
            made.append(int(two.indices[0])); gaps.append(round(float(two.values[0] - two.values[1]), 4))
            if made[-1] == layout.EOS_ID: break
        report.append({"question": question, "prompt_ids": ids, "answer_ids": made, "margins": gaps, "answer": reader.decode(made, skip_special_tokens=False)})
    write_json(os.path.join(out, "answers.json"), report)
    return [(r["question"], r["answer"]) for r in report]


def main():
    import checkpoint, model as nano, train
    parser = argparse.ArgumentParser()
    parser.add_argument("--release", required=True); parser.add_argument("--data", default=".nano"); parser.add_argument("--out", required=True)
    a = parser.parse_args()
    os.makedirs(a.out, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")
    data, model = train.Data(a.data, device, 0), nano.released(a.release, checkpoint.CONFIG, device)
    forward = lambda x: model(input_ids=x, use_cache=False).logits
    write_json(os.path.join(a.out, "heldout_loss.json"), train.evaluate(forward, data, 10_000))
    for part in (expert_use, passages, answers): print(part.__name__, part(model, checkpoint.CONFIG, data, a.data, a.out, 10_000), flush=True)


if __name__ == "__main__":
    main()
