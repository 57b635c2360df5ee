//! Products against widened rows, and instruction sets against each other.

use super::*;
use crate::cpu::{kernels, plain as plain_floats};

const WIDTH: usize = 1024;
const ROWS: usize = 5;
const INPUTS: usize = 3;

fn bytes(n: usize) -> Vec<u8> {
    let mut state = 12345_u32;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 24) as u8
        })
        .collect()
}

fn inputs() -> Vec<f32> {
    let scaled = |(i, b): (usize, u8)| (f32::from(b) - 127.5) / 64.0 * if i % 97 == 0 { 8.0 } else { 1.0 };
    bytes(INPUTS * WIDTH).into_iter().enumerate().map(scaled).collect()
}

/// Random codes under sane scales: the half-precision numbers at these places of a block are replaced.
fn rows(block_type: BlockType) -> Vec<u8> {
    let scales_at: &[usize] = match block_type {
        BlockType::Q2K => &[80, 82],
        BlockType::Q4K => &[0, 2],
        BlockType::Q6K => &[208],
        BlockType::Q8_0 | BlockType::Iq2Xxs => &[0],
        _ => &[],
    };
    let mut rows = bytes(ROWS * block_type.row_bytes(WIDTH as u64).unwrap() as usize);
    for (i, block) in rows.chunks_mut(block_type.bytes_per_block()).enumerate() {
        for &at in scales_at {
            let scale = half::f16::from_f32(0.01 * (i % 7) as f32 - 0.02);
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        match block_type {
            BlockType::Mxfp4 => block[0] = 120 + block[0] % 8,
            BlockType::F16 | BlockType::Bf16 => block[1] = block[1] & 0x80 | 0x3c,
            _ => {}
        }
    }
    rows
}

fn rounding(dot: Int8Dot) -> InputRounding {
    InputRounding::of(dot.block_type).unwrap()
}

fn widened(block_type: BlockType, blocks: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; ROWS * WIDTH];
    block_type.format().unwrap().dequantize(blocks, &mut out);
    out
}

#[test]
fn products_equal_those_of_the_widened_row_with_the_rounded_inputs() {
    for dot in INT8_DOTS {
        let blocks = rows(dot.block_type);
        let rounded = Int8Rows::new(Level::detect(), &inputs(), WIDTH, dot.group_values);
        let back = rounding(dot).rounded(Level::detect(), &inputs());
        let weights = widened(dot.block_type, &blocks);
        let mut found = vec![0.0; ROWS * INPUTS];
        dot.products(Level::detect(), &blocks, &rounded, &mut found);
        for (at, found) in found.iter().enumerate() {
            let (row, input) = (at / INPUTS, at % INPUTS);
            let pairs = weights[row * WIDTH..][..WIDTH].iter().zip(&back[input * WIDTH..][..WIDTH]);
            let terms = pairs.map(|(&w, &x)| f64::from(w) * f64::from(x));
            let (sum, size) = terms.fold((0.0, 0.0_f64), |(s, a), t| (s + t, a + t * t));
            let difference = (f64::from(*found) - sum).abs();
            assert!(difference <= 1e-5 * size.sqrt(), "{}: {found}, not {sum}", dot.block_type);
        }
    }
}

#[test]
fn instruction_sets_give_the_same_bits() {
    if Level::detect() == Level::Scalar {
        return test_vectors::report_skip("this machine has one instruction set");
    }
    for dot in INT8_DOTS {
        let blocks = rows(dot.block_type);
        let run = |level| {
            let rounded = Int8Rows::new(level, &inputs(), WIDTH, dot.group_values);
            let mut out = vec![0.0; ROWS * INPUTS];
            dot.products(level, &blocks, &rounded, &mut out);
            out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        for level in Level::all() {
            assert_eq!(run(level), run(Level::Scalar), "{}, {level:?}", dot.block_type);
        }
    }
}

#[test]
fn float_rows_give_the_bits_of_the_widened_rows() {
    for (block_type, dot) in [(BlockType::F16, FloatDot::F16), (BlockType::Bf16, FloatDot::Bf16)] {
        let blocks = rows(block_type);
        let weights = widened(block_type, &blocks);
        let inputs = inputs();
        // An odd number of eights too.
        for (width, n_rows) in [(WIDTH, ROWS), (8 * 5, 7)] {
            let input = &inputs[..width];
            let mut expected = vec![0.0; n_rows];
            kernels::products(Level::Scalar, &weights[..n_rows * width], input, width, &mut expected);
            for level in Level::all() {
                let mut found = vec![0.0; n_rows];
                dot.products(level, &blocks[..2 * n_rows * width], input, &mut found);
                let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{block_type}");
            }
        }
    }
}

#[test]
fn a_group_of_zeros_stays_zero() {
    let rounded = Int8Rows::new(Level::detect(), &[0.0; 256], 256, 256);
    let Groups::Of256(groups) = &rounded.groups else { unreachable!("asked for 256") };
    assert!(groups[0].scale == 0.0 && groups[0].values == [0; 256]);
}

/// What ggml's own code made of the same inputs: written by `tools/ggml_rounding.c`.
fn from_ggml(name: &str) -> Vec<u8> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../test-vectors/rounding");
    std::fs::read(folder.join(name)).unwrap()
}

/// ggml's name of the type.
fn ggml_name(dot: Int8Dot) -> String {
    let name = dot.block_type.name();
    if name.ends_with("_K") { format!("q{}", &name[1..]) } else { name.to_lowercase() }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn groups_of_32_are_those_of_ggml_to_the_bit() {
    let (inputs, blocks) = (floats(&from_ggml("inputs.f32")), from_ggml("q8_0.inputs"));
    for level in Level::all() {
        let rounded = Int8Rows::new(level, &inputs, WIDTH, 32);
        assert_eq!(rounded.groups().len(), blocks.len() / 34);
        for (at, (block, (scale, values))) in blocks.chunks(34).zip(rounded.groups()).enumerate() {
            let theirs: Vec<i8> = block[2..].iter().map(|&b| b as i8).collect();
            assert_eq!(half::f16::from_f32(scale).to_le_bytes(), block[..2], "scale of group {at}");
            assert_eq!(values, theirs, "group {at}");
        }
    }
}

#[test]
fn groups_of_256_are_those_of_ggml_to_the_bit() {
    let (inputs, blocks) = (floats(&from_ggml("inputs.f32")), from_ggml("q8_K.inputs"));
    for level in Level::all() {
        let rounded = Int8Rows::new(level, &inputs, WIDTH, 256);
        let Groups::Of256(groups) = &rounded.groups else { unreachable!("asked for 256") };
        assert_eq!(groups.len(), blocks.len() / 292);
        for (at, (block, group)) in blocks.chunks(292).zip(groups).enumerate() {
            // ggml's largest magnitude becomes -127 and its scale takes the sign.
            let scale = floats(&block[..4])[0];
            let sign = if scale < 0.0 { -1 } else { 1 };
            let theirs: Vec<i8> = block[4..260].iter().map(|&b| sign * b as i8).collect();
            assert_eq!(group.scale.to_bits(), scale.abs().to_bits(), "scale of group {at}");
            assert_eq!(group.values[..], theirs, "group {at}");
            if scale != 0.0 {
                let sums = block[260..].as_chunks::<2>().0.iter();
                let sums: Vec<i16> = sums.map(|&b| i16::from(sign) * i16::from_le_bytes(b)).collect();
                assert_eq!(group.sums[..], sums, "sums of group {at}");
            }
        }
    }
}

#[test]
fn float_inputs_are_rounded_as_ggml_rounds_them() {
    let inputs = floats(&from_ggml("inputs.f32"));
    let halves = InputRounding::Half.rounded(Level::detect(), &inputs);
    let expected = from_ggml("f16.inputs");
    let expected = expected.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32());
    assert!(expected.eq(halves));
    let brains = InputRounding::Brain.rounded(Level::detect(), &inputs);
    let expected = from_ggml("bf16.inputs");
    let expected = expected.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32());
    assert!(expected.eq(brains));
}

#[test]
fn products_are_those_of_ggml_but_for_the_order_of_sums() {
    let inputs = floats(&from_ggml("inputs.f32"));
    for dot in INT8_DOTS {
        let name = ggml_name(dot);
        let (blocks, theirs) =
            (from_ggml(&format!("{name}.rows")), floats(&from_ggml(&format!("{name}.products"))));
        let rounded = Int8Rows::new(Level::detect(), &inputs, WIDTH, dot.group_values);
        let mut ours = vec![0.0; theirs.len()];
        dot.products(Level::detect(), &blocks, &rounded, &mut ours);
        let mut weights = vec![0.0; 2 * WIDTH];
        dot.block_type.format().unwrap().dequantize(&blocks, &mut weights);
        let n_inputs = inputs.len() / WIDTH;
        for (at, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let pairs =
                weights[at / n_inputs * WIDTH..][..WIDTH].iter().zip(&inputs[at % n_inputs * WIDTH..]);
            let size = pairs.map(|(w, x)| f64::from(w * x).powi(2)).sum::<f64>().sqrt();
            let difference = f64::from(ours - theirs).abs();
            assert!(difference <= 2e-6 * size, "{name}, product {at}: {ours}, ggml {theirs}");
        }
    }
}

#[test]
fn plain_products_and_inputs_are_those_of_ggmls_plain_code_to_the_bit() {
    let inputs = floats(&from_ggml("inputs.f32"));
    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for dot in INT8_DOTS.map(Int8Dot::as_plain_ggml) {
        let name = ggml_name(dot);
        let theirs = floats(&from_ggml(&format!("{name}.plain_products")));
        for level in Level::all() {
            let rounded = dot.round(level, &inputs, WIDTH);
            let mut ours = vec![0.0; theirs.len()];
            dot.products(level, &from_ggml(&format!("{name}.rows")), &rounded, &mut ours);
            assert_eq!(bits(&ours), bits(&theirs), "{name}");
        }
    }
    let rounded = INT8_DOTS[0].as_plain_ggml().round(Level::detect(), &inputs, WIDTH);
    for (block, (scale, values)) in from_ggml("q8_0.plain_inputs").chunks(34).zip(rounded.groups()) {
        let theirs: Vec<i8> = block[2..].iter().map(|&b| b as i8).collect();
        assert_eq!(half::f16::from_f32(scale).to_le_bytes(), block[..2]);
        assert_eq!(values, theirs);
    }
}

#[test]
fn plain_products_of_floats_are_those_of_ggmls_plain_code_to_the_bit() {
    let inputs = floats(&from_ggml("inputs.f32"));
    for (block_type, rounding) in
        [(BlockType::F16, InputRounding::Half), (BlockType::Bf16, InputRounding::Brain)]
    {
        let name = block_type.name().to_lowercase();
        let blocks = from_ggml(&format!("{name}.rows"));
        let mut weights = vec![0.0; blocks.len() / 2];
        block_type.format().unwrap().dequantize(&blocks, &mut weights);
        let theirs = floats(&from_ggml(&format!("{name}.plain_products")));
        let mut ours = vec![0.0; theirs.len()];
        plain_floats::products(&weights, &rounding.rounded(Level::detect(), &inputs), WIDTH, &mut ours);
        assert_eq!(ours, theirs, "{name}");
    }
}
