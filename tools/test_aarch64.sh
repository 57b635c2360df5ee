#!/bin/sh
# Builds the tests of the CPU kernels for aarch64 and runs them under qemu-user.
#
#   test_aarch64.sh FOLDER [TEST_NAME...]
#
# FOLDER: a Debian system that is made there if it is absent (debootstrap, about 2 GB; needs root, and the packages
# debootstrap and qemu-user-static here). Its Rust must be at least the one that Cargo.toml asks for: sid is taken.
# TEST_NAME: integration tests of the runner that are run besides (goldens, schedules, nano, plain_ggml).
# Left out: tests of `verify` that map sparse files of 80 GB and more, which qemu-user refuses.
# Exit status: 0 all passed, 1 something failed, 2 wrong usage.

set -u

if [ "$#" -lt 1 ]; then
    sed -n '2,10s/^#  *//p' "$0" >&2
    exit 2
fi
folder=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd) || exit 1
qemu=$(command -v qemu-aarch64-static) || { echo "qemu-aarch64-static is absent: install qemu-user-static" >&2; exit 1; }

if [ ! -x "$folder/usr/bin/dpkg" ]; then
    debootstrap --variant=minbase --include=ca-certificates sid "$folder" http://deb.debian.org/debian || exit 1
fi
if [ ! -x "$folder/usr/bin/aarch64-linux-gnu-gcc" ] || [ ! -x "$folder/usr/bin/cargo" ]; then
    chroot "$folder" sh -c 'dpkg --add-architecture arm64 && apt-get update && apt-get install -y --no-install-recommends \
        cargo rustc gcc libc6-dev libstd-rust-dev:arm64 gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev:arm64' || exit 1
fi
cmp -s "$qemu" "$folder/usr/bin/qemu-aarch64-static" || cp "$qemu" "$folder/usr/bin/qemu-aarch64-static" || exit 1
cp /etc/resolv.conf "$folder/etc/resolv.conf"

# The work tree, and the fixtures beside it, at their own places in the folder.
mkdir -p "$folder/build/tree" "$folder/build/shared" || exit 1
mount --bind "$here" "$folder/build/tree" || exit 1
trap 'umount "$folder/build/shared" 2>/dev/null; umount "$folder/build/tree"' EXIT
trap 'exit 130' INT TERM
if [ -d "$here/../shared" ]; then
    mount --bind "$here/../shared" "$folder/build/shared" || exit 1
fi

tests=
for name in "$@"; do
    tests="$tests --test $name"
done
# shellcheck disable=SC2086 # several words
chroot "$folder" env CARGO_TARGET_DIR=/build/target CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64-static -L /' \
    cargo test --manifest-path /build/tree/Cargo.toml --locked --target aarch64-unknown-linux-gnu -p gguf-tools -p runner \
    --lib $tests --no-fail-fast -- --skip verify::tests || exit 1
