#!/usr/bin/env python3
"""Trains the nano model on one GPU and writes its release and golden numbers.

    python3 train.py --data .nano --out OUT [--minutes 7] [--limit 535] [--smoke]

Everything ends up in OUT: nano.tar (release, golden, log), train.jsonl, and nano-interim.tar on the way.
"""
import argparse, collections, json, math, os, tarfile, time, traceback

START = time.time()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch
import torch.nn.functional as F

import checkpoint, golden, model as nano, rounding

KINDS = ("prose", "code", "tables", "chat")
MIXTURE = {"prose": 0.42, "code": 0.30, "tables": 0.16, "chat": 0.12}
# where, as a share of the training time, each of these begins
ROUND_WEIGHTS, SPARSE_INDEX, FIRST_INTERIM, LONG_CONTEXT, FREEZE_BALANCE = 0.30, 0.35, 0.60, 0.75, 0.85


def say(*words):
    print(f"[{time.time() - START:6.1f}s]", *words, flush=True)


class Journal:
    """JSON lines, flushed at once."""
    def __init__(self, path): self.file = open(path, "w", buffering=1)
    def __call__(self, **entry):
        self.file.write(json.dumps({"seconds": round(time.time() - START, 1), **entry}) + "\n")


class Data:
    def __init__(self, directory, device, seed):
        arrays = np.load(os.path.join(directory, "tokens.npz"))
        load = lambda n: torch.from_numpy(arrays[n].astype(np.int32)).to(device)
        self.train = {k: load("train_" + k) for k in KINDS}
        self.heldout = {k: load("heldout_" + k) for k in KINDS}
        starts = torch.nonzero(self.train["chat"] == 0).flatten()
        self.chat_starts = starts[starts < self.train["chat"].numel() - 2100]
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.device = device
        counts = sum(torch.bincount(self.train[k].long(), minlength=1024).double() * MIXTURE[k] / self.train[k].numel() for k in KINDS)
        self.unigram_mixture = counts / counts.sum()

    def batch(self, rows, length):
        """[rows, length] of windows; the first token is BOS, as when a passage is scored."""
        parts, left = [], rows
        for i, kind in enumerate(KINDS):
            n = left if i == len(KINDS) - 1 else round(rows * MIXTURE[kind]); left -= n
            if n <= 0: continue
            tokens = self.train[kind]
            if kind == "chat": at = self.chat_starts[torch.randint(0, self.chat_starts.numel(), (n,), device=self.device, generator=self.generator)]
            else: at = torch.randint(0, tokens.numel() - length, (n,), device=self.device, generator=self.generator)
            parts.append(tokens[at[:, None] + torch.arange(length, device=self.device)[None]])
        x = torch.cat(parts).long(); x[:, 0] = 0
        return x

    def windows(self, kind, length=512, most=10_000):
        """Held-out windows: BOS, then length - 1 tokens; the incomplete rest is left out."""
        ids = self.heldout[kind].long()
        if kind == "chat" and ids.numel() and int(ids[0]) == 0: ids = ids[1:]
        n = max(1, min(most, ids.numel() // (length - 1)))
        body = ids[:n * (length - 1)].reshape(n, -1)
        return torch.cat([torch.zeros(n, 1, dtype=torch.long, device=ids.device), body], 1)


def unigram(data):
    """Mean loss of two unigram models on the held-out windows: one of the training mixture, one per kind of text."""
    out = {}
    for kind in KINDS:
        y = data.windows(kind)[:, 1:].flatten()
        own = torch.bincount(data.train[kind].long(), minlength=1024).double() + 1
        out[kind] = {"mixture": float(-torch.log(data.unigram_mixture.clamp_min(1e-9))[y].mean()), "own_kind": float(-torch.log(own / own.sum())[y].mean())}
    return out


def masks(rows, length, window, device):
    """The window's additive mask, made once: the library's own construction costs time in every step."""
    i = torch.arange(length, device=device)
    seen = (i[None] <= i[:, None]) & (i[None] > i[:, None] - window)
    mask = torch.zeros(length, length, device=device).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {"sliding_attention": mask[None, None].expand(rows, 1, length, length).contiguous()}


class Indexers:
    """Trains the index scores to follow the attention that the compressed rows really get, which no gradient of the loss reaches."""
    def __init__(self, model):
        self.layers, self.seen, self.handles = [], {}, []
        for n, layer in enumerate(model.model.layers):
            compressor = layer.self_attn.compressor
            if compressor is None or not hasattr(compressor, "indexer"): continue
            self.layers.append(n); indexer = compressor.indexer
            detach = lambda v: v.detach() if torch.is_tensor(v) and v.is_floating_point() else v
            self.handles.append(indexer.register_forward_pre_hook(
                lambda m, a, k: (tuple(detach(v) for v in a), {x: detach(v) for x, v in k.items()}), with_kwargs=True))
            self.handles.append(indexer.scorer.register_forward_hook(lambda m, a, out, n=n: self.seen.__setitem__((n, "scores"), out)))
            self.handles.append(layer.self_attn.register_forward_hook(lambda m, a, out, n=n: self.seen.__setitem__((n, "weights"), out[1])))
        self.indexers = [model.model.layers[n].self_attn.compressor.indexer for n in self.layers]

    def keep(self, count):
        for indexer in self.indexers: indexer.index_topk = count

    def loss(self):
        total = 0.0
        for n in self.layers:
            scores = self.seen.pop((n, "scores")).float()
            p = self.seen.pop((n, "weights"))[..., -scores.shape[-1]:].detach().float().sum(1)
            mask = p > 0
            p = p / p.sum(-1, keepdim=True).clamp_min(1e-9)
            log_q = torch.log_softmax(scores.masked_fill(~mask, -1e9), -1)
            divergence = torch.where(mask, p * (torch.log(p.clamp_min(1e-20)) - log_q), torch.zeros_like(p)).sum(-1)
            several = (mask.sum(-1) > 1).float()
            total = total + (divergence * several).sum() / several.sum().clamp_min(1)
        return total

    def clear(self): self.seen.clear()


def prepare(model, raw, seed):
    """Hash table, stream mixing and index start values."""
    generator = torch.Generator().manual_seed(seed)
    E, K, V = raw["n_routed_experts"], raw["num_experts_per_tok"], raw["vocab_size"]
    # chosen without replacement by weights from 0.5 to 2, so that hash layers are used unevenly too
    favour = torch.linspace(math.log(0.5), math.log(2.0), E)[torch.randperm(E, generator=generator)]
    gumbel = -torch.log(-torch.log(torch.rand(V, E, generator=generator).clamp(1e-6, 1 - 1e-6)))
    table = (gumbel + favour).topk(K, -1).indices
    M = raw["hc_mult"]
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer.mlp.gate, "tid2eid"): layer.mlp.gate.tid2eid.copy_(table.to(layer.mlp.gate.tid2eid))
            for hc in (layer.attn_hc, layer.ffn_hc):
                hc.base[:2 * M].copy_(0.5 * torch.randn(2 * M, generator=generator))
                hc.base[2 * M:].copy_(2.0 * torch.eye(M).flatten())


@torch.no_grad()
def balance(layers, rate):
    """Moves the selection bias of experts outside 0.55 to 1.8 times the mean load, and only of those: used, but unevenly."""
    for mlp in layers:
        if rate and hasattr(mlp.gate, "e_score_correction_bias"):
            load = mlp.tokens_by_expert / mlp.tokens_by_expert.sum().clamp_min(1) * mlp.tokens_by_expert.numel()
            mlp.gate.e_score_correction_bias += rate * ((load < 0.55).float() - (load > 1.8).float())
        mlp.use += mlp.tokens_by_expert; mlp.tokens_by_expert.zero_()


@torch.no_grad()
def evaluate(forward, data, most, rows=16):
    """Mean loss by kind over at most `most` held-out windows."""
    out = {}
    for kind in KINDS:
        x = data.windows(kind, most=most); losses = []
        for at in range(0, x.shape[0], rows):
            part = x[at:at + rows]; logits = forward(part).float()
            losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="none"))
        out[kind] = float(torch.cat(losses).double().mean())
    return out


def pack(target, folders):
    """One tar of the folders' files, with fixed owner and time so that equal content gives equal bytes."""
    with tarfile.open(target + ".part", "w") as tar:
        for folder, prefix in folders:
            for d, _, names in sorted(os.walk(folder)):
                for name in sorted(names):
                    path = os.path.join(d, name); info = tarfile.TarInfo(os.path.join(prefix, os.path.relpath(path, folder)))
                    info.size = os.path.getsize(path)
                    with open(path, "rb") as f: tar.addfile(info, f)
    os.replace(target + ".part", target)
    return os.path.getsize(target)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=".nano"); parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=7.0, help="of training at most")
    parser.add_argument("--limit", type=float, default=535, help="seconds for the whole run; training stops 85 s before")
    parser.add_argument("--rows", type=int, default=64); parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=2.5e-3); parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--smoke", action="store_true", help="every step, in about 30 seconds after the imports")
    a = parser.parse_args()
    if a.smoke: a.minutes, a.rows = 0.25, 16
    raw, device = checkpoint.CONFIG, "cuda" if torch.cuda.is_available() else "cpu"
    os.makedirs(a.out, exist_ok=True)
    work = os.path.join("/tmp", f"nano-{os.getpid()}"); release = os.path.join(work, "release"); numbers = os.path.join(work, "golden")
    os.makedirs(numbers)
    journal = Journal(os.path.join(a.out, "train.jsonl"))
    import transformers
    say("torch", torch.__version__, "transformers", transformers.__version__, "numpy", np.__version__, device,
        torch.cuda.get_device_name() if device == "cuda" else "")
    torch.manual_seed(a.seed); torch.set_float32_matmul_precision("highest")

    data = Data(a.data, device, a.seed)
    base = unigram(data)
    say("tokens", {k: v.numel() for k, v in data.train.items()}, "unigram", base)
    model = nano.build(raw, device); prepare(model, raw, a.seed)
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    journal(event="start", torch=torch.__version__, transformers=transformers.__version__, config=raw, unigram=base, arguments=vars(a),
            train_tokens={k: v.numel() for k, v in data.train.items()}, mixture=MIXTURE)

    # the faster expert layer and the ready mask must give what the library gives
    probe = data.batch(2, 256)
    ready_mask, fast_experts = True, True
    for layer in model.model.layers:                # near ties of a random index would differ by rounding alone
        if hasattr(layer.self_attn.compressor, "indexer"): layer.self_attn.compressor.indexer.index_topk = 10 ** 6
    with torch.no_grad(): reference = model(input_ids=probe, use_cache=False).logits
    rounding.install(model, raw)
    def same(tag, **arguments):
        try:
            with torch.no_grad(): got = model(input_ids=probe, use_cache=False, **arguments).logits
            worst = float((got - reference).abs().max() / reference.abs().max())
            say(f"{tag}: relative difference {worst:.2e}"); return worst < 1e-3
        except Exception: traceback.print_exc(); return False
    if not same("fast experts and index scores"):
        say("WARNING: the library's own expert loop and index scores are used, slowly"); fast_experts = False
        rounding.uninstall(model); rounding.install(model, raw, fast=False)
    if not same("ready mask", attention_mask=masks(2, 256, raw["sliding_window"], device)): ready_mask = False

    mlps = [l.mlp for l in model.model.layers]
    indexers = Indexers(model); options = {"index": True}
    index_ids = {id(p) for i in indexers.indexers for p in i.parameters()}
    everything = [p for p in model.parameters() if p.requires_grad]
    index_parameters = [p for p in everything if id(p) in index_ids]; main_parameters = [p for p in everything if id(p) not in index_ids]
    decayed = [p for n, p in model.named_parameters() if p.dim() >= 2 and "_hc." not in n and "hc_head" not in n and "position_bias" not in n]
    decayed_ids = {id(p) for p in decayed}
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": [p for p in everything if id(p) not in decayed_ids], "weight_decay": 0.0}],
                                  lr=a.rate, betas=(0.9, 0.95), eps=1e-9, fused=device == "cuda")
    mask_store = {}
    def forward(x):
        arguments = {}
        if ready_mask:
            key = tuple(x.shape)
            if key not in mask_store:
                if len(mask_store) > 6: mask_store.clear()
                mask_store[key] = masks(*key, raw["sliding_window"], device)
            arguments["attention_mask"] = mask_store[key]
        return model(input_ids=x, use_cache=False, **arguments).logits
    autocast = lambda: torch.autocast(device, dtype=torch.bfloat16)

    def step(x, rate):
        for group in optimizer.param_groups: group["lr"] = rate
        with autocast(): logits = forward(x)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())
        divergence = indexers.loss() if options["index"] else None
        if divergence is None: indexers.clear()
        (loss if divergence is None else loss + divergence).backward()
        norm = torch.nn.utils.clip_grad_norm_(main_parameters, 1.0)
        if options["index"]: torch.nn.utils.clip_grad_norm_(index_parameters, 1.0)
        optimizer.step(); optimizer.zero_grad(set_to_none=True)
        return loss.detach(), divergence.detach() if torch.is_tensor(divergence) else torch.zeros((), device=x.device), norm.detach()

    torch.set_float32_matmul_precision("high")
    model.train()
    for attempt in ("all", "without the index loss", "without rounding of the cache"):
        try:
            for on in (False, True):
                rounding.Switches.weights = rounding.Switches.cache = on
                if attempt == "without rounding of the cache": rounding.Switches.cache = False
                values = step(data.batch(4, a.length), 1e-6); say("trial step", attempt, "rounded" if on else "plain", [round(float(v), 4) for v in values])
            break
        except Exception:
            traceback.print_exc(); optimizer.zero_grad(set_to_none=True); indexers.clear()
            options["index"] = False
            if attempt.startswith("without rounding"): raise
    round_cache = rounding.Switches.cache
    rounding.Switches.weights = rounding.Switches.cache = False
    for mlp in mlps: mlp.tokens_by_expert.zero_(); mlp.use = torch.zeros_like(mlp.tokens_by_expert)

    def export(): return checkpoint.write(release, nano.state_of(model), a.data)

    begin = time.time(); budget = min(a.minutes * 60, a.limit - 85 - (begin - START))
    if a.smoke: budget = a.minutes * 60
    say(f"training for {budget:.0f} s, {a.rows} x {a.length} tokens a step")
    indexers.keep(10 ** 6)
    done, tokens, recent, interim, good = 0, 0, collections.deque(maxlen=50), False, None
    next_report, next_evaluation = 0.0, 0.15
    while True:
        share = (time.time() - begin) / budget
        if share >= 1: break
        rounding.Switches.weights = share >= ROUND_WEIGHTS; rounding.Switches.cache = round_cache and share >= ROUND_WEIGHTS
        if share >= SPARSE_INDEX: indexers.keep(raw["index_topk"])
        rows, length = (max(1, a.rows // 2), a.length * 2) if share >= LONG_CONTEXT else (a.rows, a.length)
        rate = a.rate * min(1.0, (done + 1) / 150) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        try:
            values = step(data.batch(rows, length), rate)
        except torch.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True); indexers.clear(); mask_store.clear(); torch.cuda.empty_cache()
            a.rows = max(1, a.rows // 2); say("WARNING: out of memory, rows a step now", a.rows); continue
        balance(mlps, 0.0 if share > FREEZE_BALANCE or not fast_experts else 2e-3 if share < 0.3 else 5e-4)
        done += 1; tokens += rows * length; recent.append(values)
        if share >= next_report:
            loss, divergence, norm = (float(torch.stack([v[i].float() for v in recent]).mean()) for i in range(3))
            shares = [[round(float(v), 3) for v in (m.use / m.use.sum().clamp_min(1)).aminmax()] for m in mlps]
            say(f"step {done} {share:5.1%} {tokens / 1e6:6.1f} M tokens {tokens / (time.time() - begin):8.0f}/s loss {loss:.4f} index {divergence:.4f} norm {norm:.2f} rate {rate:.2e} load {shares}")
            journal(event="step", step=done, share=round(share, 4), tokens=tokens, loss=loss, index_divergence=divergence, gradient_norm=norm, rate=rate, least_and_most_used=shares,
                    rounded=rounding.Switches.weights, length=length, gpu_gib=round(torch.cuda.max_memory_allocated() / 2 ** 30, 1) if device == "cuda" else 0)
            if math.isfinite(loss) and math.isfinite(norm): good = {n: t.detach().clone() for n, t in model.state_dict().items()}
            else:
                if good is None: raise SystemExit("the loss was never finite")
                model.load_state_dict(good); optimizer.state.clear(); recent.clear(); a.rate /= 2
                say("WARNING: the loss is not finite; back to the last good weights, with half the rate")
            next_report += 0.02 if not a.smoke else 0.2
            for mlp in mlps: mlp.use.zero_()
        if share >= next_evaluation:
            model.eval()
            with autocast(), torch.no_grad(): result = evaluate(forward, data, 4 if a.smoke else 24)
            model.train(); indexers.clear(); next_evaluation += 0.17
            say("held-out loss", {k: round(v, 4) for k, v in result.items()}); journal(event="heldout", step=done, rounded=rounding.Switches.weights, loss=result)
        if share >= FIRST_INTERIM and not interim:
            interim = True
            try: say("interim release", export(), "bytes; packed", pack(os.path.join(a.out, "nano-interim.tar"), [(release, "checkpoint")]))
            except Exception: traceback.print_exc()
    if good is not None and not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        say("WARNING: weights are not finite at the end; the last good ones are released"); model.load_state_dict(good)
    say(f"trained {done} steps, {tokens / 1e6:.1f} M tokens")

    # ---- release first, every figure after it
    size = export()
    say("release", size, "bytes"); pack(os.path.join(a.out, "nano.tar"), [(release, "checkpoint")])
    journal(event="release", bytes=size, steps=done, tokens=tokens)
    torch.set_float32_matmul_precision("highest")
    model.eval(); rounding.Switches.weights, rounding.Switches.cache = True, False
    most = 4 if a.smoke else 10_000
    summary = {"tokens_trained": tokens, "steps": done, "unigram_loss": base, "release_bytes": size}
    try:
        with torch.no_grad(): summary["heldout_loss_training_model"] = evaluate(forward, data, most)
        indexers.clear(); say("held-out loss of the training model, rounded, f32", summary["heldout_loss_training_model"])
    except Exception: traceback.print_exc()
    for handle in indexers.handles: handle.remove()
    optimizer = model = good = None; mask_store.clear()
    if device == "cuda": torch.cuda.empty_cache()

    model = nano.released(release, raw, device)
    plain = lambda x: model(input_ids=x, use_cache=False).logits
    summary["heldout_loss"] = evaluate(plain, data, most)
    summary["perplexity"] = {k: math.exp(v) for k, v in summary["heldout_loss"].items()}
    summary["perplexity_over_unigram"] = {k: math.exp(v - min(base[k].values())) for k, v in summary["heldout_loss"].items()}
    say("held-out loss of the release", summary["heldout_loss"]); say("perplexity / unigram (at most 1/3)", summary["perplexity_over_unigram"])
    journal(event="final", **summary)
    golden.write_json(os.path.join(numbers, "summary.json"), summary)
    pack(os.path.join(a.out, "nano.tar"), [(release, "checkpoint"), (numbers, "golden")])
    for part in (golden.expert_use, golden.passages, golden.answers):
        if time.time() - START > a.limit - 12 and not a.smoke: say("no time left for", part.__name__); continue
        try: say(part.__name__, part(model, raw, data, a.data, numbers, most))
        except Exception: traceback.print_exc()
        with open(os.path.join(a.out, "train.jsonl"), "rb") as source, open(os.path.join(numbers, "train.jsonl"), "wb") as copy: copy.write(source.read())
        say("packed", pack(os.path.join(a.out, "nano.tar"), [(release, "checkpoint"), (numbers, "golden")]))
    say("done")


if __name__ == "__main__":
    main()
