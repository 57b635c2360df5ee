//! Every operation of the backend, computed on both machines from the same values.

use std::sync::Arc;

use gguf_tools::block::BlockType;
use gguf_tools::model::HyperParameters;
use gguf_tools::simd::Level;

use super::source::{OneMatrix, noise};
use super::{Report, SelfTest, Tolerance, Verdict, compare, same_bits};
use crate::cpu::CpuBackend;
use crate::cuda::CudaBackend;
use crate::error::RunnerError;
use crate::ops::{
    ActivationPrecision, Backend, GatedFfn, HyperConnection, HyperConstants, MatrixPlace, Numerics, Queries,
    Rope, RouterRule, RowPlaces, SublayerInput, Work,
};
use crate::session::Options;
use crate::weights::open_source;

/// Floats in the same order up to a few operations.
pub(super) const CLOSE: Tolerance = Tolerance { rms: 2e-6, largest: 3e-5 };
/// Products with `f16` inputs and weights, or inputs of 8 bits.
const ROUNDED_INPUTS: Tolerance = Tolerance { rms: 2e-2, largest: 2e-1 };

/// A backend with what operations need besides values.
pub(super) struct Lab<'a, B> {
    pub(super) backend: &'a B,
    pub(super) h: &'a HyperParameters,
}

/// Name of results that are zeros everywhere.
const DIFFERENCE: &str = "difference from what is done step by step";

/// Name of results that tell which values are finite.
const FINITE: &str = "which values are finite";

/// Named results, `(name, width, values)`.
pub(super) type Results = Vec<(&'static str, usize, Vec<f32>)>;

impl<B: Backend> Lab<'_, B> {
    fn matrix(&self, matrix: OneMatrix) -> Result<B::Matrix, RunnerError> {
        let (source, place) = matrix.shared();
        self.backend.matrix(&source, place)
    }

    pub(super) fn random(
        &self,
        block_type: BlockType,
        rows: usize,
        columns: usize,
        seed: u64,
    ) -> Result<B::Matrix, RunnerError> {
        self.matrix(random(self.h, block_type, rows, columns, seed))
    }

    /// `[.., width]` values as a tensor: rows of a table.
    pub(super) fn tensor(&self, values: &[f32], width: usize) -> Result<B::Tensor, RunnerError> {
        let table = self.matrix(OneMatrix::table(self.h, width, values))?;
        let n = values.len() / width;
        let ids: Vec<u32> = (0..n as u32).collect();
        let places = self.backend.places(&ids, &vec![0; n])?;
        self.backend.embed(&table, RowPlaces { batch: &places, rows: 0..n }, 1)
    }

    pub(super) fn noise(&self, seed: u64, tokens: usize, width: usize) -> Result<B::Tensor, RunnerError> {
        self.tensor(&noise(seed, tokens * width), width)
    }

    pub(super) fn read(&self, tensor: &B::Tensor) -> Result<Vec<f32>, RunnerError> {
        Ok(self.backend.read(tensor)?.into_owned())
    }
}

fn random(h: &HyperParameters, block_type: BlockType, rows: usize, columns: usize, seed: u64) -> OneMatrix {
    OneMatrix::random(h, block_type, rows, columns, seed).expect("whole blocks of a type that can be written")
}

pub(super) fn rope(n_pairs: usize) -> Rope {
    let frequency = |i: usize| 10000_f64.powf(-(i as f64) / n_pairs as f64) as f32;
    Rope { frequencies: (0..n_pairs).map(frequency).collect(), base: 10000.0, slowed: None }
}

/// Positions near and far.
fn positions(n: usize) -> Vec<usize> {
    (0..n).map(|i| [0, 1, 127, 4095, 131_071, 1_000_003][i % 6] + i / 6).collect()
}

#[derive(Debug, Clone)]
enum Operation {
    Norm {
        tokens: usize,
        width: usize,
    },
    Sums {
        tokens: usize,
        width: usize,
    },
    Streams {
        tokens: usize,
        width: usize,
    },
    Queries {
        tokens: usize,
        heads: usize,
        width: usize,
    },
    KeyValues {
        tokens: usize,
        width: usize,
        numerics: Numerics,
    },
    IndexQueries {
        tokens: usize,
        heads: usize,
        width: usize,
        numerics: Numerics,
    },
    Route {
        tokens: usize,
        experts: usize,
        used: usize,
        by_table: bool,
        level: bool,
    },
    Products {
        block_type: BlockType,
        tokens: usize,
        rows: usize,
        columns: usize,
        groups: usize,
    },
    NormedProducts {
        block_type: BlockType,
        tokens: usize,
        columns: usize,
    },
    /// One of the input's values is this, which must be seen in every product.
    NotFinite {
        block_type: BlockType,
        tokens: usize,
        columns: usize,
        value: f32,
    },
    Shared {
        block_type: BlockType,
        tokens: usize,
        width: usize,
        inner: usize,
    },
    Experts {
        types: [BlockType; 3],
        tokens: usize,
        experts: usize,
        used: usize,
        width: usize,
        inner: usize,
    },
}

impl Operation {
    fn run<B: Backend>(&self, lab: &Lab<'_, B>, work: Work) -> Result<Results, RunnerError> {
        let b = lab.backend;
        let _turn = b.turn(work)?;
        match *self {
            Self::Norm { tokens, width } => {
                let x = lab.noise(1, tokens, width)?;
                let weights = b.vector(noise(2, width))?;
                Ok(vec![("norm", width, lab.read(&b.rms_norm(&x, &weights, 1e-6)?)?)])
            }
            Self::Sums { tokens, width } => {
                let mut x = lab.noise(1, tokens, width)?;
                b.add(&mut x, &lab.noise(2, tokens, width)?)?;
                let sum = lab.read(&x)?;
                b.project_out(&mut x, &b.vector(noise(3, width))?, 0.01)?;
                let steered = lab.read(&x)?;
                let mut zeros = b.zeros(tokens + 2, width)?;
                b.put_rows(&mut zeros, 1, &x)?;
                let moved = lab.read(&b.rows(&zeros, 0..tokens + 1)?)?;
                Ok(vec![("sum", width, sum), ("steered", width, steered), ("moved", width, moved)])
            }
            Self::Streams { tokens, width } => streams(lab, tokens, width),
            Self::Queries { tokens, heads, width } => {
                let mut q = lab.noise(1, tokens, heads * width)?;
                let positions = positions(tokens);
                let places = b.places(&vec![0; tokens], &positions)?;
                let rope = b.rope(rope(32.min(width / 2)))?;
                let at = RowPlaces { batch: &places, rows: 0..tokens };
                let queries = Queries { heads: &mut q, head_dim: width, epsilon: 1e-6, index: None };
                b.finish_queries(queries, &rope, at, Numerics::Exact)?;
                Ok(vec![("queries", heads * width, lab.read(&q)?)])
            }
            Self::KeyValues { tokens, width, numerics } => {
                let mut rows = lab.noise(1, tokens, width)?;
                let places = b.places(&vec![0; tokens], &positions(tokens))?;
                let rope = b.rope(rope(32))?;
                b.kv_finish(&mut rows, &rope, RowPlaces { batch: &places, rows: 0..tokens }, numerics)?;
                Ok(vec![("rows", width, lab.read(&rows)?)])
            }
            Self::IndexQueries { tokens, heads, width, numerics } => {
                const HEADS: usize = 3;
                const HEAD_DIM: usize = 128;
                let mut q = lab.noise(2, tokens, HEADS * HEAD_DIM)?;
                let mut index = lab.noise(1, tokens, heads * width)?;
                let places = b.places(&vec![0; tokens], &positions(tokens))?;
                let (rope, at) = (b.rope(rope(32))?, RowPlaces { batch: &places, rows: 0..tokens });
                let index_queries = Some((&mut index, width));
                let queries =
                    Queries { heads: &mut q, head_dim: HEAD_DIM, epsilon: 1e-6, index: index_queries };
                b.finish_queries(queries, &rope, at, numerics)?;
                Ok(vec![
                    ("queries", HEADS * HEAD_DIM, lab.read(&q)?),
                    ("index queries", heads * width, lab.read(&index)?),
                ])
            }
            Self::Route { tokens, experts, used, by_table, level } => {
                let values = if level { vec![0.5; tokens * experts] } else { noise(1, tokens * experts) };
                let logits = lab.tensor(&values, experts)?;
                let rule = if by_table {
                    RouterRule::Hash((0..64 * used).map(|i| (i * 5 % experts) as i32).collect())
                } else if level {
                    RouterRule::Bias(vec![0.0; experts].into())
                } else {
                    RouterRule::Bias(noise(2, experts).iter().map(|v| v * 0.1).collect())
                };
                let rule = b.router_rule(rule)?;
                let ids: Vec<u32> = (0..tokens as u32).map(|t| t * 13 % 64).collect();
                let places = b.places(&ids, &vec![0; tokens])?;
                let rows = RowPlaces { batch: &places, rows: 0..tokens };
                let routing = b.route(&logits, &rule, rows, used, 1.5)?;
                let routing = b.read_routing(&routing)?;
                let chosen = routing.experts.iter().map(|&e| e as f32).collect();
                Ok(vec![("experts", used, chosen), ("weights", used, routing.weights.clone())])
            }
            Self::Products { block_type, tokens, rows, columns, groups } => {
                let matrix = lab.random(block_type, rows, columns, 2)?;
                let x = lab.noise(1, tokens, groups * columns)?;
                let product = if groups == 1 {
                    b.linear_many(&x, &[&matrix])?.swap_remove(0)
                } else {
                    b.linear_grouped(&x, &matrix, groups)?
                };
                let ids: Vec<u32> = (0..5).map(|i| (i * 977 % rows) as u32).collect();
                let places = b.places(&ids, &[0; 5])?;
                let taken = b.embed(&matrix, RowPlaces { batch: &places, rows: 0..5 }, 1)?;
                Ok(vec![("products", rows, lab.read(&product)?), ("rows taken", columns, lab.read(&taken)?)])
            }
            Self::NormedProducts { block_type, tokens, columns } => {
                const ROWS: [usize; 2] = [40, 7];
                let matrices = [
                    lab.random(block_type, ROWS[0], columns, 2)?,
                    lab.random(BlockType::F16, ROWS[1], columns, 3)?,
                ];
                let matrices = [&matrices[0], &matrices[1]];
                let (x, norm) = (lab.noise(1, tokens, columns)?, b.vector(noise(4, columns))?);
                let together = b.normed_linear_many(&x, &norm, 1e-6, &matrices)?;
                let apart = b.linear_many(&b.rms_norm(&x, &norm, 1e-6)?, &matrices)?;
                let (first, second) = (lab.read(&together[0])?, lab.read(&together[1])?);
                let mut difference = first.clone();
                difference.extend(&second);
                let apart = [lab.read(&apart[0])?, lab.read(&apart[1])?].concat();
                difference.iter_mut().zip(apart).for_each(|(value, apart)| *value -= apart);
                Ok(vec![("first", ROWS[0], first), ("second", ROWS[1], second), (DIFFERENCE, 1, difference)])
            }
            Self::NotFinite { block_type, tokens, columns, value } => {
                const ROWS: usize = 40;
                let matrix = lab.random(block_type, ROWS, columns, 2)?;
                let mut values = noise(1, tokens * columns);
                values.iter_mut().skip(columns / 2 + 5).step_by(columns).for_each(|x| *x = value);
                let x = lab.tensor(&values, columns)?;
                let product = lab.read(&b.linear_many(&x, &[&matrix])?[0])?;
                let finite = product.iter().map(|y| f32::from(u8::from(y.is_finite()))).collect();
                Ok(vec![(FINITE, ROWS, finite)])
            }
            Self::Shared { block_type, tokens, width, inner } => {
                let expert = GatedFfn {
                    gate: lab.random(block_type, inner, width, 2)?,
                    up: lab.random(block_type, inner, width, 3)?,
                    down: lab.random(block_type, width, inner, 4)?,
                };
                let x = lab.noise(1, tokens, width)?;
                let output = lab.read(&b.shared_expert(&x, &expert, 10.0, None)?)?;
                // Who is shown the activations has them computed apart.
                let shown = lab.read(&b.shared_expert(&x, &expert, 10.0, Some(&mut |_| {}))?)?;
                let difference = output.iter().zip(shown).map(|(one, other)| one - other).collect();
                Ok(vec![("shared expert", width, output), (DIFFERENCE, 1, difference)])
            }
            Self::Experts { types, tokens, experts, used, width, inner } => {
                let sources = [(types[0], inner, width), (types[1], inner, width), (types[2], width, inner)];
                let mut stacks = Vec::new();
                for (seed, (block_type, rows, columns)) in sources.into_iter().enumerate() {
                    let matrix = random(lab.h, block_type, experts * rows, columns, seed as u64 + 2);
                    stacks.push(matrix.shared().0);
                }
                experts_of(lab, &stacks, sources, tokens, experts, used)
            }
        }
    }
}

fn streams<B: Backend>(lab: &Lab<'_, B>, tokens: usize, width: usize) -> Result<Results, RunnerError> {
    let (b, m) = (lab.backend, 4);
    let constants =
        HyperConstants { n_streams: m, sinkhorn_iterations: 20, epsilon: 1e-6, rms_epsilon: 1e-6 };
    let mut state = lab.noise(1, tokens, m * width)?;
    let weights = HyperConnection {
        mixer: lab.random(BlockType::F32, 24, m * width, 2)?,
        scale: b.vector(vec![0.7, 0.4, 1.3])?,
        base: b.vector(noise(3, 24))?,
    };
    let norm = b.vector(noise(6, width))?;
    let SublayerInput { merged, normed, mix } = b.hc_pre(&state, &weights, constants, &norm)?;
    let mut results = vec![
        ("merged", width, lab.read(&merged)?),
        ("normed", width, lab.read(&normed)?),
        ("post", m, lab.read(&mix.post)?),
        ("comb", m * m, lab.read(&mix.comb)?),
    ];
    let (output, second) = (lab.noise(4, tokens, width)?, lab.noise(7, tokens, width)?);
    b.hc_post(&mut state, &output, None, &mix)?;
    results.push(("mixed", m * width, lab.read(&state)?));
    let turned = b.hc_turn(&mut state, &output, Some(&second), &mix, &weights, constants, &norm)?;
    results.push(("turned", m * width, lab.read(&state)?));
    results.push(("merged once more", width, lab.read(&turned.merged)?));
    let head = HyperConnection {
        mixer: lab.random(BlockType::F32, m, m * width, 2)?,
        scale: b.vector(vec![0.7])?,
        base: b.vector(noise(5, m))?,
    };
    let (x, normed) = b.hc_head(&state, &head, constants, &norm)?;
    results.push(("head", width, lab.read(&x)?));
    results.push(("head, normed", width, lab.read(&normed)?));
    Ok(results)
}

fn experts_of<B: Backend>(
    lab: &Lab<'_, B>,
    stacks: &[Arc<dyn crate::weights::WeightSource>],
    shapes: [(BlockType, usize, usize); 3],
    tokens: usize,
    experts: usize,
    used: usize,
) -> Result<Results, RunnerError> {
    let b = lab.backend;
    // The trait takes one source: one that serves the three tensors by index.
    let source: Arc<dyn crate::weights::WeightSource> = Arc::new(Three(stacks.to_vec()));
    let place = |tensor: usize| {
        let (_, rows, columns) = shapes[tensor];
        (0..experts).map(|e| MatrixPlace { tensor, first_row: e * rows, rows, columns }).collect::<Vec<_>>()
    };
    let experts_on = b.experts(&source, &GatedFfn { gate: place(0), up: place(1), down: place(2) })?;
    let (width, inner) = (shapes[0].2, shapes[0].1);
    let x = lab.noise(1, tokens, width)?;
    let logits = lab.noise(9, tokens, experts)?;
    let rule = b.router_rule(RouterRule::Bias(vec![0.0; experts].into()))?;
    let places = b.places(&vec![0; tokens], &vec![0; tokens])?;
    let routing = b.route(&logits, &rule, RowPlaces { batch: &places, rows: 0..tokens }, used, 1.5)?;
    let mut mids = Vec::new();
    let mut tap = |expert: usize, rows: &[usize], _: &[f32], inputs: &[f32], mid: &[f32]| {
        mids.extend([expert as f32, rows.len() as f32, inputs.iter().sum::<f32>()]);
        mids.extend_from_slice(mid);
    };
    let tapped = b.routed_experts(&x, &routing, &experts_on, 10.0, Some(&mut tap))?;
    let plain = b.routed_experts(&x, &routing, &experts_on, 10.0, None)?;
    Ok(vec![
        ("experts", width, lab.read(&plain)?),
        ("tapped experts", width, lab.read(&tapped)?),
        ("mids", inner, mids),
    ])
}

/// Sources as tensors 0, 1, 2 of one.
struct Three(Vec<Arc<dyn crate::weights::WeightSource>>);

impl crate::weights::WeightSource for Three {
    fn path(&self) -> &std::path::Path {
        self.0[0].path()
    }

    fn hyper_parameters(&self) -> &HyperParameters {
        self.0[0].hyper_parameters()
    }

    fn find(&self, _: &str) -> Option<crate::weights::FoundTensor> {
        None
    }

    fn block_type(&self, tensor: usize) -> Option<BlockType> {
        self.0[tensor].block_type(0)
    }

    fn blocks(&self, tensor: usize, rows: std::ops::Range<usize>) -> Result<&[u8], RunnerError> {
        self.0[tensor].blocks(0, rows)
    }

    fn read_rows(
        &self,
        tensor: usize,
        rows: std::ops::Range<usize>,
        out: &mut [f32],
    ) -> Result<(), RunnerError> {
        self.0[tensor].read_rows(0, rows, out)
    }

    fn read_integers(&self, _: usize) -> Result<Vec<i32>, RunnerError> {
        Ok(Vec::new())
    }
}

pub(super) struct Machines {
    pub(super) cpu: CpuBackend,
    pub(super) cuda: CudaBackend,
    pub(super) h: HyperParameters,
}

impl Machines {
    pub(super) fn open(
        test: &SelfTest<'_>,
        numerics: Numerics,
        activations: ActivationPrecision,
    ) -> Result<Self, RunnerError> {
        let source = open_source(test.model)?;
        let kernels = test.kernels;
        let options = Options { numerics, activations, kernels, ..Options::default() };
        let cpu = CpuBackend { level: Level::detect(), activations: ActivationPrecision::F32, widen: false };
        let cuda = CudaBackend::open(test.ordinal, &source, &options)?;
        Ok(Self { cpu, cuda, h: source.hyper_parameters().clone() })
    }

    fn compare(&self, report: &mut Report<'_>, operation: &Operation, work: Work, tolerance: Tolerance) {
        let mut found = Err(RunnerError::EmptyPrompt);
        let mut expected = Err(RunnerError::EmptyPrompt);
        let name = format!("{operation:?} {work:?}");
        report.run(format!("{name}: runs"), || {
            expected = operation.run(&Lab { backend: &self.cpu, h: &self.h }, work);
            found = operation.run(&Lab { backend: &self.cuda, h: &self.h }, work);
            if let Err(error) = &found {
                return Ok(Verdict { passed: false, detail: super::chain(error) });
            }
            Ok(Verdict { passed: expected.is_ok(), detail: String::new() })
        });
        if let (Ok(expected), Ok(found)) = (expected, found) {
            for ((what, width, expected), (_, _, found)) in expected.iter().zip(&found) {
                report.run(format!("{name}: {what}"), || {
                    Ok(
                        if *what == "experts" && matches!(operation, Operation::Route { .. })
                            || ["rows taken", DIFFERENCE, FINITE].contains(what)
                        {
                            same_bits(expected, found, *width)
                        } else {
                            compare(expected, found, *width, tolerance)
                        },
                    )
                });
            }
        }
    }
}

/// Operations on rows of activations.
pub(super) fn rows(test: &SelfTest<'_>, report: &mut Report<'_>) -> Result<(), RunnerError> {
    let machines = Machines::open(test, Numerics::Exact, ActivationPrecision::F32)?;
    let mut operations = Vec::new();
    for (tokens, width) in [(1, 256), (3, 96), (2, 512), (5, 1024), (1, 4096), (3, 4096), (2, 7168)] {
        operations.push(Operation::Norm { tokens, width });
        operations.push(Operation::Sums { tokens, width });
        operations.push(Operation::Streams { tokens, width });
    }
    for (tokens, heads, width) in [(1, 64, 512), (7, 4, 128), (6, 3, 64), (2, 5, 256)] {
        operations.push(Operation::Queries { tokens, heads, width });
    }
    for numerics in [Numerics::Exact, Numerics::Official] {
        for (tokens, width) in [(1, 512), (9, 512), (7, 128), (3, 256)] {
            operations.push(Operation::KeyValues { tokens, width, numerics });
        }
        for (tokens, heads) in [(1, 64), (7, 8), (6, 3)] {
            operations.push(Operation::IndexQueries { tokens, heads, width: 128, numerics });
        }
    }
    for (tokens, experts, used) in [(1, 256, 6), (19, 256, 6), (33, 16, 4), (3, 384, 6), (2, 8, 2)] {
        for (by_table, level) in [(false, false), (false, true), (true, false)] {
            operations.push(Operation::Route { tokens, experts, used, by_table, level });
        }
    }
    for operation in &operations {
        // A rounding that falls the other way is a step of FP4.
        let steps = matches!(operation, Operation::IndexQueries { numerics: Numerics::Official, .. });
        let tolerance = if steps { Tolerance { rms: 2e-3, largest: 1.0 } } else { CLOSE };
        machines.compare(report, operation, Work::Batch, tolerance);
        if matches!(operation, Operation::Streams { .. } | Operation::IndexQueries { .. }) {
            machines.compare(report, operation, Work::Token, tolerance);
        }
    }
    Ok(())
}

/// Products in every block type, at widths of the real model and odd ones.
pub(super) fn matrices(test: &SelfTest<'_>, report: &mut Report<'_>) -> Result<(), RunnerError> {
    for activations in [ActivationPrecision::F32, ActivationPrecision::Mixed] {
        let machines = Machines::open(test, Numerics::Exact, activations)?;
        let works = if activations == ActivationPrecision::F32 {
            vec![(Work::Batch, CLOSE)]
        } else {
            vec![(Work::Batch, ROUNDED_INPUTS), (Work::Token, ROUNDED_INPUTS)]
        };
        for (work, tolerance) in works {
            // Dense matrices of single tokens read inputs that are as good as `f32`.
            let dense = if work == Work::Token { CLOSE } else { tolerance };
            let tokens_of = |many: usize| if work == Work::Token { vec![1] } else { vec![1, 3, many] };
            for block_type in BlockType::all() {
                if OneMatrix::random(&machines.h, block_type, 1, 1024, 1).is_none() {
                    continue;
                }
                for (rows, columns, groups) in
                    [(40, 1024, 1), (7, 512, 1), (128, 256, 2), (512, 4096, 1), (64, 4096, 8)]
                {
                    for tokens in tokens_of(37) {
                        let operation = Operation::Products { block_type, tokens, rows, columns, groups };
                        machines.compare(report, &operation, work, dense);
                    }
                }
                for (tokens, columns) in [(1, 1024), (1, 256), (1, 1536), (2, 1024), (1, 4096)] {
                    let normed = Operation::NormedProducts { block_type, tokens, columns };
                    machines.compare(report, &normed, work, dense);
                }
                for value in [f32::NAN, f32::INFINITY] {
                    for tokens in tokens_of(37) {
                        let broken = Operation::NotFinite { block_type, tokens, columns: 1024, value };
                        machines.compare(report, &broken, work, dense);
                    }
                }
                let shared = Operation::Shared { block_type, tokens: 2, width: 512, inner: 256 };
                machines.compare(report, &shared, work, dense);
            }
            let sets = [
                [BlockType::F32; 3],
                [BlockType::Iq2Xxs, BlockType::Iq2Xxs, BlockType::Q2K],
                [BlockType::Q4K; 3],
                [BlockType::Q8_0; 3],
                [BlockType::Mxfp4; 3],
            ];
            for types in sets {
                for (experts, used, width, inner) in [(16, 4, 256, 256), (8, 6, 4096, 2048)] {
                    for tokens in tokens_of(70) {
                        let operation = Operation::Experts { types, tokens, experts, used, width, inner };
                        machines.compare(report, &operation, work, tolerance);
                    }
                }
            }
        }
    }
    Ok(())
}
