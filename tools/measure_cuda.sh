#!/usr/bin/env bash
# Checks and measures the CUDA backend on the machine at hand; what docs/results holds was made so.
#
#   tools/measure_cuda.sh GGSMITH OUT [FLASH.gguf]
#
# GGSMITH: the program. OUT: a folder for the results. FLASH.gguf: a full-shape file; without one, loading is not measured.
set -uo pipefail
ggsmith=$(realpath "$1") out=$2 file=${3:-}
here=$(dirname "$(dirname "$(realpath "$0")")")
nano=$here/test-vectors/nano
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() { # name, command: its output goes to OUT/name.txt
    local name=$1
    shift
    echo "\$ ggsmith ${*:2}" >"$out/$name.txt"
    "$@" >>"$out/$name.txt" 2>&1 || echo "exit code $?" >>"$out/$name.txt"
    tail -n 1 "$out/$name.txt"
}

{
    date -u +%Y-%m-%d
    "$ggsmith" --version
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$ggsmith" doctor
} >"$out/machine.txt" 2>&1

groups="rows attention matrices model equalities steering"
for group in $groups; do
    step "self-test-$group" "$ggsmith" doctor --self-test $group
done
# What chips compute with that have no instructions of their own and less shared memory.
for group in $groups; do
    step "self-test-portable-$group" "$ggsmith" doctor --self-test $group --portable-kernels
done
bench=("$ggsmith" bench --synthetic flash --recipe q2)
step decode-and-prefill "${bench[@]}" --ctx-start 2048 --ctx-max 8192 --step-incr 6144 --gen-tokens 128
step long-context "${bench[@]}" --ctx-start 2048 --ctx-max 131072 --step-mul 4 --gen-tokens 64 --ctx 131328
step portable "${bench[@]}" --ctx-start 2048 --ctx-max 2048 --gen-tokens 64 --portable-kernels
step profile "${bench[@]}" --ctx-start 2048 --ctx-max 2048 --profile
step portable-profile "${bench[@]}" --ctx-start 2048 --ctx-max 2048 --profile --portable-kernels
"$ggsmith" bench --kernels >"$out/kernels.json" 2>"$out/kernels.txt"
"$ggsmith" bench --kernels --portable-kernels >"$out/portable-kernels.json" 2>"$out/portable-kernels.txt"

"$ggsmith" quantize --hf "$nano/checkpoint" --recipe q2 --out "$work/nano-q2.gguf" --quiet >/dev/null 2>&1
step doctor-model "$ggsmith" doctor --model "$work/nano-q2.gguf"
for backend in cpu cuda; do
    step "score-$backend" "$ggsmith" score kld "$nano/checkpoint" "$work/nano-q2.gguf" --backend $backend \
        --text "$nano/heldout/prose.txt" --max-tokens 6000
    step "imatrix-$backend" "$ggsmith" imatrix collect -m "$nano/checkpoint" --dataset "$nano/calibration/prose.txt" \
        --max-tokens 20000 --numerics exact --out "$work/$backend.gguf" --backend $backend --quiet
done
step imatrix-difference "$ggsmith" imatrix diff "$work/cpu.gguf" "$work/cuda.gguf"
# Bounds for equal arithmetic; official roundings turn differences in the last bit into whole steps.
"$ggsmith" vectors record -m "$nano/checkpoint" --out "$work/vectors" --numerics exact --backend cpu >/dev/null 2>&1
step vectors "$ggsmith" vectors check -m "$nano/checkpoint" --vectors "$work/vectors" --numerics exact --activations f32 --backend cuda

if command -v compute-sanitizer >/dev/null; then
    head -c 1500 "$nano/heldout/prose.txt" >"$work/text.txt"
    for tool in memcheck racecheck; do
        for run in "score kld $work/nano-q2.gguf $work/nano-q2.gguf --text $work/text.txt --max-tokens 150" \
            "run -p The --raw -n 6 --temp 0 -m $work/nano-q2.gguf"; do
            # shellcheck disable=SC2086 # words of a command
            step "$tool-${run%% *}" compute-sanitizer --tool $tool "$ggsmith" $run --backend cuda
        done
    done
fi
if [ -n "$file" ]; then
    step file "$ggsmith" bench -m "$file" --ctx-start 2048 --ctx-max 8192 --step-incr 6144 --gen-tokens 128
    step file-run "$ggsmith" run -m "$file" -p "The sea is" -n 200 --ctx 4096
fi
