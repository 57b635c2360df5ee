//! Writes every tensor of a GGUF file, widened to `f32`, to a safetensors file: for comparison with other readers.
//!
//! `cargo run --release -p gguf-tools --example export_values -- FILE.gguf VALUES.safetensors`

use std::error::Error;

use gguf_tools::block::BlockType;
use gguf_tools::gguf::Gguf;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(from), Some(to)) = (arguments.next(), arguments.next()) else {
        return Err("usage: export_values FILE.gguf VALUES.safetensors".into());
    };
    let gguf = Gguf::open(&from)?;
    let mut values = Vec::new();
    for tensor in gguf.tensors() {
        let data = gguf.data(tensor)?;
        let mut row = vec![0.0_f32; tensor.shape.iter().product::<u64>() as usize];
        if let Some(format) = tensor.block_type.format() {
            format.dequantize(data, &mut row);
        } else if tensor.block_type == BlockType::I32 {
            for (value, bytes) in row.iter_mut().zip(data.as_chunks::<4>().0) {
                *value = i32::from_le_bytes(*bytes) as f32;
            }
        } else {
            continue;
        }
        let bytes: Vec<u8> = row.iter().flat_map(|v| v.to_le_bytes()).collect();
        let shape: Vec<usize> = tensor.shape.iter().map(|&n| n as usize).collect();
        values.push((tensor.name.clone(), shape, bytes));
    }
    let views = values
        .iter()
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    serialize_to_file(views, None, std::path::Path::new(&to))?;
    Ok(())
}
