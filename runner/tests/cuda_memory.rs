//! Memory of a device that runs out: what was under way fails with an error that says so; sessions, the model and the process
//! go on. Skipped, with the reason, where there is no device.
#![allow(clippy::print_stderr, reason = "a test that is skipped says so, and failures on the way are shown")]

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use gguf_tools::checkpoint::{Checkpoint, tokenizer as source};
use runner::cuda::{CudaError, Device, DeviceBuffer};
use runner::logits::argmax;
use runner::tokenizer::Tokenizer;
use runner::{Model, Options, Processor, RunnerError, Session};

/// All memory of the device is wanted by one test at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Bytes of what is given back at a time.
const PIECE_BYTES: usize = 1 << 20;
/// What is given back at a time, at most so often.
const N_PIECES: usize = 384;

/// Folder of the nano model's checkpoint.
fn checkpoint() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../test-vectors/nano/checkpoint"))
}

/// A device, if there is one; says why not.
fn device(what: &str) -> Option<Device> {
    Device::open(0).inspect_err(|error| eprintln!("skipped: {what}: {error}")).ok()
}

fn open() -> Model {
    let options = Options { processor: Processor::Cuda(0), ..Options::default() };
    // As the program does it on a GPU.
    Model::open(checkpoint(), Options { attention_tokens: options.batch_tokens, ..options }).unwrap()
}

/// Whether results can be compared: the driver that stands in for tests of this test computes nothing.
fn computes(device: &Device) -> bool {
    device.facts().name != "Stand-in"
}

/// Some text, as often as it takes.
fn text(n_tokens: usize) -> Vec<u32> {
    let metadata = source::metadata(&Checkpoint::open(checkpoint()).unwrap()).unwrap();
    let text = fs::read_to_string(checkpoint().join("../heldout/prose.txt")).unwrap();
    let tokens = Tokenizer::from_metadata(&metadata).unwrap().encode_plain(&text).unwrap();
    tokens.iter().copied().cycle().take(n_tokens).collect()
}

/// Nearly all memory of a device.
struct Hog {
    /// Of [`PIECE_BYTES`] each.
    pieces: Vec<DeviceBuffer<u8>>,
    _rest: Vec<DeviceBuffer<u8>>,
}

impl Hog {
    fn new(device: &Device) -> Self {
        let pieces = (0..N_PIECES).map(|_| device.alloc(PIECE_BYTES, "a piece").unwrap()).collect();
        let mut rest = Vec::new();
        let (free, _) = device.memory().unwrap();
        let mut n_bytes = free.next_power_of_two() / 2;
        while n_bytes >= 64 << 10 {
            match device.alloc(n_bytes, "the rest") {
                Ok(buffer) => rest.push(buffer),
                Err(CudaError::OutOfMemory { .. }) => n_bytes /= 2,
                Err(error) => panic!("{error}"),
            }
        }
        Self { pieces, _rest: rest }
    }
}

/// What memory was wanted for, by an error that must say all about it.
fn wanted_for(error: CudaError) -> String {
    let message = error.to_string();
    match error {
        CudaError::OutOfMemory { what, wanted, free, total, .. } => {
            assert!(wanted > 0 && free < total, "{message}");
            for part in [&what, &format!("{wanted} bytes"), &format!("{free} of {total}")] {
                assert!(message.contains(part), "{message} lacks {part}");
            }
            what
        }
        // Kernels are loaded by the driver when they are first used.
        _ => message,
    }
}

/// Continues a session by the text that it has not read, while the hog gives memory back piece by piece. Gives the logits and
/// what memory was missing for.
fn read_in_spite_of(session: &mut Session<'_>, text: &[u32], mut hog: Hog) -> (Vec<f32>, Vec<String>) {
    let mut missing = Vec::new();
    loop {
        let before = session.n_tokens();
        match session.prefill(&text[before..]) {
            Ok(logits) => {
                assert_eq!(session.n_tokens(), text.len());
                eprintln!("{} failures: {missing:?}", missing.len());
                return (logits, missing);
            }
            Err(RunnerError::Cuda(error)) if error.is_about_memory() => {
                missing.push(wanted_for(error));
                assert!(session.n_tokens() >= before);
            }
            Err(error) => panic!("another error than that of memory: {error}: {error:?}"),
        }
        assert!(hog.pieces.pop().is_some(), "all memory was given back, and it is not enough");
    }
}

/// Logits behind the next tokens, the most probable each time.
fn continued(session: &mut Session<'_>, mut logits: Vec<f32>, n: usize) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for _ in 0..n {
        logits = session.decode(argmax(&logits)).unwrap();
        all.push(logits.clone());
    }
    all
}

fn same_bits(device: &Device, found: &[Vec<f32>], expected: &[Vec<f32>]) -> bool {
    let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|value| value.to_bits()).collect::<Vec<_>>();
    !computes(device) || bits(found) == bits(expected)
}

#[test]
fn a_cache_that_cannot_grow_ends_a_call_and_nothing_else() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(device) = device("caches that cannot grow") else { return };
    // Beyond the first 4,096 tokens that caches have room for, in two batches.
    let text = text(6000);
    let undisturbed = || {
        let model = open();
        let mut other = model.session();
        let logits = other.prefill(&text[..10]).unwrap();
        let of_other = continued(&mut other, logits, 8);
        let mut session = model.session();
        session.prefill(&text[..3000]).unwrap();
        let mut rows = vec![session.prefill(&text[3000..]).unwrap()];
        rows.extend(continued(&mut session, rows[0].clone(), 5));
        (of_other, rows)
    };
    let (expected_of_other, expected) = undisturbed();

    let model = open();
    // A recorded step: what it uses must not be given back.
    let mut other = model.session();
    let logits = other.prefill(&text[..10]).unwrap();
    let mut of_other = continued(&mut other, logits, 4);
    let mut session = model.session();
    session.prefill(&text[..3000]).unwrap();
    let (logits, missing) = read_in_spite_of(&mut session, &text, Hog::new(&device));
    assert!(missing.first().is_some_and(|what| what.contains("cache")), "{missing:?}");
    let mut rows = vec![logits];
    rows.extend(continued(&mut session, rows[0].clone(), 5));
    assert!(same_bits(&device, &rows, &expected), "other logits than those of a session that never failed");
    of_other.extend(continued(&mut other, of_other[3].clone(), 4));
    assert!(same_bits(&device, &of_other, &expected_of_other), "other logits in a session beside");

    let mut third = model.session();
    third.prefill(&text[..3000]).unwrap();
    assert!(
        same_bits(&device, &[third.prefill(&text[3000..]).unwrap()], &expected[..1]),
        "other logits in a new session"
    );
}

#[test]
fn activations_without_room_end_a_call_and_nothing_else() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(device) = device("activations without room") else { return };
    let text = text(2100);
    for first in [0, 1, 75] {
        let read = |model: &Model, hogged: bool| {
            let mut session = model.session();
            if first > 0 {
                session.prefill(&text[..first]).unwrap();
            }
            let (logits, missing) = if hogged {
                read_in_spite_of(&mut session, &text, Hog::new(&device))
            } else {
                (session.prefill(&text[first..]).unwrap(), Vec::new())
            };
            let mut rows = vec![logits];
            rows.extend(continued(&mut session, rows[0].clone(), 4));
            (rows, missing)
        };
        let (expected, _) = read(&open(), false);
        let model = open();
        let (rows, missing) = read(&model, true);
        assert!(missing.len() > 1, "nothing failed: {missing:?}");
        assert!(
            same_bits(&device, &rows, &expected),
            "other logits than those of a session that never failed"
        );
        let (again, _) = read(&model, false);
        assert!(same_bits(&device, &again, &expected), "other logits in a new session");
    }
}

#[test]
fn decoding_goes_on_where_memory_is_short() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(device) = device("decoding without memory") else { return };
    let text = text(200);
    let expected = {
        let model = open();
        let mut session = model.session();
        let logits = session.prefill(&text).unwrap();
        continued(&mut session, logits, 6)
    };
    let model = open();
    let mut session = model.session();
    let logits = session.prefill(&text).unwrap();
    let mut hog = Hog::new(&device);
    // The first step takes memory of its own, the second is recorded.
    let token = argmax(&logits);
    let mut n_failures = 0;
    let first = loop {
        match session.decode(token) {
            Ok(logits) => break logits,
            Err(RunnerError::Cuda(error)) if error.is_about_memory() => n_failures += 1,
            Err(error) => panic!("{error}: {error:?}"),
        }
        assert_eq!(session.n_tokens(), text.len());
        assert!(hog.pieces.pop().is_some(), "all memory was given back, and it is not enough");
    };
    eprintln!("{n_failures} failures");
    drop(hog);
    let mut rows = vec![first];
    rows.extend(continued(&mut session, rows[0].clone(), 5));
    assert!(same_bits(&device, &rows, &expected), "other logits than those of a session that never failed");
}
