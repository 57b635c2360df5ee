//! Block formats against goldens from independent code, and properties that hold for any input.

use gguf_tools::block::{BlockType, Guide};
use gguf_tools::simd::Level;
use test_vectors::{fixtures, golden_arrays};

/// Bytes of rows of `n` values each, with the format's quantizer.
fn quantize(block_type: BlockType, rows: &[f32], n: usize, guide: Guide) -> Vec<u8> {
    let row_bytes = block_type.row_bytes(n as u64).unwrap() as usize;
    let quantizer = block_type.format().unwrap().quantizer(guide).unwrap();
    let mut bytes = vec![0xA5; rows.len() / n * row_bytes];
    for (row, blocks) in rows.chunks_exact(n).zip(bytes.chunks_exact_mut(row_bytes)) {
        quantizer.quantize_row(row, blocks);
    }
    bytes
}

fn dequantize(block_type: BlockType, bytes: &[u8]) -> Vec<f32> {
    let n_blocks = bytes.len() / block_type.bytes_per_block();
    let mut row = vec![f32::NAN; n_blocks * block_type.values_per_block()];
    block_type.format().unwrap().dequantize(bytes, &mut row);
    row
}

#[test]
fn dequantization_equals_the_goldens_bit_for_bit() {
    let Some(folder) = fixtures("dequantization goldens") else { return };
    let mut n_formats = 0;
    for block_type in BlockType::all().filter(|t| t.format().is_some()) {
        let path = folder.join(format!("golden/quants/{block_type}.safetensors"));
        if !path.exists() {
            continue;
        }
        let golden = golden_arrays(&path);
        for (blocks, values) in [("blocks", "dequant"), ("q_blocks", "q_dequant")] {
            let Some(blocks) = golden.get(blocks) else { continue };
            let (found, expected) = (dequantize(block_type, &blocks.bytes), golden[values].f32());
            assert_eq!(found.len(), expected.len(), "{block_type}");
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(
                    found.to_bits(),
                    expected.to_bits(),
                    "{block_type}, value {i}: {found:e} {expected:e}"
                );
            }
        }
        n_formats += 1;
    }
    assert!(n_formats >= 14, "only {n_formats} formats have goldens");
}

#[test]
fn q8_0_and_mxfp4_write_the_bytes_of_the_goldens() {
    let Some(folder) = fixtures("quantization goldens") else { return };
    for block_type in [BlockType::Q8_0, BlockType::Mxfp4] {
        let golden = golden_arrays(&folder.join(format!("golden/quants/{block_type}.safetensors")));
        let (input, expected) = (&golden["q_input"], &golden["q_blocks"].bytes);
        for level in [Level::Scalar, Level::detect()] {
            let guide = Guide { level, ..Guide::default() };
            let found = quantize(block_type, &input.f32(), input.shape[1], guide);
            assert_eq!(&found, expected, "{block_type}, {level:?}");
        }
    }
}
