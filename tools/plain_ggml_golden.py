"""Writes what llama.cpp without vector instructions predicts: the golden of runner/tests/plain_ggml.rs.

    plain_ggml_golden.py LLAMA_LOGITS OUT.json NAME=FILE.gguf=TEXTS.json=TEXT...

LLAMA_LOGITS: a program that is called with MODEL, a file of token ids, an output file, `f32` (the cache), `0` (no flash
attention) and `0` (tokens to generate), and writes the logits of every position as f32. TEXT names a list of token ids in
TEXTS.json, or an object that holds one as `ids`. docs/llamacpp.md says how llama.cpp is built.
"""

import array
import hashlib
import json
import os
import subprocess
import sys
import tempfile

# At the end of a file, behind its metadata.
WEIGHT_BYTES = 4 << 20


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    program, out, *models = sys.argv[1:]
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens, logits = os.path.join(folder, "tokens"), os.path.join(folder, "logits")
        for model in models:
            name, file, texts, text = model.split("=")
            with open(texts, encoding="utf-8") as source:
                ids = json.load(source)[text]
            ids = ids["ids"] if isinstance(ids, dict) else ids
            with open(tokens, "w", encoding="utf-8") as target:
                target.write(" ".join(map(str, ids)))
            subprocess.run([program, file, tokens, logits, "f32", "0", "0"], check=True, stderr=subprocess.DEVNULL)
            values = array.array("f")
            with open(logits, "rb") as source:
                values.frombytes(source.read())
            width = len(values) // len(ids)
            rows = [values[at * width : (at + 1) * width] for at in range(len(ids))]
            with open(file, "rb") as source:
                source.seek(-WEIGHT_BYTES, os.SEEK_END)
                digest = hashlib.sha256(source.read()).hexdigest()
            golden[name] = {"weights_sha256": digest, "text": text, "best_tokens": [row.index(max(row)) for row in rows]}
    with open(out, "w", encoding="utf-8") as target:
        lines = (f"{json.dumps(name)}: {json.dumps(model)}" for name, model in golden.items())
        target.write("{\n" + ",\n".join(lines) + "\n}\n")


main()
