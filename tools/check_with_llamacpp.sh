#!/bin/sh
# Loads and runs GGUF files with llama.cpp on the CPU, a few tokens each, and says which of them it accepts.
#
#   check_with_llamacpp.sh FILE.gguf... LLAMA_BIN_DIR
#
# LLAMA_BIN_DIR holds llama-completion (build llama.cpp's target of that name). For a split model give its first shard.
# Exit status: 0 every file ran, 1 some file did not, 2 wrong usage.

set -u

if [ "$#" -lt 2 ]; then
    sed -n '2,8s/^#  *//p' "$0" >&2
    exit 2
fi
for last in "$@"; do :; done
program=$last/llama-completion
if [ ! -x "$program" ]; then
    echo "no llama-completion in $last: give the folder of llama.cpp's programs as the last argument" >&2
    exit 2
fi

prompt="The capital of France is"
n_tokens=8
limit=300
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM

# Runs one file; the reason of a failure is left in $why.
run() {
    timeout "$limit" "$program" --model "$1" --prompt "$prompt" --n-predict "$n_tokens" --ctx-size 256 \
        --gpu-layers 0 --fit off --temp 0 --seed 1 --ignore-eos --no-warmup --no-conversation --no-display-prompt --simple-io \
        </dev/null >"$folder/out" 2>"$folder/log"
    status=$?
    if [ "$status" -eq 124 ]; then
        why="ran longer than $limit s"
    elif [ "$status" -ne 0 ]; then
        why="exit status $status"
    elif [ ! -s "$folder/out" ]; then
        why="no text came out"
    elif ! grep -q "eval time = .* / *$((n_tokens - 1)) runs" "$folder/log"; then
        why="it stopped before $n_tokens tokens"
    else
        return 0
    fi
    return 1
}

failed=0
while [ "$#" -gt 1 ]; do
    if run "$1"; then
        printf 'pass  %s\n' "$1"
    else
        printf 'FAIL  %s: %s\n' "$1" "$why"
        { grep -i -E 'error|fail|invalid|unknown|missing|abort' "$folder/log" || tail -n 3 "$folder/log"; } |
            tail -n 5 | sed 's/^/      /'
        failed=$((failed + 1))
    fi
    shift
done
[ "$failed" -eq 0 ] || exit 1
