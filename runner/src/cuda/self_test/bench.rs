//! Speed of the kernels, each as it stands in a decoding step: in a graph, its weights not in any cache.

use gguf_tools::block::BlockType;
use serde::Serialize;

use super::super::driver::{Arguments, Launch, ViewMut};
use super::super::error::CudaError;
use super::super::hyper::Turn;
use super::super::matrix::{ExpertMatrices, Matrix, Pass, Routed, Workspace};
use super::super::module::Gpu;
use super::reference::{self, inputs};
use super::{expert_matrices, restricted};

/// Bytes that one round over all copies of a matrix reads: several times any second-level cache.
const ROUND_BYTES: usize = 1 << 30;

/// Tokens of a prompt.
const MANY_TOKENS: usize = 2048;

/// Rounds, of which the best counts.
const ROUNDS: usize = 5;

/// How fast a kernel is.
#[derive(Debug, Clone, Serialize)]
pub struct KernelTime {
    /// Which kernel, types and shapes.
    pub kernel: String,
    /// Multiprocessors it could use.
    pub multiprocessors: u32,
    /// Bytes of weights.
    pub bytes: usize,
    /// Time of one launch (or of the launches that belong together).
    pub microseconds: f64,
    /// Bytes of weights a second, in 10^9.
    pub gigabytes_per_second: f64,
    /// That, as a share of what a kernel that only reads gets on the whole device.
    pub roofline_share: f64,
    /// 10^12 multiplications and additions a second.
    pub teraflops: f64,
}

/// Times all matrix kernels on the whole device and on 48 multiprocessors (a green context: the stream's kernels run on
/// those alone, while the memory stays as fast as it is), calling `report` after each. Only those whose name contains
/// `wanted`.
///
/// # Errors
/// If the device fails.
pub fn kernel_times(gpu: &Gpu, wanted: &str, report: &mut dyn FnMut(&KernelTime)) -> Result<(), CudaError> {
    let mut bench = Bench { gpu: gpu.clone(), roofline: 1.0, wanted, report };
    bench.roofline = bench.read_all()?;
    bench.all()?;
    // A stream of a part of the device; everything before must be done, for streams do not wait for each other.
    gpu.device.synchronize()?;
    bench.gpu = restricted(gpu)?;
    bench.all()
}

/// Bytes a second that a kernel gets which only reads.
///
/// # Errors
/// If the device fails or has no gigabyte free.
pub fn read_bandwidth(gpu: &Gpu) -> Result<f64, CudaError> {
    let memory = gpu.device.alloc::<u8>(ROUND_BYTES, "memory to read")?;
    let out = gpu.device.zeros::<u32>(1, "result")?;
    let blocks = 4 * gpu.device.facts().n_multiprocessors as usize;
    let milliseconds = best(gpu, || {
        let arguments = Arguments::new().read(&memory).long((ROUND_BYTES / 16) as u64).read(&out);
        gpu.launch("matrix_generate", "read_all", Launch::new(blocks, 512), arguments)
    })?;
    Ok(ROUND_BYTES as f64 / milliseconds * 1e3)
}

struct Bench<'a> {
    gpu: Gpu,
    /// Bytes a second.
    roofline: f64,
    wanted: &'a str,
    report: &'a mut dyn FnMut(&KernelTime),
}

impl Bench<'_> {
    fn all(&mut self) -> Result<(), CudaError> {
        self.read_all()?;
        self.few_tokens()?;
        self.streams(1)?;
        self.many_tokens()?;
        self.streams(MANY_TOKENS)?;
        for (gate, down) in [
            (BlockType::Iq2Xxs, BlockType::Q2K),
            (BlockType::Q2K, BlockType::Q2K),
            (BlockType::Q4K, BlockType::Q4K),
            (BlockType::Mxfp4, BlockType::Mxfp4),
        ] {
            self.experts(gate, down)?;
        }
        Ok(())
    }

    fn few_tokens(&mut self) -> Result<(), CudaError> {
        for (name, block_type, rows, columns, groups) in [
            ("attn q_a", BlockType::Q8_0, 1024, 4096, 1),
            ("attn kv", BlockType::Q8_0, 512, 4096, 1),
            ("attn q_b", BlockType::Q8_0, 32_768, 1024, 1),
            ("attn out_a", BlockType::Q8_0, 8192, 4096, 8),
            ("attn out_b", BlockType::Q8_0, 4096, 8192, 1),
            ("shared down", BlockType::Q8_0, 4096, 2048, 1),
            ("head", BlockType::Q8_0, 129_280, 4096, 1),
            ("router", BlockType::F16, 256, 4096, 1),
            ("compressor", BlockType::F16, 1024, 4096, 1),
            ("indexer q", BlockType::F16, 8192, 1024, 1),
        ] {
            self.dense(name, &[(block_type, rows)], columns, groups, 1, Pass::Decode)?;
        }
        let (q8, f16, pass) = (BlockType::Q8_0, BlockType::F16, Pass::Decode);
        self.dense("shared gate + up", &[(q8, 2048), (q8, 2048)], 4096, 1, 1, pass)?;
        let layer = [(q8, 1024), (q8, 512), (f16, 1024), (f16, 1024), (f16, 256), (f16, 256), (f16, 64)];
        self.dense("all of x, ratio 4", &layer, 4096, 1, 1, pass)?;
        self.dense("all of x, ratio 128", &layer[..4], 4096, 1, 1, pass)?;
        self.dense("attn q_b, 8 tokens", &[(q8, 32_768)], 1024, 1, 8, pass)?;
        self.dense("attn out_b, 2 tokens", &[(q8, 4096)], 8192, 1, 2, pass)
    }

    /// Streams behind a sub-layer with the mixer of the next, as in a model: four of 4,096.
    fn streams(&mut self, tokens: usize) -> Result<(), CudaError> {
        const WIDTH: usize = 4096;
        const STREAMS: usize = 4;
        const MIXES: usize = 24;
        let many = if tokens == 1 { String::new() } else { format!(", {tokens} tokens") };
        let name = format!("hyper-connection{many} ({STREAMS} x {WIDTH} -> F16 {MIXES})");
        if !name.contains(self.wanted) {
            return Ok(());
        }
        let gpu = self.gpu.clone();
        let mixers =
            (0..128).map(|seed| Matrix::generate(&gpu, BlockType::F16, MIXES, STREAMS * WIDTH, seed));
        let mixers: Vec<Matrix> = mixers.collect::<Result<_, _>>()?;
        let mut streams = gpu.device.upload(&inputs(tokens, STREAMS * WIDTH, 1), "streams")?;
        let output = gpu.device.upload(&inputs(tokens, WIDTH, 2), "output")?;
        let post = gpu.device.upload(&vec![0.1f32; tokens * STREAMS], "post weights")?;
        let comb = gpu.device.upload(&vec![0.25f32; tokens * STREAMS * STREAMS], "stream mix")?;
        let mut partials = gpu.device.zeros::<f32>(tokens * (MIXES + 1) * WIDTH / 64, "partial sums")?;
        let milliseconds = best(&gpu, || {
            mixers.iter().try_for_each(|mixer| {
                let turn = Turn {
                    output: output.view(),
                    second: None,
                    post: post.view(),
                    comb: comb.view(),
                    mixer: ("F16", mixer.values_as_stored().address()),
                    tokens,
                    width: WIDTH,
                    n_mixes: MIXES,
                };
                turn.launch(&gpu, tokens == 1, &streams.view_mut(), &partials.view_mut())
            })
        })? / mixers.len() as f64;
        let flops = 2.0 * (tokens * STREAMS * WIDTH * (MIXES + 1 + STREAMS)) as f64;
        self.add(name, mixers[0].n_bytes(), flops, milliseconds);
        Ok(())
    }

    fn many_tokens(&mut self) -> Result<(), CudaError> {
        let (q8, f16) = (BlockType::Q8_0, BlockType::F16);
        for (name, shapes, columns, groups) in [
            ("attn q_a + kv", &[(q8, 1024), (q8, 512)][..], 4096, 1),
            ("attn q_b", &[(q8, 32_768)], 1024, 1),
            ("attn out_a", &[(q8, 8192)], 4096, 8),
            ("attn out_b", &[(q8, 4096)], 8192, 1),
            ("shared gate + up", &[(q8, 2048), (q8, 2048)], 4096, 1),
            ("shared down", &[(q8, 4096)], 2048, 1),
            ("compressors", &[(f16, 1024), (f16, 1024)], 4096, 1),
            ("indexer q", &[(f16, 8192)], 1024, 1),
        ] {
            let name = format!("{name}, {MANY_TOKENS} tokens");
            self.dense(&name, shapes, columns, groups, MANY_TOKENS, Pass::Prefill)?;
        }
        Ok(())
    }

    fn read_all(&mut self) -> Result<f64, CudaError> {
        let gpu = self.gpu.clone();
        let bytes: usize = 4 << 30;
        let memory = gpu.device.alloc::<u8>(bytes, "memory to read")?;
        let out = gpu.device.zeros::<u32>(1, "result")?;
        let blocks = 4 * gpu.device.facts().n_multiprocessors as usize;
        let milliseconds = best(&gpu, || {
            let arguments = Arguments::new().read(&memory).long((bytes / 16) as u64).read(&out);
            gpu.launch("matrix_generate", "read_all", Launch::new(blocks, 512), arguments)
        })?;
        self.add("reading only".to_owned(), bytes, 0.0, milliseconds);
        Ok(bytes as f64 / milliseconds * 1e3)
    }

    fn add(&mut self, kernel: String, bytes: usize, flops: f64, milliseconds: f64) {
        let rate = bytes as f64 / milliseconds * 1e3;
        let roofline = if self.roofline > 1.0 { self.roofline } else { rate };
        (self.report)(&KernelTime {
            kernel,
            multiprocessors: self.gpu.device.facts().n_multiprocessors,
            bytes,
            microseconds: milliseconds * 1e3,
            gigabytes_per_second: rate / 1e9,
            roofline_share: rate / roofline,
            teraflops: flops / milliseconds / 1e9,
        });
    }

    fn dense(
        &mut self,
        name: &str,
        shapes: &[(BlockType, usize)],
        columns: usize,
        groups: usize,
        tokens: usize,
        pass: Pass,
    ) -> Result<(), CudaError> {
        if !name.contains(self.wanted) {
            return Ok(());
        }
        let gpu = self.gpu.clone();
        let mut sets: Vec<Vec<Matrix>> = Vec::new();
        let mut bytes = 0;
        while bytes < ROUND_BYTES && sets.len() < 128 {
            let set: Result<Vec<_>, _> = shapes
                .iter()
                .map(|&(block_type, rows)| {
                    Matrix::generate(&gpu, block_type, rows, columns, sets.len() as u64)
                })
                .collect();
            let set = set?;
            bytes += set.iter().map(Matrix::n_bytes).sum::<usize>();
            sets.push(set);
        }
        let rows: usize = shapes.iter().map(|shape| shape.1).sum();
        let input = gpu.device.upload(&inputs(tokens, groups * columns, 1), "input")?;
        let mut outs = Vec::new();
        for &(_, rows) in shapes {
            outs.push(gpu.device.zeros::<f32>(tokens * rows, "output")?);
        }
        let mut workspace = Workspace::new(&gpu, sets[0][0].workspace_bytes(tokens, groups, pass))?;
        let milliseconds = best(&gpu, || {
            for set in &sets {
                let input = input.view();
                if let [matrix] = &set[..] {
                    let mut output = outs[0].view_mut();
                    let (workspace, output) = (&mut workspace, &mut output);
                    matrix.grouped_products(&gpu, workspace, input, tokens, groups, pass, output)?;
                } else {
                    let mut parts: Vec<_> = set.iter().zip(outs.iter_mut().map(|o| o.view_mut())).collect();
                    Matrix::products_many(&gpu, &mut workspace, input, tokens, pass, &mut parts)?;
                }
            }
            Ok(())
        })? / sets.len() as f64;
        let types: Vec<String> = shapes.iter().map(|(t, rows)| format!("{t} {rows}")).collect();
        let flops = 2.0 * (rows * columns * tokens) as f64;
        let name = format!("{name} ({columns} -> {})", types.join(" + "));
        self.add(name, bytes / sets.len(), flops, milliseconds);
        Ok(())
    }

    fn experts(&mut self, gate: BlockType, down: BlockType) -> Result<(), CudaError> {
        const N_USED: usize = 6;
        if !format!("experts {gate} + {down}").contains(self.wanted) {
            return Ok(());
        }
        let gpu = self.gpu.clone();
        let (n_experts, outputs, width, tokens) = (252, 4096, 2048, 1);
        let shape = reference::ExpertShape { gate, down, outputs, width, n_experts, n_used: N_USED, tokens };
        let experts = expert_matrices(&gpu, &shape)?;
        let input = gpu.device.upload(&inputs(1, outputs, 1), "input")?;
        let ids: Vec<u32> = (0..n_experts as u32).collect();
        let ids = gpu.device.upload(&ids, "experts")?;
        let weights = gpu.device.upload(&[0.2f32; N_USED], "weights")?;
        let mut workspace = Workspace::new(&gpu, experts.workspace_bytes(1, N_USED, Pass::Decode))?;
        let mut out = gpu.device.zeros::<f32>(outputs, "output")?;
        let rounds = n_experts / N_USED;
        let work = |round: usize| Routed {
            input: input.view(),
            experts: ids.slice(round * N_USED..(round + 1) * N_USED),
            weights: weights.view(),
            tokens: 1,
            n_used: N_USED,
            limit: 10.0,
            pass: Pass::Decode,
        };
        let per_expert = experts.n_bytes() / n_experts;
        let gate_bytes = 2 * super::row_bytes(gate, outputs) * width;
        let mut part = |name: &str, bytes: usize, run: &mut Few<'_>| -> Result<(), CudaError> {
            let milliseconds = best(&gpu, || {
                (0..rounds)
                    .try_for_each(|round| run(&experts, &mut workspace, &work(round), &mut out.view_mut()))
            })? / rounds as f64;
            let flops = 2.0 * (N_USED * bytes / per_expert * 3 * outputs * width) as f64;
            self.add(
                format!("{name} of {N_USED} experts, {gate} + {down}"),
                N_USED * bytes,
                flops,
                milliseconds,
            );
            Ok(())
        };
        part("gate + up", gate_bytes, &mut |experts, workspace, work, _| {
            let rounded = workspace.parts(experts.decode_parts(N_USED))?;
            experts.decode_gate_up(&gpu, work, &rounded, None)
        })?;
        part("down", per_expert - gate_bytes, &mut |experts, workspace, work, out| {
            let rounded = workspace.parts(experts.decode_parts(N_USED))?;
            experts.decode_down(&gpu, work, &rounded, out)
        })?;
        part("all", per_expert, &mut |experts, workspace, work, out| {
            experts.routed(&gpu, workspace, work, out, None)
        })?;
        self.many_tokens_to_experts(&experts)
    }

    fn many_tokens_to_experts(&mut self, experts: &ExpertMatrices) -> Result<(), CudaError> {
        const N_USED: usize = 6;
        let gpu = self.gpu.clone();
        let (n_experts, outputs, tokens) = (experts.n_experts(), experts.outputs(), MANY_TOKENS);
        let items = tokens * N_USED;
        let input = gpu.device.upload(&inputs(tokens, outputs, 1), "input")?;
        // Different experts for each token, all as often.
        let ids: Vec<u32> =
            (0..items).map(|i| ((i / N_USED * 97 + i % N_USED * 43) % n_experts) as u32).collect();
        let ids = gpu.device.upload(&ids, "experts")?;
        let weights = gpu.device.upload(&vec![0.2f32; items], "weights")?;
        let mut workspace = Workspace::new(&gpu, experts.workspace_bytes(tokens, N_USED, Pass::Prefill))?;
        let mut out = gpu.device.zeros::<f32>(tokens * outputs, "output")?;
        let (limit, pass, n_used) = (10.0, Pass::Prefill, N_USED);
        let work = Routed {
            input: input.view(),
            experts: ids.view(),
            weights: weights.view(),
            tokens,
            n_used,
            limit,
            pass,
        };
        let [gate, _, down] = experts.block_types();
        let matrix_flops = 2.0 * (items * outputs * experts.width()) as f64;
        let gate_bytes = n_experts * 2 * super::row_bytes(gate, outputs) * experts.width();
        let mut part =
            |name: &str, bytes: usize, matrices: f64, run: &mut Many<'_>| -> Result<(), CudaError> {
                let milliseconds = best(&gpu, || run(&mut workspace, &mut out.view_mut()))?;
                let name =
                    format!("{name} of {N_USED} of {n_experts} experts, {gate} + {down}, {tokens} tokens");
                self.add(name, bytes, matrices * matrix_flops, milliseconds);
                Ok(())
            };
        part("sorting", 0, 0.0, &mut |workspace, _| {
            experts.prefill_prepare(&gpu, &work, &experts.prefill_parts(workspace, &work)?)
        })?;
        part("gate + up", gate_bytes, 2.0, &mut |workspace, _| {
            experts.prefill_gate_up(&gpu, &work, &experts.prefill_parts(workspace, &work)?, None)
        })?;
        part("down", experts.n_bytes() - gate_bytes, 1.0, &mut |workspace, _| {
            experts.prefill_down(&gpu, &work, &experts.prefill_parts(workspace, &work)?)
        })?;
        part("all", experts.n_bytes(), 3.0, &mut |workspace, out| {
            experts.routed(&gpu, workspace, &work, out, None)
        })
    }
}

type Many<'a> = dyn FnMut(&mut Workspace, &mut ViewMut<'_, f32>) -> Result<(), CudaError> + 'a;

type Few<'a> = dyn FnMut(&ExpertMatrices, &mut Workspace, &Routed<'_>, &mut ViewMut<'_, f32>) -> Result<(), CudaError>
    + 'a;

/// Milliseconds of the work, recorded once and run several times.
fn best(gpu: &Gpu, work: impl FnOnce() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    gpu.device.synchronize()?;
    let graph = gpu.device.capture(work)?;
    graph.launch()?;
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = gpu.device.record()?;
        graph.launch()?;
        let end = gpu.device.record()?;
        best = best.min(f64::from(end.milliseconds_since(&start)?));
    }
    Ok(best)
}
