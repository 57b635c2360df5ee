//! Files far larger than memory, made of holes: only as much is looked at as a header may take.

use gguf_tools::gguf::{Gguf, MAX_HEADER_BYTES};
use test_vectors::gguf::{GgufBytes, RawValue};

#[test]
fn an_array_that_fills_a_terabyte_is_refused_by_the_bound_on_headers() {
    let mut array = 0_u32.to_le_bytes().to_vec();
    array.extend((1_u64 << 39).to_le_bytes());
    let file = GgufBytes::default().key("a", RawValue::Raw(9, array)).make();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("huge.gguf");
    std::fs::write(&path, &file.bytes).unwrap();
    if std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).is_err() {
        test_vectors::report_skip("this file system holds no file of 2^40 bytes");
        return;
    }
    let message = Gguf::open(&path).unwrap_err().to_string();
    assert!(message.contains("key `a`") && message.contains(&MAX_HEADER_BYTES.to_string()), "{message}");
}
