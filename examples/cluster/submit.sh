#!/usr/bin/env bash
# Submits a build in shares and the merge behind it. Arguments: number of shares, output, and what `ggsmith quantize` takes.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 SHARES OUT.gguf --hf DIR [--recipe NAME] ..." >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
build=$(sbatch --parsable --array="1-$1" "$here/build.sbatch" "$@")
sbatch --dependency="afterok:${build%%;*}" "$here/merge.sbatch" "$1" "$2"
