#!/usr/bin/env python3
"""Throughput of downloads beside curl and beside one core's SHA-256, on the loopback address.

usage: tools/bench_download.py [--bytes N] [--rounds R] [--folder DIR] [--programs DIR]

Builds nothing: run first
  cargo build --release --workspace --bins --examples

`--programs DIR` takes `fetch`, `serve` and `hash_rate` from there instead, as on a machine without the sources.
`--folder DIR` is where the files go: /dev/shm leaves the disk out of the comparison.

Each round runs the programs one after another against the same server, and begins with another one each time, so that a busy
machine hits all of them alike; ratios are medians over the rounds of ratios within a round. Of every program it prints the
median rate, the CPU seconds that it and the server spent for a GB, and its peak memory. `curl, then sha256sum` is what a
checked download costs without overlap; `curl, then sync` is what a durable one costs, which ggsmith's are too.
What is missing on the machine (curl, sha256sum) is said and left out.
"""
import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

TARGET = os.path.join(os.path.dirname(__file__), "..", os.environ.get("CARGO_TARGET_DIR", "target"), "release")


def child(command, cwd):
    """Seconds of wall and CPU time and peak memory in MiB of one command; `None` if it failed."""
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - started
    if status != 0:
        print(f"{command[0]} failed: {errors.decode(errors='replace').strip()}", file=sys.stderr)
        return None
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def cpu_seconds(pid):
    """CPU time that a running process has spent."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine():
    """One line about the processor."""
    found = {}
    with open("/proc/cpuinfo") as info:
        for line in info:
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    flags = found.get("flags", found.get("Features", "")).split()
    known = [flag for flag in ["sha_ni", "sha2", "avx2", "avx512f"] if flag in flags]
    return f"{found.get('model name', platform.machine())}, {os.cpu_count()} cores, {' '.join(known)}"


def programs_to_run(folder, url, digest):
    """Name and command of everything that is compared here."""
    fetch = os.path.join(folder, "fetch")
    programs = {
        f"ggsmith, {n} connection{'s' if n > 1 else ''}": [fetch, url, ".", str(n), digest] for n in (1, 4, 8)
    }
    if shutil.which("curl") is None:
        print("curl is missing: nothing to compare with but SHA-256", file=sys.stderr)
        return programs
    curl = f"curl -sS --noproxy '*' -o file.bin {url}"
    programs["curl"] = ["sh", "-c", f"exec {curl}"]
    if shutil.which("sha256sum") is None:
        print("sha256sum is missing: `curl, then sha256sum` is left out", file=sys.stderr)
    else:
        programs["curl, then sha256sum"] = ["sh", "-c", f"{curl} && sha256sum file.bin"]
    programs["curl, then sync"] = ["sh", "-c", f"{curl} && sync file.bin"]
    return programs


def run_rounds(programs, server, folder, hash_rate, n_bytes, n_rounds):
    """Rates of SHA-256, and of each program what its rounds took: wall, own CPU, peak, CPU of the server."""
    results = {name: [] for name in programs}
    hashes = []
    names = list(programs)
    for number in range(n_rounds):
        hashes.append(float(subprocess.check_output([hash_rate, str(n_bytes)]).split()[0]))
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = cpu_seconds(server.pid)
            took = child(programs[name], folder)
            results[name].append(took and (*took, cpu_seconds(server.pid) - before))
            shutil.rmtree(folder)
            os.mkdir(folder)
    return hashes, {name: runs for name, runs in results.items() if all(runs)}


def report(hashes, results, n_bytes):
    """Prints medians and ratios."""
    print(f"{'one core, SHA-256 of memory':28} {statistics.median(hashes) / 1e6:8.0f} MB/s")
    giga = n_bytes / 1e9
    for name, runs in results.items():
        wall, own, peak, of_server = zip(*runs)
        rate = statistics.median(n_bytes / seconds for seconds in wall)
        print(
            f"{name:28} {rate / 1e6:8.0f} MB/s  CPU s/GB: own {statistics.median(own) / giga:5.2f}"
            f" server {statistics.median(of_server) / giga:5.2f}  peak {max(peak):6.1f} MiB"
        )
    ours = [name for name in results if name.startswith("ggsmith")]
    for name in ours:
        pairs = [n_bytes / run[0] / rate for run, rate in zip(results[name], hashes)]
        print(f"{name} / one core's SHA-256: {statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})")
    for name in ours:
        for other in results:
            if other not in ours:
                pairs = [o[0] / g[0] for g, o in zip(results[name], results[other])]
                print(f"{name} / {other}: {statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=2_000_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--programs", default=os.path.join(TARGET, "examples"))
    arguments = parser.parse_args()
    programs = os.path.abspath(arguments.programs)
    server = subprocess.Popen(
        [os.path.join(programs, "serve"), str(arguments.bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    url, digest = server.stdout.readline().split()
    folder = tempfile.mkdtemp(dir=arguments.folder)
    load = os.getloadavg()[0]
    try:
        hashes, results = run_rounds(
            programs_to_run(programs, url, digest),
            server,
            folder,
            os.path.join(programs, "hash_rate"),
            arguments.bytes,
            arguments.rounds,
        )
    finally:
        server.stdin.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(machine())
    print(f"{arguments.bytes} bytes, {arguments.rounds} rounds; load at the start {load:.1f}, then {os.getloadavg()[0]:.1f}")
    report(hashes, results, arguments.bytes)


main()
