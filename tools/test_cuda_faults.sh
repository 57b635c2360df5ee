#!/usr/bin/env bash
# Lets a CUDA device fail under the program, and checks that each failure ends in one clear error.
#
#   tools/test_cuda_faults.sh GGSMITH [FAULTS_LIBRARY]
#
# GGSMITH: the program. FAULTS_LIBRARY: tests/driver/faults.c compiled elsewhere (see below), for machines without a C compiler.
# The library is put before the driver and passes every call on, until one is to fail: a kernel launch, a graph launch, a wait
# or an allocation, and all calls after it. Nothing of the machine is changed. Without a device: put a folder with
# tests/driver/stand_in.c, compiled as libcuda.so.1, in LD_LIBRARY_PATH.
# One line a scenario; exit status 0 all passed, 1 something failed, 2 wrong usage.
set -uo pipefail

if [ $# -lt 1 ] || [ ! -x "$1" ]; then
    sed -n '2,11s/^#  *//p' "$0" >&2
    exit 2
fi
ggsmith=$(realpath "$1")
here=$(dirname "$(dirname "$(realpath "$0")")")
nano=$here/test-vectors/nano
sources=$here/tests/driver
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/faults" "$work/link"

if [ $# -ge 2 ]; then
    cp "$2" "$work/faults/libcuda.so"
else
    # Linked with a library that only has the driver's name; at run time it is the driver.
    cc -shared -fPIC -O1 -Wl,-soname,libcuda.so.1 -o "$work/link/libcuda.so.1" "$sources/stand_in.c" &&
        cc -shared -fPIC -O1 -o "$work/faults/libcuda.so" "$sources/faults.c" -Wl,--no-as-needed "$work/link/libcuda.so.1" -ldl ||
        { echo "cannot compile $sources: pass the compiled library as second argument" >&2; exit 1; }
fi
export LD_LIBRARY_PATH=$work/faults${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

bench=(bench -m "$nano/checkpoint" --backend cuda --ctx-start 2048 --ctx-max 6144 --step-incr 4096 --gen-tokens 6 --bandwidth 1)
run=(run -m "$nano/checkpoint" --backend cuda -p "The sea is" --raw -n 8 --temp 0)
score=(score kld "$nano/checkpoint" "$nano/checkpoint" --backend cuda --text "$nano/heldout/prose.txt" --max-tokens 3000)
failed=0

verdict() { # PASS or FAIL, scenario, text
    printf '%s %s: %s\n' "$1" "$2" "$(tr '\n' ' ' <<<"$3" | cut -c 1-300)"
    [ "$1" = PASS ] || failed=1
}

command_with() { # faults, arguments: output in out and err, exit code in code
    local faults=$1
    shift
    FAULTS=$faults FAULTS_COUNTS=$work/counts timeout 60 "$ggsmith" "$@" >"$work/out" 2>"$work/err"
    code=$?
    error=$(sed -n '/^error: /,$p' "$work/err")
}

count() { # how often the latest command made such a call
    sed -n "s/^$1=//p" "$work/counts"
}

fails() { # scenario, faults, words that the error must have (separated by |), arguments
    local scenario=$1 faults=$2 words=$3 word
    shift 3
    command_with "$faults" "$@"
    local problem=
    [ "$code" = 1 ] || problem="exit code $code"
    [ "$(grep -c '^error: ' "$work/err")" = 1 ] || problem+=" not one error"
    grep -qiE 'panicked|abort|core dumped' "$work/err" && problem+=" a panic"
    while IFS= read -r -d '|' word; do
        grep -qF -- "$word" <<<"$error" || problem+=" no '$word'"
    done <<<"$words|"
    if [ -z "$problem" ]; then
        verdict PASS "$scenario ($faults)" "$error"
    else
        verdict FAIL "$scenario ($faults)" "$problem: $(tail -c 600 "$work/err")"
    fi
}

lost='lost to this run|start the program again|Xid|--backend cpu'
memory='is out of memory|bytes are wanted for|bytes are free|shorter context'

# How often each command calls what is to fail.
command_with '' doctor
[ "$code" = 0 ] && grep -q '^driver ' "$work/out" || { cat "$work/out" "$work/err"; verdict FAIL doctor "no device"; exit 1; }
sed -n 1,3p "$work/out"
for name in run score bench; do
    declare -n arguments=$name
    command_with '' "${arguments[@]}"
    if [ "$code" != 0 ]; then
        verdict FAIL "$name, undisturbed" "$(cat "$work/err")"
        exit 1
    fi
    declare "${name}_launches=$(count launches)" "${name}_graphs=$(count graphs)" "${name}_waits=$(count waits)"
    declare "${name}_allocations=$(count allocations)" "${name}_bytes=$(count bytes)"
    verdict PASS "$name, undisturbed" "$(tr '\n' ' ' <"$work/counts")"
done

# A device that is lost.
for code_name in 719:CUDA_ERROR_LAUNCH_FAILED 700:CUDA_ERROR_ILLEGAL_ADDRESS 214:CUDA_ERROR_ECC_UNCORRECTABLE; do
    fails "lost while a text is scored" "launches=$((score_launches / 2)),code=${code_name%:*}" "${code_name#*:}|kernel \`|$lost" "${score[@]}"
done
fails "lost at the first launch" launches=1 "kernel \`|$lost" "${run[@]}"
fails "lost while a prompt is read" "launches=$((run_launches / 3))" "kernel \`|$lost" "${run[@]}"
fails "lost at the last launch" "launches=$run_launches" "kernel \`|$lost" "${run[@]}"
fails "lost while waiting for a token" "waits=$((run_waits / 2))" "$lost" "${run[@]}"
fails "lost while waiting for a text" "waits=$((score_waits - 1))" "$lost" "${score[@]}"
for n in 1 2 $((bench_graphs - 1)); do
    fails "lost while decoding" "graphs=$n" "launching a graph|$lost" "${bench[@]}"
done
for i in 1 2 3 4 5 6; do
    fails "lost in bench" "launches=$((bench_launches * i / 6))" "$lost" "${bench[@]}"
done

# Memory that runs out: at an allocation, wherever that is.
seen=
for i in $(seq 0 23); do
    fails "no memory" "allocations=$((1 + (bench_allocations - 1) * i / 23))" "$memory" "${bench[@]}"
    seen+=$error
done
for what in 'wanted for weights' 'wanted for the key-value cache' 'wanted for activations'; do
    if grep -qF -- "$what" <<<"$seen"; then
        verdict PASS "no memory" "$what"
    else
        verdict FAIL "no memory" "never: $what"
    fi
done
fails "half of the memory" "bytes=$((bench_bytes / 2))" "$memory" "${bench[@]}"

# The device itself is as before.
command_with '' "${run[@]}"
if [ "$code" = 0 ]; then verdict PASS "afterwards" "$(tail -n 1 "$work/err")"; else verdict FAIL "afterwards" "$(cat "$work/err")"; fi
exit $failed
