//! Error of quantized rows, whoever wrote their bytes.
//!
//! `qeval --rows FILE --n N --type TYPE --q FILE [--imp FILE|-] [--rows-per-imp R]` prints one JSON line:
//! `rmse` = sqrt(mean (x - q)^2), `rel` = sqrt(sum (x - q)^2 / sum x^2), `wmse_rel` = sum imp (x - q)^2 / sum imp x^2,
//! `alignment` = sum imp q x / sum imp x^2 (1 = the weights are not shrunk).
#![expect(clippy::print_stdout, reason = "the JSON line is the result")]

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use gguf_tools::block::BlockType;

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let text = |key: &str| options.get(key).map(String::as_str);
    let required = |key: &str| text(key).ok_or_else(|| format!("--{key} is missing"));

    let block_type: BlockType = required("type")?.parse()?;
    let n: usize = text("n").map_or(Ok(4096), str::parse)?;
    let rows = read_f32(Path::new(required("rows")?))?;
    let bytes = std::fs::read(required("q")?)?;
    let importance = match text("imp") {
        None | Some("-") => None,
        Some(path) => Some(read_f32(Path::new(path))?),
    };
    let row_bytes = block_type.row_bytes(n as u64).ok_or("--n is no whole number of blocks")? as usize;
    let n_rows = bytes.len() / row_bytes;
    if !bytes.len().is_multiple_of(row_bytes) || n_rows * n > rows.len() {
        return Err(format!("{} bytes are not rows of {row_bytes} for the given values", bytes.len()).into());
    }
    let rows_per_importance: usize = text("rows-per-imp").map_or(Ok(n_rows), str::parse)?;
    let format = block_type.format().ok_or("the type cannot be read")?;

    let mut quantized = vec![0.0; n];
    let (mut error, mut total, mut weighted_error, mut weighted_total, mut product) =
        (0.0, 0.0, 0.0, 0.0, 0.0);
    let (mut largest_error, mut n_not_finite) = (0.0f64, 0usize);
    for (r, blocks) in bytes.chunks_exact(row_bytes).enumerate() {
        format.dequantize(blocks, &mut quantized);
        let group = r / rows_per_importance;
        let weights = importance.as_ref().map(|all| &all[group * n..][..n]);
        for i in 0..n {
            let (x, mut q) = (f64::from(rows[r * n + i]), f64::from(quantized[i]));
            if !q.is_finite() {
                n_not_finite += 1;
                q = 0.0;
            }
            let weight = weights.map_or(1.0, |weights| f64::from(weights[i]));
            error += (x - q).powi(2);
            total += x * x;
            weighted_error += weight * (x - q).powi(2);
            weighted_total += weight * x * x;
            product += weight * x * q;
            largest_error = largest_error.max((x - q).abs());
        }
    }
    println!(
        "{}",
        serde_json::json!({
            "type": block_type.name(), "n_per_row": n, "rows": n_rows,
            "rmse": (error / (n_rows * n) as f64).sqrt(), "rel": (error / total).sqrt(),
            "wmse_rel": weighted_error / weighted_total, "alignment": product / weighted_total,
            "max_abs": largest_error, "nonfinite": n_not_finite,
        })
    );
    Ok(())
}

fn options() -> Result<BTreeMap<String, String>, String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let pair = |pair: &[String]| match pair {
        [key, value] if key.starts_with("--") => Ok((key[2..].to_owned(), value.clone())),
        _ => Err(format!("`{}` is not an option with a value", pair[0])),
    };
    arguments.chunks(2).map(pair).collect()
}

fn read_f32(path: &Path) -> Result<Vec<f32>, String> {
    let bytes = std::fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    Ok(bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}
