#!/usr/bin/env python3
"""Reads a GGUF file with the public Python package `gguf` and compares every tensor with our own values.

    pip install gguf
    check_with_gguf_py.py FILE.gguf                      # can the package read it, and is every value finite?
    check_with_gguf_py.py FILE.gguf VALUES.safetensors   # does it see the same values as we do?

VALUES holds one F32 tensor for each tensor of the GGUF file, of the same name and shape (outermost first).
Exit status: 0 all equal, 1 something differs or cannot be read, 2 wrong usage.
"""

import argparse
import json
import struct
import sys

import gguf
import numpy as np

PLAIN_TYPES = {"I8", "I16", "I32", "I64", "F64"}


class Values:
    """The F32 tensors of a .safetensors file, mapped, not read."""

    def __init__(self, path):
        with open(path, "rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        self.tensors = header
        self.data_offset = 8 + header_bytes
        self.bytes = np.memmap(path, mode="r")

    def get(self, name):
        entry = self.tensors[name]
        if entry["dtype"] != "F32":
            raise ValueError(f"dtype is {entry['dtype']}, expected F32")
        first, last = (self.data_offset + offset for offset in entry["data_offsets"])
        return np.frombuffer(self.bytes[first:last].tobytes(), "<f4").reshape(entry["shape"])


def dequantized(tensor):
    """The tensor's values by the package, or None where it only knows the type's size."""
    kind = tensor.tensor_type
    if kind.name in PLAIN_TYPES:
        return np.asarray(tensor.data).astype(np.float32)
    try:
        return np.asarray(gguf.dequantize(tensor.data, kind), np.float32)
    except NotImplementedError:
        return None


def distance_in_ulps(a, b):
    """Number of representable values between each pair; two NaN are equal, NaN and a number are far apart."""

    def ordered(x):
        bits = x.view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    apart = np.abs(ordered(a) - ordered(b))
    apart = np.where(np.isnan(a) != np.isnan(b), np.int64(1) << 32, apart)
    return np.where(np.isnan(a) & np.isnan(b), 0, apart)


def compare(found, expected, most_ulps):
    """What differs, as one line, or None."""
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, ours has {list(expected.shape)}"
    found, expected = (np.ascontiguousarray(x).reshape(-1) for x in (found, expected))
    apart = distance_in_ulps(found, expected)
    bad = np.flatnonzero(apart > most_ulps)
    if bad.size == 0:
        return None
    first = bad[0]
    return (
        f"{bad.size} of {found.size} values differ, at most by {apart.max()} ulp; "
        f"first at {first}: {found[first]!r}, ours is {expected[first]!r}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", metavar="FILE.gguf", help="the file to read with the package")
    parser.add_argument("values", metavar="VALUES.safetensors", nargs="?", help="our values of its tensors")
    parser.add_argument("--max-ulps", type=int, default=0, metavar="N", help="allowed difference (default 0)")
    parser.add_argument("--list", action="store_true", help="print every key and every tensor")
    arguments = parser.parse_args()

    reader = gguf.GGUFReader(arguments.gguf)
    problems = []
    if arguments.list:
        for name, field in reader.fields.items():
            text = repr(field.contents())
            print(f"{name} = {text if len(text) <= 100 else text[:97] + '...'}")

    ours = Values(arguments.values) if arguments.values else None
    skipped = []
    seen = set()
    for tensor in reader.tensors:
        seen.add(tensor.name)
        shape = [int(n) for n in reversed(tensor.shape)]
        if arguments.list:
            print(f"{tensor.name} {tensor.tensor_type.name} {shape} {int(tensor.n_bytes)} bytes")
        values = dequantized(tensor)
        if values is None:
            skipped.append(f"{tensor.name} ({tensor.tensor_type.name})")
            continue
        if list(values.shape) != shape:
            problems.append(f"{tensor.name}: {list(values.shape)} values, the header says {shape}")
        n_bad = int(np.count_nonzero(~np.isfinite(values)))
        if n_bad:
            problems.append(f"{tensor.name}: {n_bad} values are NaN or infinite")
        if ours is None:
            continue
        if tensor.name not in ours.tensors:
            problems.append(f"{tensor.name}: not in {arguments.values}")
            continue
        try:
            difference = compare(values, ours.get(tensor.name), arguments.max_ulps)
        except ValueError as error:
            difference = str(error)
        if difference:
            problems.append(f"{tensor.name}: {difference}")
    if ours is not None:
        problems.extend(f"{name}: only in {arguments.values}" for name in sorted(set(ours.tensors) - seen))

    for name in skipped:
        print(f"skipped, the package cannot dequantize it: {name}", file=sys.stderr)
    for problem in problems:
        print(f"differs: {problem}", file=sys.stderr)
    done = "compared" if ours is not None else "read"
    print(
        f"{len(reader.fields)} fields, {len(reader.tensors)} tensors: {len(reader.tensors) - len(skipped)} {done}, "
        f"{len(skipped)} skipped, {len(problems)} problems"
    )
    return 1 if problems or not reader.tensors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        print(f"cannot be read: {error}", file=sys.stderr)
        sys.exit(1)
