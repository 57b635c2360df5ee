//! Checks of the kernels on the device at hand, against dequantized weights and `f64` sums on the CPU; and their speed.

mod bench;
mod reference;

pub use bench::{KernelTime, kernel_times, read_bandwidth};

use gguf_tools::block::BlockType;

use super::driver::Device;
use super::error::CudaError;
use super::matrix::generate::Recipe;
use super::matrix::{ExpertMatrices, Matrix, Pass, Routed, Workspace};
use super::module::Gpu;
use reference::{Rows, inputs, relative_error, sample};

/// One check and what came of it.
#[derive(Debug, Clone)]
pub struct Check {
    /// What was checked, with types and shapes.
    pub name: String,
    /// What is wrong; `None` if it holds.
    pub problem: Option<String>,
    /// What was measured.
    pub measured: String,
}

/// Relative root mean square of a product with `f32` inputs.
const FLOAT: f64 = 1e-6;
/// Of what comes after a rounding to 8 bits in between, where a sum near a tie may round the other way.
const ROUNDED: f64 = 1e-4;
/// Of a product of inputs and weights that are rounded to `f16`, some of them after a rounded scale and minimum.
const HALVES: f64 = 1e-3;

type Report<'a> = &'a mut dyn FnMut(&Check);

struct Checks<'a> {
    gpu: &'a Gpu,
    report: Report<'a>,
    failed: usize,
}

/// Runs all checks of matrix kernels, reporting each; returns how many failed.
///
/// # Errors
/// Only if the device itself fails (memory, a crashed kernel): what is wrong with results is reported.
pub fn matrices(gpu: &Gpu, report: Report<'_>) -> Result<usize, CudaError> {
    let mut checks = Checks { gpu, report, failed: 0 };
    checks.repacking()?;
    checks.generic()?;
    checks.few_tokens()?;
    checks.many_matrices()?;
    checks.many_tokens()?;
    checks.experts()?;
    checks.many_tokens_to_experts()?;
    checks.other_devices(Pass::Decode, 1)?;
    checks.other_devices(Pass::Prefill, 70)?;
    Ok(checks.failed)
}

impl Checks<'_> {
    fn done(&mut self, name: String, problem: Option<String>, measured: String) {
        self.failed += usize::from(problem.is_some());
        (self.report)(&Check { name, problem, measured });
    }

    fn close(&mut self, name: String, found: &[f32], expected: &[f64], tolerance: f64) {
        let (error, worst) = relative_error(found, expected);
        let measured = format!("{error:.2e} of {tolerance:.0e}");
        let problem = (error.is_nan() || error > tolerance).then(|| {
            format!(
                "relative error {error:.3e}; worst at {worst}: found {}, expected {}; first found {:?}, expected {:?}",
                found[worst],
                expected[worst],
                &found[..found.len().min(6)],
                &expected[..expected.len().min(6)]
            )
        });
        self.done(name, problem, measured);
    }

    fn same(&mut self, name: String, found: &[f32], expected: &[f32]) {
        let differing = found.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        let first = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
        let problem = first.map(|at| {
            format!("{differing} of {} differ, first {at}: {} and {}", found.len(), found[at], expected[at])
        });
        self.done(name, problem, "equal bits".to_owned());
    }

    /// Bytes that were put and come back, from the host and made on the device.
    fn repacking(&mut self) -> Result<(), CudaError> {
        let planes = [BlockType::Q8_0, BlockType::Iq2Xxs, BlockType::Q2K, BlockType::Q4K, BlockType::Mxfp4];
        for block_type in planes.into_iter().chain([BlockType::F16, BlockType::Q6K]) {
            let (rows, columns) = (37, 768);
            let source = Rows::new(block_type, columns, 5);
            let bytes: Vec<u8> = (0..rows).flat_map(|row| source.bytes(row)).collect();
            let loaded = Matrix::load(self.gpu, block_type, rows as usize, columns, &bytes)?;
            let made = Matrix::generate(self.gpu, block_type, rows as usize, columns, 5)?;
            for (what, matrix) in [("loaded from the host", loaded), ("made on the device", made)] {
                let mut back = self.gpu.device.zeros::<u8>(bytes.len(), "bytes read back")?;
                matrix.read_rows(self.gpu, 0, &mut back.view_mut())?;
                let back = self.gpu.device.download(back.view())?;
                let first = back.iter().zip(&bytes).position(|(a, b)| a != b);
                let problem = first.map(|at| {
                    let row_bytes = bytes.len() / rows as usize;
                    format!(
                        "byte {} of row {} is {}, expected {}",
                        at % row_bytes,
                        at / row_bytes,
                        back[at],
                        bytes[at]
                    )
                });
                self.done(format!("bytes of {block_type} {what}"), problem, "equal".to_owned());
            }
        }
        Ok(())
    }

    /// Every type at small and odd shapes, by the kernels that take all, and rows as `f32`.
    fn generic(&mut self) -> Result<(), CudaError> {
        for block_type in BlockType::all().filter(|t| t.format().is_some()) {
            let block = block_type.values_per_block();
            for columns in [block, 3 * block, if block == 1 { 100 } else { 4 * block.max(64) }] {
                let (rows, tokens) = (45, 3);
                let name = format!("generic {block_type} {columns} -> {rows}, {tokens} tokens");
                self.product(name, block_type, rows, columns, tokens, 1, Pass::Exact, FLOAT)?;
            }
            let (rows, columns) = (64, 4 * block.max(64));
            let source = Rows::new(block_type, columns, 9);
            let matrix = Matrix::generate(self.gpu, block_type, rows, columns, 9)?;
            let ids = [0u32, 63, 7, 7, 31];
            let device_ids = self.gpu.device.upload(&ids, "ids")?;
            let mut out = self.gpu.device.zeros::<f32>(ids.len() * 2 * columns, "rows")?;
            matrix.take_rows(self.gpu, device_ids.view(), 2, &mut out.view_mut())?;
            let found = self.gpu.device.download(out.view())?;
            let expected: Vec<f32> = ids
                .iter()
                .flat_map(|&id| {
                    let values = source.values(u64::from(id));
                    [values.clone(), values].concat()
                })
                .collect();
            self.same(format!("rows of {block_type}, twice each"), &found, &expected);
        }
        Ok(())
    }

    /// Matrices at the model's shapes and odd ones, by the kernels for few tokens.
    fn few_tokens(&mut self) -> Result<(), CudaError> {
        let shapes = [
            (1024, 4096, 1),
            (32768, 1024, 1),
            (2048, 4096, 1),
            (4096, 2048, 1),
            (4096, 8192, 1),
            (8192, 4096, 8),
            (512, 4096, 1),
            (24, 16384, 1),
            (7, 256, 1),
            (515, 768, 1),
            (1536, 7168, 1),
            (64, 1280, 2),
        ];
        for block_type in [BlockType::Q8_0, BlockType::F16] {
            for (rows, columns, groups) in shapes {
                for tokens in [1, 2, 3, 5, 8, 11] {
                    if tokens > 1 && rows * columns > 9 << 20 {
                        continue;
                    }
                    let name = format!(
                        "few tokens {block_type} {columns} -> {rows}, {groups} groups, {tokens} tokens"
                    );
                    self.product(name, block_type, rows, columns, tokens, groups, Pass::Decode, FLOAT)?;
                }
            }
        }
        self.product(
            "few tokens Q8_0 4096 -> 129280 (head)".to_owned(),
            BlockType::Q8_0,
            129_280,
            4096,
            1,
            1,
            Pass::Decode,
            FLOAT,
        )?;
        let name = "few tokens F16 100 -> 33".to_owned();
        self.product(name, BlockType::F16, 33, 96, 2, 1, Pass::Decode, FLOAT)
    }

    /// Matrices at the model's shapes and odd ones, by the kernels for many tokens.
    fn many_tokens(&mut self) -> Result<(), CudaError> {
        use BlockType::{F16, Iq2Xxs, Mxfp4, Q2K, Q4K, Q8_0};
        let mut cases = Vec::new();
        for block_type in [Q8_0, F16, Iq2Xxs, Q2K, Q4K, Mxfp4] {
            for tokens in [1, 7, 64, 130] {
                cases.push((block_type, 515, 768, 1, tokens));
            }
            cases.push((block_type, 7, 256, 1, 3));
            cases.push((block_type, 2048, 4096, 1, 70));
            cases.push((block_type, 600, 512, 2, 65));
        }
        cases.extend([
            (Q8_0, 32_768, 1024, 1, 65),
            (Q8_0, 8192, 4096, 8, 80),
            (Q8_0, 4096, 8192, 1, 65),
            (F16, 24, 16_384, 1, 65),
            (F16, 256, 4096, 1, 300),
            (F16, 33, 96, 1, 9),
        ]);
        for (block_type, rows, columns, groups, tokens) in cases {
            let name =
                format!("many tokens {block_type} {columns} -> {rows}, {groups} groups, {tokens} tokens");
            self.product(name, block_type, rows, columns, tokens, groups, Pass::Prefill, HALVES)?;
        }
        Ok(())
    }

    /// One product against the reference; with several tokens also each alone, which must give equal bits.
    #[expect(clippy::too_many_arguments, reason = "one case of the tables above")]
    fn product(
        &mut self,
        name: String,
        block_type: BlockType,
        rows: usize,
        columns: usize,
        tokens: usize,
        groups: usize,
        pass: Pass,
        tolerance: f64,
    ) -> Result<(), CudaError> {
        let gpu = self.gpu;
        let matrix = Matrix::generate(gpu, block_type, rows, columns, 1)?;
        let source = Rows::new(block_type, columns, 1);
        let width = groups * columns;
        let x = inputs(tokens, width, 2);
        let device_x = gpu.device.upload(&x, "input")?;
        let mut workspace = Workspace::new(gpu, matrix.workspace_bytes(tokens, groups, pass))?;
        // What is not written must not look right.
        let mut out = gpu.device.upload(&vec![f32::NAN; tokens * rows], "output")?;
        let input = device_x.view();
        matrix.grouped_products(gpu, &mut workspace, input, tokens, groups, pass, &mut out.view_mut())?;
        let found = gpu.device.download(out.view())?;
        let chosen = sample(rows);
        let mut picked = Vec::new();
        let mut expected = Vec::new();
        for &row in &chosen {
            let weights = source.values(row as u64);
            let first = row / (rows / groups) * columns;
            for token in 0..tokens {
                picked.push(found[token * rows + row]);
                expected.push(reference::dot(&weights, &x[token * width + first..][..columns]));
            }
        }
        self.close(name.clone(), &picked, &expected, tolerance);
        if let Some(at) = found.iter().position(|v| !v.is_finite()) {
            let problem = format!("value {at} is {}: never written?", found[at]);
            self.done(format!("{name}: all written"), Some(problem), String::new());
        }
        if tokens > 1 {
            let mut alone = gpu.device.zeros::<f32>(rows, "output")?;
            let token = tokens - 1;
            let input = device_x.slice(token * width..tokens * width);
            matrix.grouped_products(gpu, &mut workspace, input, 1, groups, pass, &mut alone.view_mut())?;
            let alone = gpu.device.download(alone.view())?;
            self.same(format!("{name}: last token alone"), &alone, &found[token * rows..]);
        }
        Ok(())
    }

    /// Matrices that share an input, in one launch and each alone: equal bits.
    fn many_matrices(&mut self) -> Result<(), CudaError> {
        let gpu = self.gpu;
        let columns = 4096;
        let shapes = [
            (BlockType::Q8_0, 1024),
            (BlockType::Q8_0, 512),
            (BlockType::F16, 1024),
            (BlockType::F16, 1024),
            (BlockType::F16, 256),
            (BlockType::F16, 64),
            (BlockType::F16, 23),
        ];
        let made: Result<Vec<_>, _> = shapes
            .iter()
            .enumerate()
            .map(|(i, &(block_type, rows))| Matrix::generate(gpu, block_type, rows, columns, i as u64))
            .collect();
        let made = made?;
        for (pass, tokens) in [(Pass::Decode, 1), (Pass::Decode, 4), (Pass::Prefill, 70)] {
            let x = gpu.device.upload(&inputs(tokens, columns, 3), "input")?;
            let needed = made.iter().map(|matrix| matrix.workspace_bytes(tokens, 1, pass)).max();
            let mut workspace = Workspace::new(gpu, needed.unwrap_or(0))?;
            let mut outs = Vec::new();
            for matrix in &made {
                outs.push(gpu.device.upload(&vec![f32::NAN; tokens * matrix.rows()], "output")?);
            }
            let mut parts: Vec<_> = made.iter().zip(outs.iter_mut().map(|out| out.view_mut())).collect();
            Matrix::products_many(gpu, &mut workspace, x.view(), tokens, pass, &mut parts)?;
            for (i, (matrix, out)) in made.iter().zip(&outs).enumerate() {
                let mut alone = gpu.device.zeros::<f32>(out.len(), "output")?;
                let mut output = alone.view_mut();
                matrix.products(gpu, &mut workspace, x.view(), tokens, pass, &mut output)?;
                let found = gpu.device.download(out.view())?;
                let expected = gpu.device.download(alone.view())?;
                let name = format!("{pass:?} matrix {i} of {} in one call, {tokens} tokens", made.len());
                self.same(name, &found, &expected);
            }
        }
        Ok(())
    }

    /// Routed experts at the model's shapes and small ones, in the types that have kernels and one that has none.
    fn experts(&mut self) -> Result<(), CudaError> {
        use BlockType::{Iq2Xxs, Mxfp4, Q2K, Q4K, Q6K};
        let cases = [
            (Iq2Xxs, Q2K, 4096, 2048, 16, 6, 1),
            (Iq2Xxs, Q2K, 4096, 2048, 16, 6, 3),
            (Iq2Xxs, Iq2Xxs, 4096, 2048, 8, 6, 2),
            (Q2K, Q2K, 4096, 2048, 8, 6, 2),
            (Q4K, Q4K, 4096, 2048, 8, 6, 2),
            (Mxfp4, Mxfp4, 4096, 2048, 8, 6, 2),
            (Iq2Xxs, Q2K, 256, 256, 8, 2, 3),
            (Mxfp4, Mxfp4, 256, 256, 8, 2, 3),
            (Q4K, Q4K, 512, 768, 5, 4, 2),
            (Iq2Xxs, Q2K, 7168, 3072, 4, 3, 1),
            (Q4K, Mxfp4, 7168, 3072, 4, 3, 1),
            (Q6K, Q6K, 512, 256, 8, 2, 3),
        ];
        for (gate, down, outputs, width, n_experts, n_used, tokens) in cases {
            let shape = reference::ExpertShape { gate, down, outputs, width, n_experts, n_used, tokens };
            self.routed(&shape, &[Pass::Decode, Pass::Exact])?;
        }
        Ok(())
    }

    /// As above, with experts that have none, few and more than a tile of the tokens.
    fn many_tokens_to_experts(&mut self) -> Result<(), CudaError> {
        use BlockType::{Iq2Xxs, Mxfp4, Q2K, Q4K, Q6K};
        let cases = [
            (Iq2Xxs, Q2K, 4096, 2048, 16, 6, 40),
            (Iq2Xxs, Q2K, 512, 768, 8, 6, 200),
            (Iq2Xxs, Iq2Xxs, 4096, 2048, 8, 6, 3),
            (Q2K, Q2K, 2048, 1024, 8, 6, 20),
            (Q4K, Q4K, 4096, 2048, 8, 6, 20),
            (Mxfp4, Mxfp4, 4096, 2048, 8, 6, 20),
            (Mxfp4, Q4K, 256, 256, 5, 2, 170),
            (Q4K, Q4K, 512, 768, 300, 4, 2),
            (Q2K, Mxfp4, 7168, 3072, 4, 3, 1),
            (Q6K, Q6K, 512, 256, 8, 2, 3),
        ];
        for (gate, down, outputs, width, n_experts, n_used, tokens) in cases {
            let shape = reference::ExpertShape { gate, down, outputs, width, n_experts, n_used, tokens };
            self.routed(&shape, &[Pass::Prefill])?;
        }
        Ok(())
    }

    fn routed(&mut self, shape: &reference::ExpertShape, passes: &[Pass]) -> Result<(), CudaError> {
        let gpu = self.gpu;
        let reference::ExpertShape { outputs, width, n_experts, n_used, tokens, .. } = *shape;
        let name = shape.name();
        let experts = expert_matrices(gpu, shape)?;
        let limit = 2.0;
        let x = inputs(tokens, outputs, 4);
        let (ids, weights) = shape.routing();
        let device_x = gpu.device.upload(&x, "input")?;
        let device_ids = gpu.device.upload(&ids, "experts")?;
        let device_weights = gpu.device.upload(&weights, "weights")?;
        for &pass in passes {
            let work = Routed {
                input: device_x.view(),
                experts: device_ids.view(),
                weights: device_weights.view(),
                tokens,
                n_used,
                limit,
                pass,
            };
            let mut workspace = Workspace::new(gpu, experts.workspace_bytes(tokens, n_used, pass))?;
            let mut out = gpu.device.upload(&vec![f32::NAN; tokens * outputs], "output")?;
            let mut mids = gpu.device.upload(&vec![f32::NAN; tokens * n_used * width], "mids")?;
            experts.routed(gpu, &mut workspace, &work, &mut out.view_mut(), Some(&mut mids.view_mut()))?;
            let found = gpu.device.download(out.view())?;
            let found_mids = gpu.device.download(mids.view())?;
            let rounded = pass == Pass::Decode && experts.fits_decode();
            let halves = pass == Pass::Prefill && experts.fits_prefill();
            let name = format!("{pass:?} {name}");
            let (mids, expected) = shape.expected_mids(&x, &ids, limit, rounded);
            let picked: Vec<f32> = mids.iter().map(|&at| found_mids[at]).collect();
            let tolerance = if halves { HALVES } else { FLOAT * 4.0 };
            self.close(format!("{name}: mids"), &picked, &expected, tolerance);
            if n_experts <= 8 || outputs <= 1024 || tokens == 1 {
                // The down product of the mids that the device found, so that errors do not add up.
                let (rows, expected) = shape.expected_outputs(&found_mids, &ids, &weights, rounded);
                let picked: Vec<f32> = rows.iter().map(|&at| found[at]).collect();
                let tolerance = match (rounded, halves) {
                    (true, _) => ROUNDED,
                    (_, true) => HALVES,
                    _ => FLOAT,
                };
                self.close(format!("{name}: outputs"), &picked, &expected, tolerance);
            }
            let mut again = gpu.device.upload(&vec![f32::NAN; outputs], "output")?;
            let last = tokens - 1;
            let work = Routed {
                input: device_x.slice(last * outputs..tokens * outputs),
                experts: device_ids.slice(last * n_used..tokens * n_used),
                weights: device_weights.slice(last * n_used..tokens * n_used),
                tokens: 1,
                ..work
            };
            experts.routed(gpu, &mut workspace, &work, &mut again.view_mut(), None)?;
            let again = gpu.device.download(again.view())?;
            self.same(format!("{name}: last token alone, without taps"), &again, &found[last * outputs..]);
        }
        Ok(())
    }

    /// Results on fewer multiprocessors, and from a graph: equal bits.
    fn other_devices(&mut self, pass: Pass, tokens: usize) -> Result<(), CudaError> {
        const N_USED: usize = 6;
        let gpu = self.gpu;
        let shape = reference::ExpertShape {
            gate: BlockType::Iq2Xxs,
            down: BlockType::Q2K,
            outputs: 4096,
            width: 2048,
            n_experts: 16,
            n_used: N_USED,
            tokens,
        };
        let experts = expert_matrices(gpu, &shape)?;
        let matrix = Matrix::generate(gpu, BlockType::Q8_0, 2048, 4096, 1)?;
        let (ids, weights) = shape.routing();
        let x = gpu.device.upload(&inputs(tokens, 4096, 4), "input")?;
        let ids = gpu.device.upload(&ids, "experts")?;
        let weights = gpu.device.upload(&weights, "weights")?;
        let run = |gpu: &Gpu, recorded: bool| -> Result<Vec<f32>, CudaError> {
            let needed = experts.workspace_bytes(tokens, N_USED, pass);
            let mut workspace = Workspace::new(gpu, needed.max(matrix.workspace_bytes(tokens, 1, pass)))?;
            let mut out = gpu.device.zeros::<f32>(tokens * 4096, "output")?;
            let mut dense = gpu.device.zeros::<f32>(tokens * 2048, "output")?;
            gpu.device.synchronize()?;
            let mut work = || {
                let (input, experts_of, weights) = (x.view(), ids.view(), weights.view());
                let (n_used, limit) = (N_USED, 2.0);
                let work = Routed { input, experts: experts_of, weights, tokens, n_used, limit, pass };
                experts.routed(gpu, &mut workspace, &work, &mut out.view_mut(), None)?;
                matrix.products(gpu, &mut workspace, x.view(), tokens, pass, &mut dense.view_mut())
            };
            if recorded {
                let graph = gpu.device.capture(work)?;
                graph.launch()?;
                gpu.device.synchronize()?;
            } else {
                work()?;
            }
            let mut found = gpu.device.download(out.view())?;
            found.extend(gpu.device.download(dense.view())?);
            Ok(found)
        };
        gpu.device.synchronize()?;
        let plain = run(gpu, false)?;
        let graph = run(gpu, true)?;
        self.same(format!("{pass:?} recorded in a graph"), &graph, &plain);
        match restricted(gpu) {
            Ok(small) => {
                let n = small.device.facts().n_multiprocessors;
                let found = run(&small, false)?;
                self.same(format!("{pass:?} on {n} multiprocessors"), &found, &plain);
            }
            Err(error) => {
                self.done(
                    format!("{pass:?} on fewer multiprocessors"),
                    Some(error.to_string()),
                    String::new(),
                );
            }
        }
        Ok(())
    }
}

/// The same kernels on a stream that may use only as many multiprocessors as a GB10 has, or half of those of a device that
/// has no more.
fn restricted(gpu: &Gpu) -> Result<Gpu, CudaError> {
    const GB10: u32 = 48;
    let all = gpu.device.facts().n_multiprocessors;
    let device: Device = gpu.device.restricted_to(if all > GB10 { GB10 } else { all.div_ceil(2) })?;
    Ok(Gpu { device, kernels: gpu.kernels.clone() })
}

/// Experts of random weights.
fn expert_matrices(gpu: &Gpu, shape: &reference::ExpertShape) -> Result<ExpertMatrices, CudaError> {
    let (n, d, f) = (shape.n_experts, shape.outputs, shape.width);
    ExpertMatrices::new(
        n,
        Matrix::generate(gpu, shape.gate, n * f, d, reference::GATE_SEED)?,
        Matrix::generate(gpu, shape.gate, n * f, d, reference::UP_SEED)?,
        Matrix::generate(gpu, shape.down, n * d, f, reference::DOWN_SEED)?,
    )
}

/// Bytes of a row.
fn row_bytes(block_type: BlockType, columns: usize) -> usize {
    block_type.row_bytes(columns as u64).unwrap_or_default() as usize
}

/// How rows are made; types without recipe are not tested.
fn recipe(block_type: BlockType, columns: usize, seed: u64) -> Recipe {
    Recipe::new(block_type, columns, seed).expect("tested types have recipes")
}
