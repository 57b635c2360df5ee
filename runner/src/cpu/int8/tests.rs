//! Products against widened rows, and instruction sets against each other.

use super::*;
use crate::cpu::kernels;

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
        let back: Vec<f32> = match &rounded.groups {
            Groups::Of32(groups) => {
                groups.iter().flat_map(|g| g.values.map(|v| g.scale * f32::from(v))).collect()
            }
            Groups::Of256(groups) => {
                groups.iter().flat_map(|g| g.values.map(|v| g.scale * f32::from(v))).collect()
            }
        };
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
        assert_eq!(run(Level::detect()), run(Level::Scalar), "{}", dot.block_type);
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
            for level in [Level::Scalar, Level::detect()] {
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
