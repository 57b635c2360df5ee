#!/bin/sh
# Compares importance matrices with llama.cpp on one model and text: both collect, each reads the other's file.
#
#   check_imatrix_with_llamacpp.sh GGSMITH MODEL.gguf TEXT LLAMA_BIN_DIR
#
# MODEL.gguf is one that llama.cpp runs, its routed experts stored as F16 so that they may be quantized.
# LLAMA_BIN_DIR holds llama-imatrix and llama-quantize. The text is cut into the chunks that llama.cpp takes when the
# model adds no beginning-of-sentence token. Prints, for each tensor, the ratio of the sums, the cosine and the
# largest ratio of two means; the matrices differ by llama.cpp's rounding of activations and by routes that it flips.
# Exit status: 0 each tool reads the other's file, 1 it does not, 2 wrong usage.

set -eu

if [ "$#" -ne 4 ]; then
    sed -n '2,10s/^#  *//p' "$0" >&2
    exit 2
fi
ggsmith=$1 model=$2 text=$3 llama=$4
n_chunks=6 chunk=512
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM

"$ggsmith" tokenize --model "$model" --prompt-file "$text" --raw --json |
    sed -n 's/^ *"token": \([0-9]*\),*$/\1/p' |
    awk -v n="$chunk" -v most="$n_chunks" '
        { chunk = chunk (chunk == "" ? "" : ",") $1 }
        NR % n == 0 && NR <= n * most { print "{\"tokens\": [" chunk "]}"; chunk = "" }' >"$folder/chunks.jsonl"
[ "$(wc -l <"$folder/chunks.jsonl")" -eq "$n_chunks" ] || {
    echo "$text is too short: $n_chunks chunks of $chunk tokens are needed" >&2
    exit 1
}

"$llama/llama-imatrix" --model "$model" --file "$text" --ctx-size "$chunk" --chunks "$n_chunks" \
    --output-file "$folder/theirs.gguf" --no-ppl >"$folder/log" 2>&1
"$ggsmith" imatrix collect --model "$model" --dataset "$folder/chunks.jsonl" --out "$folder/ours.gguf" --ctx "$chunk" \
    --numerics exact --activations int8 --down-input unweighted --dense --quiet
"$ggsmith" imatrix diff "$folder/ours.gguf" "$folder/theirs.gguf"
"$ggsmith" imatrix show "$folder/theirs.gguf"

# llama.cpp records the name of the matrix, so both forms get the same one.
quantize() {
    (cd "$folder" && "$llama/llama-quantize" --allow-requantize --imatrix imatrix --tensor-type exps=iq2_xxs \
        "$1" "$2" Q8_0 2 >log 2>&1)
}
model=$(realpath "$model")
cp "$folder/ours.gguf" "$folder/imatrix"
quantize "$model" from-gguf.gguf
"$ggsmith" imatrix convert "$folder/ours.gguf" --out "$folder/ours.dat" 2>/dev/null >&2
cp "$folder/ours.dat" "$folder/imatrix"
quantize "$model" from-dat.gguf
echo "llama-quantize took ours as GGUF and as .dat:"
(cd "$folder" && sha256sum from-gguf.gguf from-dat.gguf)
