//! Quantization throughput on raw `f32` rows, in the terms of the drivers that time other projects' quantizers.
//!
//! `qbench --rows FILE --n N --type TYPE [--imp FILE|-] [--rows-per-imp R] [--reps K] [--threads T] [--out FILE]
//! [--max-rows M] [--objective importance|ggml|flat] [--gain G] [--level scalar|avx2]`
//!
//! Row `r` uses importance vector `r / R`. Prints one JSON line; CPU time is that of the worker threads.
#![expect(clippy::print_stdout, reason = "the JSON line is the result")]

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use gguf_tools::block::{BlockType, Guide, Objective};
use gguf_tools::simd::Level;
use rustix::time::{ClockId, clock_gettime};

struct Job<'a> {
    block_type: BlockType,
    rows: &'a [f32],
    n: usize,
    importance: Option<&'a [f32]>,
    rows_per_importance: usize,
    guide: Guide<'a>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let text = |key: &str| options.get(key).map(String::as_str);
    let number = |key: &str, default: usize| text(key).map_or(Ok(default), str::parse::<usize>);

    let type_name = text("type").ok_or("--type is missing")?;
    let n = number("n", 4096)?;
    let mut rows = read_f32(Path::new(text("rows").ok_or("--rows is missing")?))?;
    let n_rows = (rows.len() / n).min(match number("max-rows", 0)? {
        0 => usize::MAX,
        limit => limit,
    });
    rows.truncate(n_rows * n);
    let importance = match text("imp") {
        None | Some("-") => None,
        Some(path) => Some(read_f32(Path::new(path))?),
    };
    let level = match text("level") {
        None => Level::detect(),
        Some("scalar") => Level::Scalar,
        #[cfg(target_arch = "x86_64")]
        Some("avx2") => Level::Avx2,
        Some(other) => return Err(format!("--level is `scalar` or `avx2`, not `{other}`").into()),
    };
    let wanted = text("objective").unwrap_or("importance");
    let objective = Objective::NAMES
        .iter()
        .find(|(name, _)| *name == wanted)
        .ok_or_else(|| format!("no objective is called `{wanted}`"))?
        .1;
    let job = Job {
        block_type: type_name.parse()?,
        rows: &rows,
        n,
        importance: importance.as_deref(),
        rows_per_importance: match number("rows-per-imp", 0)? {
            0 => n_rows,
            given => given,
        },
        guide: Guide {
            importance: None,
            objective,
            scale_gain: text("gain").map(str::parse).transpose()?,
            level,
        },
    };

    let start = Instant::now();
    job.block_type
        .format()
        .and_then(|format| format.quantizer(job.guide))
        .ok_or("the type has no quantizer")?;
    let init_s = start.elapsed().as_secs_f64();

    let (reps, n_threads) = (number("reps", 3)?.max(1), number("threads", 1)?.max(1));
    let row_bytes = job.block_type.row_bytes(n as u64).ok_or("--n is no whole number of blocks")? as usize;
    let mut bytes = vec![0xA5; n_rows * row_bytes];
    let (mut walls, mut cpus) = (Vec::new(), Vec::new());
    for _ in 0..reps {
        let start = Instant::now();
        cpus.push(run(&job, n_threads, row_bytes, &mut bytes).as_secs_f64());
        walls.push(start.elapsed().as_secs_f64());
    }
    walls.sort_by(f64::total_cmp);
    cpus.sort_by(f64::total_cmp);
    if let Some(path) = text("out") {
        std::fs::write(path, &bytes)?;
    }

    let million_weights = (n_rows * n) as f64 / 1e6;
    println!(
        "{}",
        serde_json::json!({
            "peer": "ggsmith", "type": type_name, "rows": n_rows, "n_per_row": n,
            "imatrix": importance.is_some(), "threads": n_threads, "reps": reps,
            "wall_min_s": walls[0], "wall_median_s": walls[reps / 2],
            "cpu_min_s": cpus[0], "cpu_median_s": cpus[reps / 2], "init_s": init_s,
            "mweights_per_cpu_s": million_weights / cpus[0],
            "mweights_per_wall_s": million_weights / walls[0],
            "f32_mb_per_cpu_s": million_weights * 4.0 / cpus[0],
            "bits_per_weight": row_bytes as f64 * 8.0 / n as f64, "out_bytes": bytes.len(),
        })
    );
    Ok(())
}

/// Quantizes every row once, each thread a run of whole rows; returns the threads' CPU time.
fn run(job: &Job, n_threads: usize, row_bytes: usize, bytes: &mut [u8]) -> Duration {
    let rows_per_thread = (job.rows.len() / job.n).div_ceil(n_threads);
    std::thread::scope(|scope| {
        let workers: Vec<_> = bytes
            .chunks_mut(rows_per_thread * row_bytes)
            .enumerate()
            .map(|(t, share)| scope.spawn(move || work(job, t * rows_per_thread, row_bytes, share)))
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("quantizers do not panic")).sum()
    })
}

fn work(job: &Job, first_row: usize, row_bytes: usize, share: &mut [u8]) -> Duration {
    let n_rows = share.len() / row_bytes;
    let mut row = first_row;
    while row < first_row + n_rows {
        let group = row / job.rows_per_importance;
        let end = ((group + 1) * job.rows_per_importance).min(first_row + n_rows);
        let importance = job.importance.map(|all| &all[group * job.n..][..job.n]);
        let guide = Guide { importance, ..job.guide };
        let quantizer = job.block_type.format().and_then(|f| f.quantizer(guide)).expect("asked before");
        for r in row..end {
            let blocks = &mut share[(r - first_row) * row_bytes..][..row_bytes];
            quantizer.quantize_row(&job.rows[r * job.n..][..job.n], blocks);
        }
        row = end;
    }
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
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
