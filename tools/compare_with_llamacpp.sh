#!/bin/sh
# Compares the next-token distributions of our CPU runner with llama.cpp's on the same GGUF files.
#
#   compare_with_llamacpp.sh TEXT FILE.gguf... LLAMA_BIN_DIR
#
# LLAMA_BIN_DIR holds llama-perplexity. The text is cut into chunks of 512 tokens; the second half of each is
# compared. llama.cpp keeps its cache in f32. It is also compared with itself without repacked weights: rounding alike,
# but adding in another order, which shows how near two programs can come.
# Exit status: 0 compared, 1 something failed, 2 wrong usage.

set -u

if [ "$#" -lt 3 ]; then
    sed -n '2,11s/^#  *//p' "$0" >&2
    exit 2
fi
for last in "$@"; do :; done
program=$last/llama-perplexity
if [ ! -x "$program" ]; then
    echo "no llama-perplexity in $last: give the folder of llama.cpp's programs as the last argument" >&2
    exit 2
fi
text=$1
shift

context=512
cache=f32
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
here=$(dirname "$0")
cargo build --quiet --release --manifest-path "$here/../Cargo.toml" -p runner --example against_llamacpp || exit 1
compare=${CARGO_TARGET_DIR:-$here/../target}/release/examples/against_llamacpp

# llama FILE.gguf ARGUMENTS
llama() {
    model=$1
    shift
    if ! "$program" --model "$model" --file "$text" --ctx-size "$context" --batch-size "$context" \
        --ubatch-size "$context" --cache-type-k "$cache" --cache-type-v "$cache" --flash-attn off --gpu-layers 0 \
        --chunks "-1" --kl-divergence-base "$folder/saved" "$@" </dev/null >"$folder/log" 2>&1; then
        echo "llama.cpp failed on $model:" >&2
        tail -n 5 "$folder/log" >&2
        return 1
    fi
}

while [ "$#" -gt 1 ]; do
    # One chunk a batch, so that llama.cpp meets every sequence alone, as we do.
    llama "$1" || exit 1
    echo "$1 (llama.cpp with $cache cache)"
    "$compare" "$1" "$folder/saved" || exit 1
    llama "$1" --no-repack --kl-divergence || exit 1
    sed -n 's/^\(Mean *KLD\|Same top p\):/llama.cpp with itself, not repacked: \1/p' "$folder/log"
    shift
done
