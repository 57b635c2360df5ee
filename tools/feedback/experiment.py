#!/usr/bin/env python3
"""Remakes the tables of docs/feedback.md on the nano model: llama.cpp's quantizer, the diagonal search and error feedback.

    experiment.py --work DIR [--ggsmith FILE] [--llama DIR] TABLE...

Tables: tuning, main, apart, propagate, amount, kinds, seeds, parts, llama, dense-tuning, dense. Those two need ggsmith alone; the others need a release build of ggsmith and llama.cpp's llama-imatrix, llama-quantize
and llama-perplexity. Files are made once and kept in --work; remove them to make them again.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NANO = os.path.join(ROOT, "test-vectors", "nano")
KINDS = ["prose", "code", "tables"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--work", required=True)
    parser.add_argument("--ggsmith", default=os.path.join(ROOT, "target", "release", "ggsmith"))
    parser.add_argument("--llama", help="folder of llama.cpp's programs")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=SETTINGS", help="variants of the table `tuning`")
    parser.add_argument("--settings", default="", help="settings of the feedback in all tables, instead of the defaults")
    parser.add_argument("--max-tokens", type=int, help="tokens of each text that are scored")
    return parser.parse_args()


class Lab:
    def __init__(self, options):
        self.options = options
        os.makedirs(options.work, exist_ok=True)

    def path(self, name):
        return os.path.join(self.options.work, name)

    def run(self, *command):
        print("+", " ".join(map(str, command)), file=sys.stderr, flush=True)
        done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
        if done.returncode != 0:
            sys.exit(f"failed ({done.returncode}): {' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
        return done.stdout

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return self.path(name)

    # Texts

    def text(self, folder, kind):
        with open(os.path.join(NANO, folder, kind + ".txt"), encoding="utf-8") as file:
            return file.read()

    def calibration(self):
        """All calibration text, a file a kind."""
        return [os.path.join(NANO, "calibration", kind + ".txt") for kind in KINDS]

    def heldout(self, kinds=KINDS):
        return [os.path.join(NANO, "heldout", kind + ".txt") for kind in kinds]

    def split(self):
        """Calibration text cut in two: the first three quarters to calibrate with while tuning, the rest to score on."""
        first, rest = [], []
        for kind in KINDS:
            text = self.text("calibration", kind)
            cut = text.rindex("\n", 0, len(text) * 3 // 4) + 1
            first.append(self.write(f"tune-{kind}.txt", text[:cut]))
            rest.append(self.write(f"tune-held-{kind}.txt", text[cut:]))
        return first, rest

    def drawn(self, name, n_bytes, seed, kinds=KINDS):
        """So many bytes of calibration text, in pieces of 2,000 drawn from all kinds."""
        pieces = []
        for kind in kinds:
            text = self.text("calibration", kind)
            pieces += [text[i : i + 2000] for i in range(0, len(text), 2000)]
        random.Random(seed).shuffle(pieces)
        return [self.write(name + ".txt", "".join(pieces)[:n_bytes])]

    # Models

    def made(self, name, *command):
        path = self.path(name + ".gguf")
        if not os.path.exists(path):
            self.run(self.options.ggsmith, "quantize", *command, "--out", path, "--quiet")
        return path

    def source(self):
        return os.path.join(NANO, "checkpoint")

    def wide(self):
        """The `q2` recipe with routed experts left in F32: what llama.cpp's tools start from."""
        return self.made("wide", "--hf", self.source(), "--recipe", "q2", "--experts", "F32", "--alignment", 32)

    def imatrix(self, name, texts):
        path = self.path(name + ".imatrix.gguf")
        if not os.path.exists(path):
            joined = "".join(open(text, encoding="utf-8").read() for text in texts)
            text = self.write(name + ".joined.txt", joined)
            program = os.path.join(self.options.llama, "llama-imatrix")
            self.run(program, "-m", self.wide(), "-f", text, "-o", path, "-c", 512, "-b", 512, "-ngl", 0, "-t", 1)
        return path

    def ggml(self, name, imatrix, gate_up="iq2_xxs", down="q2_k"):
        """llama.cpp's quantizer; everything but routed experts as in the recipe."""
        path = self.path(name + ".gguf")
        if not os.path.exists(path):
            types = ["ffn_gate_exps=" + gate_up, "ffn_up_exps=" + gate_up, "ffn_down_exps=" + down]
            types += [pattern + "=f16" for pattern in ["token_embd", "hc_.*fn", "ffn_gate_inp", "compressor", "indexer"]]
            flags = [part for kind in types for part in ("--tensor-type", kind)]
            program = os.path.join(self.options.llama, "llama-quantize")
            self.run(program, "--allow-requantize", "--imatrix", imatrix, *flags, self.wide(), path, "q8_0")
        return path

    def diagonal(self, name, imatrix, *more):
        return self.made(name, "--hf", self.source(), "--recipe", "q2", "--imatrix", imatrix, *more)

    def feedback(self, name, texts, settings="", *more):
        flags = [part for text in texts for part in ("--calibrate", text)]
        settings = ",".join(part for part in [self.options.settings, settings] if part)
        flags += ["--feedback", settings] if settings else []
        return self.made(name, "--hf", self.source(), "--recipe", "q2", *flags, *more)

    # Scores

    def scores(self, models, texts):
        """One row of the report a model, the source itself left out."""
        flags = [part for text in texts for part in ("--text", text)]
        if self.options.max_tokens:
            flags += ["--max-tokens", self.options.max_tokens]
        out = self.run(
            self.options.ggsmith, "score", "kld", self.source(), *models, *flags, "--numerics", "exact", "--json"
        )
        return json.loads(out)["rows"][1:]

    def table(self, title, variants, texts):
        """Scores variants (name, path) and prints them."""
        print(f"\n### {title}\n")
        print("| | KL to source | KL - line above, paired | NLL - source | same top-1 |\n| --- | --- | --- | --- | --- |")
        scores = self.scores([path for _, path in variants], texts)
        for (name, _), row in zip(variants, scores):
            score, above = row["comparison"], row["kl_above_line_before"]
            kl, nll, top = score["kl"], score["nll_difference"], score["same_top"]
            print(
                f"| {name} | {kl['mean']:.5f} [{kl['low']:.5f}, {kl['high']:.5f}] "
                f"| {above['mean']:+.5f} [{above['low']:+.5f}, {above['high']:+.5f}] "
                f"| {nll['mean']:.4f} [{nll['low']:.4f}, {nll['high']:.4f}] "
                f"| {100 * top['mean']:.2f} % [{100 * top['low']:.2f}, {100 * top['high']:.2f}] |",
                flush=True,
            )

    def three(self, name, texts):
        """The three quantizers on one calibration text."""
        imatrix = self.imatrix(name, texts)
        return [
            ("llama.cpp", self.ggml(name + "-ggml", imatrix)),
            ("diagonal search", self.diagonal(name + "-diagonal", imatrix)),
            ("error feedback", self.feedback(name + "-feedback", texts)),
        ]


def tuning(lab):
    """Variants of the settings, on text that is neither calibrated with nor held out in the end."""
    first, rest = lab.split()
    variants = []
    if lab.options.llama:
        imatrix = lab.imatrix("tune", first)
        variants += [("llama.cpp", lab.ggml("tune-ggml", imatrix)), ("diagonal search", lab.diagonal("tune-diagonal", imatrix))]
    variants.append(("defaults", lab.feedback("tune-feedback", first)))
    for text in lab.options.set:
        name, _, rest_of = text.partition(":")
        settings, *more = rest_of.split(" ")
        safe = re.sub(r"[^a-z0-9]+", "-", name.lower())
        variants.append((name, lab.feedback("tune-" + safe, first, settings, *more)))
    lab.table("Tuning split", variants, rest)


def main_table(lab):
    variants = lab.three("all", lab.calibration())
    lab.table("Held-out text, all kinds", variants, lab.heldout())


def apart(lab):
    variants = lab.three("all", lab.calibration())
    for kind in KINDS:
        lab.table(f"Held-out {kind}", variants, lab.heldout([kind]))


def propagate(lab):
    texts = lab.calibration()
    variants = [(which, lab.feedback(name, texts, "", "--propagate", which)) for which, name in [("source", "all-feedback"), ("quantized", "all-quantized")]]
    lab.table("What the next layer sees", variants, lab.heldout())


def drawn_three(lab, n_bytes, seed):
    name = f"drawn-{n_bytes}-{seed}"
    title = f"{n_bytes // 1000} kB of calibration text, seed {seed}"
    lab.table(title, lab.three(name, lab.drawn(name, n_bytes, seed)), lab.heldout())


def amount(lab):
    for n_bytes in [10_000, 25_000, 50_000, 100_000]:
        drawn_three(lab, n_bytes, 1)


def kinds(lab):
    for left_out in KINDS:
        others = [kind for kind in KINDS if kind != left_out]
        texts = [os.path.join(NANO, "calibration", kind + ".txt") for kind in others]
        lab.table(f"Calibrated without {left_out}, scored on {left_out}", lab.three("without-" + left_out, texts), lab.heldout([left_out]))


def seeds(lab):
    for seed in [1, 2, 3]:
        drawn_three(lab, 100_000, seed)


def parts(lab):
    texts = lab.calibration()
    imatrix = lab.imatrix("all", texts)
    for title, flags, gate_up, down in [
        ("gate and up only", ["--routed-w2", "Q8_0"], "iq2_xxs", "q8_0"),
        ("down only", ["--routed-w1", "Q8_0", "--routed-w3", "Q8_0"], "q8_0", "q2_k"),
    ]:
        name = title.replace(" ", "-")
        variants = [
            ("llama.cpp", lab.ggml(name + "-ggml", imatrix, gate_up, down)),
            ("diagonal search", lab.diagonal(name + "-diagonal", imatrix, *flags)),
            ("error feedback", lab.feedback(name + "-feedback", texts, "", *flags)),
        ]
        lab.table(title, variants, lab.heldout())


def llama(lab):
    """The same three files, scored by llama.cpp itself."""
    program = os.path.join(lab.options.llama, "llama-perplexity")
    text = lab.write("heldout.txt", "".join(open(path, encoding="utf-8").read() for path in lab.heldout()))
    base = lab.path("base.kld")
    common = ["-f", text, "-c", 512, "-b", 512, "-ngl", 0, "-t", 1]
    lab.run(program, "-m", lab.wide(), *common, "--kl-divergence-base", base)
    print("\n### Scored by llama.cpp\n\n| | mean KL | same top-1 |\n| --- | --- | --- |")
    for name, path in lab.three("all", lab.calibration()):
        command = [program, "-m", path, *common, "--kl-divergence-base", base, "--kl-divergence"]
        done = subprocess.run([str(part) for part in command], capture_output=True, encoding="utf-8", errors="replace")
        out = done.stdout + done.stderr
        # The line of the last chunk: means over all of them. The summary behind it is lost at times.
        lines = re.findall(r"^\s*\d+\s+\S+ ±\s+\S+\s+\S+ ±\s+\S+\s+(\S+ ±\s+\S+)\s+\S+ ±\s+\S+ %\s+(\S+ ±\s+\S+ %)\s*$", out, re.M)
        if done.returncode != 0 or not lines:
            sys.exit(f"failed ({done.returncode}): {' '.join(map(str, command))}\n{out[-3000:]}")
        print(f"| {name} | {lines[-1][0]} | {lines[-1][1]} |", flush=True)


DENSE = ["attention-proj", "shared", "output"]


def dense_variants(lab, name, texts, target, variants):
    """Dense matrices in one type, routed experts as they are in the source: the diagonal search and feedback."""
    types = [part for family in DENSE for part in ("--" + family, target)]
    fixed = ["--hf", lab.source(), "--recipe", "mxfp4", *types]
    imatrix = lab.path(name + ".own.imatrix.gguf")
    flags = [part for text in texts for part in ("--calibrate", text)]
    if not os.path.exists(imatrix):
        whole = [open(text, encoding="utf-8").read() for text in texts]
        pieces = [text[i : i + 1000] for text in whole for i in range(0, len(text), 1000)]
        dataset = lab.write(name + ".jsonl", "".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
        lab.run(lab.options.ggsmith, "imatrix", "collect", "--model", lab.source(), "--dataset", dataset, "--dense", "--out", imatrix, "--quiet")
    rows = [("diagonal search", lab.made(f"{name}-{target}-diagonal", *fixed, "--imatrix", imatrix))]
    for title, settings in variants:
        safe = re.sub(r"[^a-z0-9]+", "-", title.lower())
        more = ["--feedback", settings] if settings else []
        rows.append((title, lab.made(f"{name}-{target}-{safe}", *fixed, *flags, "--calibrate-dense", *more)))
    return rows


def dense_tuning(lab):
    """Settings of the feedback in dense matrices, on text that is neither calibrated with nor held out in the end."""
    first, rest = lab.split()
    variants = [("defaults", "")] + [tuple(text.split(":", 1)) for text in lab.options.set]
    for target in ["Q4_K", "Q8_0"]:
        lab.table(f"Dense {target}, tuning split", dense_variants(lab, "tune-dense", first, target, variants), rest)


def dense(lab):
    """Dense matrices alone in Q8_0 and Q4_K, then the whole q2 recipe with and without feedback in them."""
    texts = lab.calibration()
    for target in ["Q8_0", "Q4_K"]:
        rows = dense_variants(lab, "all-dense", texts, target, [("error feedback", "")])
        lab.table(f"Dense {target}, routed experts as in the source", rows, lab.heldout())
    for target in ["Q8_0", "Q4_K"]:
        types = [part for family in DENSE for part in ("--" + family, target)]
        rows = [
            ("experts", lab.feedback(f"all-experts-{target}", texts, "", *types)),
            ("experts and dense", lab.feedback(f"all-both-{target}", texts, "", *types, "--calibrate-dense")),
        ]
        lab.table(f"Whole q2, dense {target}, error feedback in", rows, lab.heldout())


TABLES = {"dense-tuning": dense_tuning, "dense": dense, "tuning": tuning, "main": main_table, "apart": apart, "propagate": propagate, "amount": amount, "kinds": kinds, "seeds": seeds, "parts": parts, "llama": llama}


if __name__ == "__main__":
    options = arguments()
    lab = Lab(options)
    for name in options.tables:
        if name not in TABLES:
            sys.exit(f"no table is called `{name}`; there are {', '.join(TABLES)}")
        TABLES[name](lab)
