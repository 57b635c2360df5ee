"""Builds one GGUF in shares on the machines of a Ray cluster, and merges them.

Every machine sees checkpoint and output folder under the same paths. A share whose worker dies is started again by Ray
and goes on from its part file; finished shares are not made twice.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ray

PR_SET_PDEATHSIG = 1


def shard_path(out: str, number: int, shards: int) -> Path:
    return Path(f"{out.removesuffix('.gguf')}-{number:05}-of-{shards:05}.gguf")


def die_with_parent() -> None:
    """A worker that is killed must not leave a child behind that holds the part file."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@ray.remote
def build_shard(program: str, out: str, number: int, shards: int, threads: int, arguments: list[str]) -> str:
    final = shard_path(out, number, shards)
    if final.exists():
        return str(final)
    with open(f"{final}.workers", "a", encoding="utf-8") as attempts:
        attempts.write(f"{socket.gethostname()} {os.getpid()} {time.time():.3f}\n")
    command = [program, "quantize", "--out", out, "--shard", f"{number}/{shards}", "--threads", str(threads)]
    done = subprocess.run(
        command + arguments, check=False, capture_output=True, text=True, preexec_fn=die_with_parent
    )
    if done.returncode != 0:
        raise RuntimeError(f"share {number} of {shards}: {done.stderr.strip()}")
    return str(final)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="the file to make")
    parser.add_argument("--shards", type=int, required=True, help="shares, at most one for each tensor")
    parser.add_argument("--threads", type=int, default=1, help="processors of one share")
    parser.add_argument("--local", type=int, metavar="N", help="start a cluster of N processors here")
    parser.add_argument("--retries", type=int, default=5, help="how often a share is started again")
    parser.add_argument("--program", default="ggsmith", help="the ggsmith program, the same on every machine")
    parser.add_argument("arguments", nargs="+", help="after --: what `ggsmith quantize` takes beside")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.local:
        ray.init(num_cpus=options.local, include_dashboard=False, object_store_memory=80 << 20)
    else:
        ray.init(address="auto")
    build = build_shard.options(num_cpus=options.threads, max_retries=options.retries)
    out = os.path.abspath(options.out)
    shares = [
        build.remote(options.program, out, number, options.shards, options.threads, options.arguments)
        for number in range(1, options.shards + 1)
    ]
    paths = ray.get(shares)
    ray.shutdown()
    subprocess.run([options.program, "merge", paths[0], "--out", out], check=True)
    for path in paths:
        Path(f"{path}.workers").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
