//! Block formats against goldens from independent code, and properties that hold for any input.

use gguf_tools::block::{BlockType, Guide, Objective};
use gguf_tools::simd::Level;
use proptest::prelude::*;
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

/// Rows that have broken quantizers before, each of 512 values, with an importance.
fn hostile_rows() -> Vec<(&'static str, Vec<f32>, Vec<f32>)> {
    let wave = |i: usize| (i as f32 * 0.7).sin() * (1.0 + (i % 7) as f32);
    let row = |f: &dyn Fn(usize) -> f32| (0..512).map(f).collect::<Vec<f32>>();
    let ones = vec![1.0; 512];
    vec![
        ("all zero", row(&|_| 0.0), ones.clone()),
        ("all minus zero", row(&|_| -0.0), ones.clone()),
        ("constant", row(&|_| 1.25), ones.clone()),
        ("constant, negative", row(&|_| -1.25), ones.clone()),
        ("positive", row(&|i| wave(i).abs() + 1.0), ones.clone()),
        ("negative", row(&|i| -wave(i).abs() - 1.0), ones.clone()),
        ("one value", row(&|i| if i == 77 { -3.0 } else { 0.0 }), ones.clone()),
        ("denormal", row(&|i| wave(i) * 1e-39), ones.clone()),
        ("tiny", row(&|i| wave(i) * 1e-7), ones.clone()),
        ("above half precision", row(&|i| wave(i) * 1e30), ones.clone()),
        ("the largest floats", row(&|i| if i % 2 == 0 { f32::MAX } else { -f32::MAX }), ones.clone()),
        ("an outlier", row(&|i| if i == 300 { 1e20 } else { wave(i) }), ones.clone()),
        ("no importance in half of the row", row(&wave), row(&|i| f32::from(u8::from(i < 256)))),
        ("no importance in every second sub-block", row(&wave), row(&|i| (i / 16 % 2) as f32)),
        ("one important column", row(&wave), row(&|i| f32::from(u8::from(i == 9)))),
        ("vanishing importance", row(&wave), row(&|i| 1e-38 * (1 + i % 3) as f32)),
        ("denormal importance", row(&wave), row(&|i| 1e-44 * (1 + i % 3) as f32)),
        ("importance of many sizes", row(&wave), row(&|i| 10f32.powi((i % 60) as i32 - 30))),
        ("huge importance", row(&wave), row(&|_| 3e38)),
    ]
}

fn levels() -> [Level; 2] {
    [Level::Scalar, Level::detect()]
}

fn guides(importance: Option<&[f32]>, level: Level) -> impl Iterator<Item = Guide<'_>> {
    let guide = move |(_, objective)| Guide { importance, objective, scale_gain: None, level };
    Objective::NAMES.into_iter().map(guide)
}

/// The formats that this file's properties hold for: those with blocks, and a quantizer that needs no importance.
fn writable() -> impl Iterator<Item = BlockType> {
    BlockType::all().filter(|t| {
        t.values_per_block() > 1 && t.format().is_some_and(|f| f.quantizer(Guide::default()).is_some())
    })
}

#[test]
fn hostile_rows_never_give_bad_scales_and_both_levels_agree() {
    for block_type in writable() {
        for (name, row, importance) in hostile_rows() {
            for importance in [None, Some(importance.as_slice())] {
                let scalar: Vec<_> =
                    guides(importance, Level::Scalar).map(|g| quantize(block_type, &row, 512, g)).collect();
                let best: Vec<_> =
                    guides(importance, Level::detect()).map(|g| quantize(block_type, &row, 512, g)).collect();
                assert_eq!(scalar, best, "{block_type}, {name}: the levels differ");
                for bytes in &best {
                    let bad = block_type.format().unwrap().first_bad_block(bytes);
                    assert_eq!(bad, None, "{block_type}, {name}");
                    let largest = row.iter().fold(0f32, |m, v| m.max(v.abs()));
                    for value in dequantize(block_type, bytes) {
                        assert!(
                            value.is_finite() && value.abs() <= largest * 2.0 + 1e-6,
                            "{block_type}, {name}: {value:e}"
                        );
                    }
                }
            }
        }
    }
}

/// Largest relative squared error that a working search leaves on Gaussian rows; a broken one leaves several times more.
fn error_bound(block_type: BlockType) -> Option<f64> {
    Some(match block_type {
        BlockType::Q2K => 0.080,
        BlockType::Q3K => 0.026,
        BlockType::Q4K => 0.0062,
        BlockType::Q5K => 0.0016,
        BlockType::Q6K => 0.00045,
        BlockType::Q8_0 => 0.00004,
        BlockType::Mxfp4 => 0.016,
        _ => return None,
    })
}

/// Standard normal values from a counter (Box-Muller over a mixed counter).
fn gaussian(seed: u64, n: usize) -> Vec<f32> {
    let uniform = |counter: u64| {
        let mut z = (seed << 32 | counter).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ z >> 31) >> 11) as f64 / (1u64 << 53) as f64 + 1e-17
    };
    let normal =
        |i: u64| (-2.0 * uniform(2 * i).ln()).sqrt() * (uniform(2 * i + 1) * std::f64::consts::TAU).cos();
    (0..n as u64).map(|i| normal(i) as f32).collect()
}

fn relative_error(row: &[f32], quantized: &[f32], weights: &[f32]) -> f64 {
    let squares =
        |f: &dyn Fn(usize) -> f64| (0..row.len()).map(|i| f64::from(weights[i]) * f(i).powi(2)).sum::<f64>();
    squares(&|i| f64::from(row[i]) - f64::from(quantized[i])) / squares(&|i| f64::from(row[i]))
}

#[test]
fn errors_on_gaussian_rows_stay_within_the_bound_of_each_format() {
    let row: Vec<f32> = gaussian(1, 8192).iter().map(|v| v * 0.02).collect();
    let importance: Vec<f32> = gaussian(2, 8192).iter().map(|v| (1.2 * v).exp()).collect();
    for block_type in writable() {
        let Some(bound) = error_bound(block_type) else { continue };
        let flat = quantize(block_type, &row, 8192, Guide::default());
        let flat = relative_error(&row, &dequantize(block_type, &flat), &vec![1.0; 8192]);
        assert!(flat < bound, "{block_type}: error {flat:.3e}, bound {bound:.3e}");
        let guide = Guide { importance: Some(&importance), ..Guide::default() };
        let weighted = quantize(block_type, &row, 8192, guide);
        let weighted = relative_error(&row, &dequantize(block_type, &weighted), &importance);
        assert!(weighted < bound, "{block_type}: weighted error {weighted:.3e}, bound {bound:.3e}");
        if ![BlockType::Q8_0, BlockType::Mxfp4].contains(&block_type) {
            assert!(
                weighted < 0.9 * flat,
                "{block_type}: importance does not help: {weighted:.3e}, flat {flat:.3e}"
            );
        }
    }
}

#[test]
fn columns_without_importance_are_not_erased() {
    let row: Vec<f32> = gaussian(3, 4096);
    let importance: Vec<f32> = (0..4096).map(|i| (i % 2) as f32).collect();
    for block_type in writable().filter(|t| t.values_per_block() == 256) {
        let guide = Guide { importance: Some(&importance), ..Guide::default() };
        let quantized = dequantize(block_type, &quantize(block_type, &row, 4096, guide));
        let error = relative_error(&row, &quantized, &vec![1.0; 4096]);
        // Erasing those columns would leave an error of a half.
        assert!(error < 0.35, "{block_type}: {error}");
    }
}

#[test]
fn values_that_are_fp4_times_powers_of_two_come_back_exactly_from_mxfp4() {
    let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for exponent in -126..=124 {
        for largest in 0..8 {
            let sign = |i: usize| if i % 3 == 1 { -1.0 } else { 1.0 };
            let row: Vec<f32> =
                (0..32).map(|i| sign(i) * e2m1[i.min(largest)] * 2f32.powi(exponent)).collect();
            for level in levels() {
                let bytes = quantize(BlockType::Mxfp4, &row, 32, Guide { level, ..Guide::default() });
                assert_eq!(dequantize(BlockType::Mxfp4, &bytes), row, "2^{exponent}, largest code {largest}");
            }
        }
    }
}

#[test]
fn scales_that_are_not_finite_are_found() {
    let offsets: &[(BlockType, &[usize])] = &[
        (BlockType::Q4_0, &[0]),
        (BlockType::Q4_1, &[0, 2]),
        (BlockType::Q5_0, &[0]),
        (BlockType::Q5_1, &[0, 2]),
        (BlockType::Q8_0, &[0]),
        (BlockType::Q2K, &[80, 82]),
        (BlockType::Q3K, &[108]),
        (BlockType::Q4K, &[0, 2]),
        (BlockType::Q5K, &[0, 2]),
        (BlockType::Q6K, &[208]),
        (BlockType::Iq4Nl, &[0]),
        (BlockType::Iq4Xs, &[0]),
    ];
    for (block_type, offsets) in offsets {
        let format = block_type.format().unwrap();
        for offset in *offsets {
            for (bits, kind) in [(0x7E00u16, "NaN"), (0xFC00, "infinite"), (0x7C01, "NaN")] {
                let mut bytes = vec![0; 3 * block_type.bytes_per_block()];
                assert_eq!(format.first_bad_block(&bytes), None);
                let at = 2 * block_type.bytes_per_block() + offset;
                bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                let bad = format.first_bad_block(&bytes).unwrap();
                assert_eq!(bad.block_index, 2, "{block_type}");
                assert!(bad.problem.contains(kind), "{block_type}: {}", bad.problem);
            }
        }
    }
    let mut bytes = vec![0; 34];
    bytes[17] = 255;
    assert_eq!(BlockType::Mxfp4.format().unwrap().first_bad_block(&bytes).unwrap().block_index, 1);
    let mut bytes = vec![0; 36];
    bytes[3] = 0x7F;
    assert!(BlockType::Nvfp4.format().unwrap().first_bad_block(&bytes).is_some());
}

#[test]
fn a_gain_scales_the_stored_scale_and_keeps_the_codes() {
    let row = gaussian(4, 256);
    for block_type in writable().filter(|t| t.name().starts_with('Q') && t.values_per_block() == 256) {
        let plain = quantize(block_type, &row, 256, Guide { scale_gain: Some(1.0), ..Guide::default() });
        let doubled = quantize(block_type, &row, 256, Guide { scale_gain: Some(2.0), ..Guide::default() });
        let twice: Vec<f32> = dequantize(block_type, &plain).iter().map(|v| 2.0 * v).collect();
        assert_eq!(dequantize(block_type, &doubled), twice, "{block_type}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_dequantize_without_panic(bytes in proptest::collection::vec(any::<u8>(), 512..1024)) {
        for block_type in BlockType::all().filter(|t| t.format().is_some()) {
            let whole = bytes.len() / block_type.bytes_per_block() * block_type.bytes_per_block();
            dequantize(block_type, &bytes[..whole]);
            block_type.format().unwrap().first_bad_block(&bytes);
        }
    }

    #[test]
    fn any_finite_row_gives_the_same_sound_blocks_at_both_levels(
        mantissas in proptest::collection::vec(-1.0f32..1.0, 256),
        exponents in proptest::collection::vec(-12i32..12, 256),
        scale in -30i32..30,
        weights in proptest::collection::vec(-20i32..20, 256),
    ) {
        let row: Vec<f32> = (0..256).map(|i| mantissas[i] * 2f32.powi(exponents[i] / 4 + scale)).collect();
        let importance: Vec<f32> = weights.iter().map(|w| 2f32.powi(*w)).collect();
        for block_type in writable() {
            for importance in [None, Some(importance.as_slice())] {
                let [scalar, best] = levels().map(|level| {
                    quantize(block_type, &row, 256, Guide { importance, level, ..Guide::default() })
                });
                prop_assert_eq!(&scalar, &best, "{}", block_type);
                prop_assert_eq!(block_type.format().unwrap().first_bad_block(&best), None);
            }
        }
    }
}

#[test]
fn fp4_weights_are_held_exactly_by_five_and_six_bit_formats() {
    let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let draws = gaussian(5, 4096);
    let row: Vec<f32> = (0..4096)
        .map(|i| {
            let exponent = (i / 32 * 7 % 3) as i32 - 8;
            e2m1[(draws[i].abs() * 1e6) as usize % e2m1.len()] * 2f32.powi(exponent)
        })
        .collect();
    for block_type in [BlockType::Q5K, BlockType::Q6K] {
        let bytes = quantize(block_type, &row, 4096, Guide::default());
        assert_eq!(dequantize(block_type, &bytes), row, "{block_type}");
    }
    let small: Vec<f32> = (0..512).map(|i| (i * 5 % 4) as f32 * 0.25).collect();
    for block_type in [BlockType::Q2K, BlockType::Q3K, BlockType::Q4K] {
        let bytes = quantize(block_type, &small, 512, Guide::default());
        assert_eq!(dequantize(block_type, &bytes), small, "{block_type}");
    }
}

#[test]
fn importance_changes_the_bytes_of_exactly_the_formats_that_say_so() {
    let row: Vec<f32> = (0..512).map(|i| ((i * 37 + i * i % 91) % 101) as f32 / 50.0 - 1.0).collect();
    let importance: Vec<f32> = (0..512).map(|i| if i % 5 == 0 { 40.0 } else { 0.1 }).collect();
    for block_type in BlockType::all() {
        let Some(format) = block_type.format() else { continue };
        let bytes = |importance| {
            let quantizer = format.quantizer(Guide { importance, ..Guide::default() })?;
            let mut blocks = vec![0; block_type.row_bytes(512).unwrap() as usize];
            quantizer.quantize_row(&row, &mut blocks);
            Some(blocks)
        };
        let (with, without) = (bytes(Some(importance.as_slice())), bytes(None));
        assert_eq!(with != without, format.uses_importance(), "{block_type}");
    }
}
