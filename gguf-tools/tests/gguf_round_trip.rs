//! The reader reads what the layout writes, and files re-emit to the same bytes.

use std::path::{Path, PathBuf};

use gguf_tools::block::BlockType;
use gguf_tools::gguf::{Array, Gguf, GgufError, Layout, Metadata, NewTensor, Value, parse_header};
use proptest::prelude::*;
use test_vectors::gguf::{GgufBytes, RawValue};

/// Values of one number type and arrays of it.
fn numbers<T>() -> BoxedStrategy<Value>
where
    T: Arbitrary + Clone + 'static,
    Value: From<T> + From<Vec<T>>,
{
    prop_oneof![
        any::<T>().prop_map(Value::from),
        prop::collection::vec(any::<T>(), 0..5).prop_map(Value::from),
    ]
    .boxed()
}

fn values() -> impl Strategy<Value = Value> {
    prop_oneof![
        numbers::<u8>(),
        numbers::<i8>(),
        numbers::<u16>(),
        numbers::<i16>(),
        numbers::<u32>(),
        numbers::<i32>(),
        numbers::<f32>(),
        numbers::<bool>(),
        numbers::<u64>(),
        numbers::<i64>(),
        numbers::<f64>(),
        ".{0,20}".prop_map(Value::from),
        prop::collection::vec(".{0,9}", 0..5).prop_map(Value::from),
    ]
}

fn files() -> impl Strategy<Value = (Metadata, Vec<NewTensor>, u32)> {
    let block_types = prop::sample::select(BlockType::all().collect::<Vec<_>>());
    let keys = prop::collection::vec(("[a-z.]{1,12}", values()), 0..12);
    let shape = prop::collection::vec(1_u64..4, 0..4);
    let tensors = prop::collection::vec((block_types, shape, 1_u64..3), 0..8);
    (keys, tensors, 3_u32..13).prop_map(|(keys, tensors, bits)| {
        let mut metadata = Metadata::default();
        for (key, value) in keys {
            metadata.set(key, value);
        }
        let tensors = tensors.into_iter().enumerate().map(|(i, (block_type, mut shape, blocks))| {
            shape.push(blocks * block_type.values_per_block() as u64);
            NewTensor { name: format!("tensor.{i}.\u{fc}"), block_type, shape }
        });
        (metadata, tensors.collect(), 1 << bits)
    })
}

/// The byte at a place of a tensor in the files of these tests.
fn byte(tensor: usize, at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add(tensor as u8)
}

fn write(folder: &Path, layout: &Layout) -> PathBuf {
    let mut bytes = layout.header_bytes();
    for (i, tensor) in layout.tensors().iter().enumerate() {
        bytes.resize(tensor.offset_bytes as usize, 0);
        bytes.extend((0..tensor.n_bytes as usize).map(|at| byte(i, at)));
    }
    bytes.resize(layout.file_bytes() as usize, 0);
    let path = folder.join("file.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

fn again(gguf: &Gguf) -> Layout {
    let tensors = gguf.tensors().iter().map(|t| NewTensor {
        name: t.name.clone(),
        block_type: t.block_type,
        shape: t.shape.clone(),
    });
    Layout::new(gguf.metadata().clone(), tensors.collect(), gguf.alignment()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn what_the_layout_writes_is_read_and_re_emitted_to_the_same_bytes(
        (metadata, tensors, alignment) in files(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::new(metadata.clone(), tensors.clone(), alignment).unwrap();
        let gguf = Gguf::open(write(folder.path(), &layout)).unwrap();

        prop_assert!(gguf.sequential_offsets());
        prop_assert!(gguf.missing_data().is_empty());
        prop_assert_eq!(gguf.alignment(), alignment);
        prop_assert_eq!(gguf.shards()[0].data_offset_bytes, layout.data_offset_bytes());
        prop_assert_eq!(gguf.shards()[0].file_bytes, layout.file_bytes());
        prop_assert_eq!(layout.file_bytes() % u64::from(alignment), 0);
        for (key, value) in metadata.iter().filter(|(key, _)| *key != "general.alignment") {
            // As text, since NaN is not equal to itself.
            prop_assert_eq!(format!("{:?}", gguf.metadata().get(key)), format!("{:?}", Some(value)));
        }
        prop_assert_eq!(gguf.tensors().len(), tensors.len());
        for (i, (read, written)) in gguf.tensors().iter().zip(&tensors).enumerate() {
            prop_assert_eq!(&read.name, &written.name);
            prop_assert_eq!((read.block_type, &read.shape), (written.block_type, &written.shape));
            let data = gguf.data(read).unwrap();
            prop_assert_eq!(data.len() as u64, layout.tensors()[i].n_bytes);
            prop_assert!(data.iter().enumerate().all(|(at, &found)| found == byte(i, at)));
        }
        prop_assert_eq!(again(&gguf).header_bytes(), layout.header_bytes());
    }
}

#[test]
fn every_value_type_is_read_as_the_format_defines_it() {
    let raw = |id: u32, bytes: &[u8]| RawValue::Raw(id, bytes.to_vec());
    let file = GgufBytes::default()
        .key("u8", raw(0, &[200]))
        .key("i8", raw(1, &[0xff]))
        .key("u16", raw(2, &[1, 2]))
        .key("i16", raw(3, &[0xfe, 0xff]))
        .key("u32", raw(4, &[0, 0, 0, 0x80]))
        .key("i32", raw(5, &[0, 0, 0, 0x80]))
        .key("f32", raw(6, &1.5_f32.to_le_bytes()))
        .key("bool", raw(7, &[1]))
        .key("string", raw(8, b"\x03\0\0\0\0\0\0\0abc"))
        .key("array", raw(9, b"\x02\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\x01"))
        .key("u64", raw(10, &[0, 0, 0, 0, 0, 0, 0, 0x80]))
        .key("i64", raw(11, &[0xff; 8]))
        .key("f64", raw(12, &(-2.0_f64).to_le_bytes()));
    let header = parse_header(&file.make().bytes, Path::new("f")).unwrap();
    let found: Vec<_> = header.metadata.iter().map(|(_, value)| value.clone()).collect();
    let expected = [
        Value::U8(200),
        Value::I8(-1),
        Value::U16(0x0201),
        Value::I16(-2),
        Value::U32(1 << 31),
        Value::I32(i32::MIN),
        Value::F32(1.5),
        Value::Bool(true),
        Value::String("abc".to_owned()),
        Value::Array(Array::U16(vec![1, 256])),
        Value::U64(1 << 63),
        Value::I64(-1),
        Value::F64(-2.0),
    ];
    assert_eq!(found, expected);
    let get = |key: &str| header.metadata.get(key).unwrap();
    assert_eq!((get("i8").as_u64(), get("i8").as_i64(), get("i8").as_f64()), (None, Some(-1), Some(-1.0)));
    assert_eq!((get("u64").as_i64(), get("u64").as_u64()), (None, Some(1 << 63)));
    assert_eq!(get("array").as_array().unwrap().as_f64s(), Some(vec![1.0, 256.0]));
}

#[test]
fn the_byte_builder_and_the_layout_write_the_same_file() {
    let made = GgufBytes::small().make();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    std::fs::write(&path, &made.bytes).unwrap();
    let gguf = Gguf::open(path).unwrap();
    let layout = again(&gguf);
    assert_eq!(layout.header_bytes(), made.bytes[..made.data_start]);
    assert_eq!(layout.file_bytes(), made.bytes.len() as u64);
    assert_eq!(gguf.tensor("blk.0.ffn_gate_exps.weight").unwrap().shape, [3, 2, 256]);
    assert_eq!(gguf.data(gguf.tensor("output_norm.weight").unwrap()).unwrap(), [0x22; 20]);
}

#[test]
fn an_alignment_that_the_metadata_states_stays_stated() {
    let of = |metadata: &Metadata, alignment| {
        let layout = Layout::new(metadata.clone(), Vec::new(), alignment).unwrap();
        layout.metadata().get("general.alignment").cloned()
    };
    let mut metadata = Metadata::default();
    assert_eq!(of(&metadata, 32), None);
    assert_eq!(of(&metadata, 64), Some(Value::U32(64)));
    metadata.set("general.alignment", 64_u32);
    assert_eq!(of(&metadata, 32), Some(Value::U32(32)));
}

#[test]
fn what_no_reader_would_take_is_not_laid_out() {
    let tensor = |name: &str, block_type, shape: &[u64]| NewTensor {
        name: name.to_owned(),
        block_type,
        shape: shape.to_vec(),
    };
    let refused = |tensors: Vec<NewTensor>, says: &str| {
        let error = Layout::new(Metadata::default(), tensors, 32).unwrap_err();
        assert!(matches!(error, GgufError::Layout { .. }));
        assert!(error.to_string().contains(says), "{error}");
    };
    let f32 = BlockType::F32;
    refused(vec![tensor("t", f32, &[8]), tensor("t", f32, &[8])], "tensor `t`: found the name a second time");
    refused(vec![tensor("", f32, &[8])], "a name of 0 bytes");
    refused(vec![tensor(&"x".repeat(64), f32, &[8])], "a name of 64 bytes");
    refused(vec![tensor("t", f32, &[])], "0 dimensions");
    refused(vec![tensor("t", f32, &[1; 5])], "5 dimensions");
    refused(vec![tensor("t", f32, &[0, 8])], "no dimension of 0");
    refused(vec![tensor("t", BlockType::Q2K, &[2, 128])], "rows of 128 values");
    refused(vec![tensor("t", f32, &[1 << 31, 1 << 31])], "not representable");
    refused((0..8).map(|i| tensor(&format!("t{i}"), f32, &[1 << 29, 1 << 30])).collect(), "2^62");
    for alignment in [0, 1, 3, 4, 48, 1 << 17] {
        assert!(Layout::new(Metadata::default(), Vec::new(), alignment).is_err(), "{alignment}");
    }
    let mut metadata = Metadata::default();
    metadata.set("", 1_u32);
    assert!(Layout::new(metadata, Vec::new(), 32).is_err());
}

#[test]
fn keys_keep_their_order_and_are_replaced_in_place() {
    let mut metadata = Metadata::default();
    for key in ["a", "b", "c"] {
        metadata.set(key, 1_u32);
    }
    metadata.set("b", "two");
    assert_eq!(metadata.remove("a"), Some(Value::U32(1)));
    metadata.set("d", vec![1_i32]);
    assert_eq!(metadata.iter().map(|(key, _)| key).collect::<Vec<_>>(), ["b", "c", "d"]);
    assert_eq!(metadata.get("b").and_then(Value::as_str), Some("two"));
    assert_eq!((metadata.get("a"), metadata.len()), (None, 3));
}

/// A reader that counts what is taken from it.
struct Counted<'a>(&'a [u8], usize);

impl std::io::Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = std::io::Read::read(&mut self.0, buffer)?;
        self.1 += n;
        Ok(n)
    }
}

#[test]
fn a_header_is_read_from_a_stream_without_the_data_behind_it() {
    let header = |n_keys: usize| {
        let keys = (0..n_keys).map(|i| (format!("key.{i}"), RawValue::String("x".repeat(1000))));
        GgufBytes { keys: keys.collect(), ..GgufBytes::default() }.make().bytes
    };
    for n_keys in [0, 300] {
        let start = header(n_keys);
        let mut file = start.clone();
        file.resize(8 << 20, 0);
        let mut counted = Counted(&file, 0);
        let read = gguf_tools::gguf::read_header(&mut counted, Path::new("m.gguf")).unwrap();
        let parsed = parse_header(&read, Path::new("m.gguf")).unwrap();
        assert_eq!(parsed, parse_header(&file, Path::new("m.gguf")).unwrap());
        assert_eq!(counted.1, read.len());
        assert!(read.len() <= (4 * start.len()).max(64 << 10), "{} for {}", read.len(), start.len());
        // Cut anywhere, it is an error and not a wait for more.
        let cut = gguf_tools::gguf::read_header(&mut &start[..20], Path::new("m.gguf"));
        assert!(cut.is_err());
    }
    let page = vec![b'<'; 1 << 20];
    let mut counted = Counted(&page, 0);
    assert!(gguf_tools::gguf::read_header(&mut counted, Path::new("m.gguf")).is_err());
    assert_eq!(counted.1, 64 << 10, "little is read of a file that is no GGUF");
}
