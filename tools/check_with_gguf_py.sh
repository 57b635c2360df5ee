#!/usr/bin/env bash
# Builds a file with each built-in recipe and checks that the public Python package `gguf` reads it and finds the
# same values in every tensor. Arguments: the ggsmith program, then checkpoint folders (the nano model if none).
set -euo pipefail
cd "$(dirname "$0")/.."
program=${1:?usage: check_with_gguf_py.sh GGSMITH [CHECKPOINT...]}
shift
[ "$#" -gt 0 ] || set -- test-vectors/nano/checkpoint
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for checkpoint in "$@"; do
    for recipe in q2 q2-q4 q4 mxfp4; do
        file=$folder/$recipe.gguf
        "$program" quantize --hf "$checkpoint" --recipe "$recipe" --out "$file" --overwrite --quiet >/dev/null
        cargo run --release --quiet --locked -p gguf-tools --example export_values -- "$file" "$folder/values.safetensors"
        python3 tools/check_with_gguf_py.py "$file" "$folder/values.safetensors"
    done
done
