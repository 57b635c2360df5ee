#!/usr/bin/env bash
# Splits and merges a GGUF here and with llama.cpp's llama-gguf-split, and compares byte for byte.
# Arguments: the ggsmith program, the llama-gguf-split program, a GGUF file of one piece with alignment 32.
set -euo pipefail
ggsmith=$1 theirs=$2 file=$(realpath "$3")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

compare() {
    cmp "$1" "$2" && echo "equal: $1 $2"
}

for first in "" --no-tensor-first-split; do
    rm -f ./*.gguf
    "$ggsmith" split "$file" --max-tensors 20 $first --out ours --quiet >/dev/null
    "$theirs" --split --split-max-tensors 20 $first "$file" theirs >/dev/null 2>&1
    for shard in ours-*.gguf; do
        compare "$shard" "theirs${shard#ours}"
    done
    # Our merge of their shards is the file.
    "$ggsmith" merge "$(ls theirs-*.gguf | tail -n 1)" --out merged.gguf --quiet >/dev/null
    compare merged.gguf "$file"
    # Their merge of our shards keeps the keys of the set with a count of 0; without them it is the file.
    "$theirs" --merge "$(ls ours-*.gguf | head -n 1)" kept.gguf >/dev/null 2>&1
    "$ggsmith" relabel kept.gguf --unset split.no --unset split.count --unset split.tensors.count \
        --out without.gguf --quiet >/dev/null
    compare without.gguf "$file"
done

rm -f ./*.gguf
"$ggsmith" split "$file" --max-size 4MB --out ours --quiet >/dev/null
"$theirs" --merge "$(ls ours-*.gguf | head -n 1)" kept.gguf >/dev/null 2>&1
"$ggsmith" merge kept.gguf --out without.gguf --quiet >/dev/null
compare without.gguf "$file"
