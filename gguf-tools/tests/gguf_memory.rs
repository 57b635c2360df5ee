//! Hostile headers must not make the reader take memory that the file's own bytes do not account for.
#![expect(unsafe_code, reason = "counting what is allocated takes an allocator of one's own")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use gguf_tools::gguf::parse_header;
use test_vectors::gguf::{GgufBytes, RawValue};

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, counting the bytes of each thread.
struct Counting;

fn count(change: isize) {
    // A thread that is ending may have no counters any more; what it frees then is of no interest.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + change);
        PEAK.with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call goes to the system's allocator with the arguments unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn peak_of(work: impl FnOnce()) -> isize {
    let before = LIVE.get();
    PEAK.set(before);
    work();
    PEAK.get() - before
}

#[test]
fn no_count_or_length_makes_the_reader_allocate_more_than_the_file_accounts_for() {
    let made = GgufBytes::small().make();
    let mut worst = 0;
    for (_, place) in &made.counts {
        for n in [0, 1, 255, 1 << 20, 1 << 40, 1 << 60, 1 << 63, u64::MAX] {
            let mut bytes = made.bytes.clone();
            bytes[place.clone()].copy_from_slice(&n.to_le_bytes());
            worst = worst.max(peak_of(|| drop(parse_header(&bytes, Path::new("model.gguf")))));
        }
    }
    let bound = 8 * made.bytes.len() as isize + 16384;
    assert!(worst < bound, "{worst} bytes at the peak, {bound} allowed");
    assert!(worst > 1000, "the allocator counts nothing: {worst}");
}

#[test]
fn a_count_that_a_large_file_could_hold_allocates_only_as_entries_are_seen() {
    // 64 MiB of zeros behind the counts: room for two million tensors, but the first name is empty.
    let mut bytes = GgufBytes { n_tensors: Some(2_000_000), ..GgufBytes::default() }.make().bytes;
    bytes.resize(64 << 20, 0);
    let peak = peak_of(|| assert!(parse_header(&bytes, Path::new("model.gguf")).is_err()));
    assert!(peak < 65536, "{peak} bytes at the peak");
}

#[test]
fn memory_for_a_vocabulary_is_a_small_multiple_of_its_bytes() {
    let tokens: Vec<String> = (0..20_000).map(|i| format!("token{i}")).collect();
    let bytes = GgufBytes::default().key("tokenizer.ggml.tokens", RawValue::Strings(tokens)).make().bytes;
    let peak = peak_of(|| assert!(parse_header(&bytes, Path::new("model.gguf")).is_ok()));
    assert!(peak < 6 * bytes.len() as isize, "{peak} bytes for a header of {}", bytes.len());
}
