#!/usr/bin/env python3
"""Throughput of downloads beside curl and beside one core's SHA-256, on the loopback address.

usage: tools/bench_download.py [--bytes N] [--rounds R] [--folder DIR]

Builds nothing: run first
  cargo build --release -p download -p test-vectors --examples

Each round runs the programs one after another against the same server, so that a busy machine hits all of them alike.
Prints one line a program with the median rate, and the ratios that docs/download.md quotes. `curl | sha256` is curl
followed by sha256sum of the file: what a checked download costs without overlap.
"""
import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

TARGET = os.path.join(os.path.dirname(__file__), "..", os.environ.get("CARGO_TARGET_DIR", "target"), "release")


def child(command, cwd):
    """Seconds of wall and CPU time and peak memory in MiB of one command."""
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - started
    if status != 0:
        sys.exit(f"{command[0]} failed: {errors.decode()}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=2_000_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    n = arguments.bytes
    fetch = os.path.abspath(os.path.join(TARGET, "examples", "fetch"))
    hash_rate = os.path.abspath(os.path.join(TARGET, "examples", "hash_rate"))
    server = subprocess.Popen(
        [os.path.join(TARGET, "examples", "serve"), str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    url, digest = server.stdout.readline().split()
    folder = tempfile.mkdtemp(dir=arguments.folder)
    programs = {
        "ggsmith, 1 connection": [fetch, url, ".", "1", digest],
        "ggsmith, 4 connections": [fetch, url, ".", "4", digest],
        "curl": ["curl", "-sS", "-o", "file.bin", url],
        "curl, then sha256sum": ["sh", "-c", f"curl -sS -o file.bin {url} && sha256sum file.bin"],
    }
    results = {name: [] for name in programs}
    hashes = []
    try:
        for _ in range(arguments.rounds):
            hashes.append(float(subprocess.check_output([hash_rate, str(n)]).split()[0]))
            for name, command in programs.items():
                results[name].append(child(command, folder))
                shutil.rmtree(folder)
                os.mkdir(folder)
    finally:
        server.stdin.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{n} bytes, median of {arguments.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    one_core = statistics.median(hashes)
    print(f"{'one core, SHA-256 of memory':28} {one_core / 1e6:8.0f} MB/s")
    rates = {}
    for name, runs in results.items():
        rates[name] = n / statistics.median(wall for wall, _, _ in runs)
        cpu = statistics.median(cpu for _, cpu, _ in runs)
        peak = max(peak for _, _, peak in runs)
        print(f"{name:28} {rates[name] / 1e6:8.0f} MB/s  CPU {cpu:6.2f} s  peak {peak:6.1f} MiB")
    pairs = [n / wall / rate for (wall, _, _), rate in zip(results["ggsmith, 1 connection"], hashes)]
    print(f"1 connection / one core's SHA-256: {statistics.median(pairs):.2f}")
    for name in ["ggsmith, 1 connection", "ggsmith, 4 connections"]:
        for other in ["curl", "curl, then sha256sum"]:
            ratio = statistics.median(o[0] / g[0] for g, o in zip(results[name], results[other]))
            print(f"{name} / {other}: {ratio:.2f}")


main()
