//! From tensor names to the weights of [`Network`]: the only place that knows both.

use std::sync::Arc;

use gguf_tools::model::{HyperParameters, TensorTable};

use crate::error::RunnerError;
use crate::forward::Network;
use crate::layer::{AttentionWeights, CompressorWeights, FfnWeights, IndexerWeights, Layer};
use crate::ops::{Backend, Compressor, GatedFfn, HyperConnection, MatrixPlace, RouterRule};
use crate::rotary::{compressed_rope, plain_rope};
use crate::weights::{FoundTensor, WeightSource, check_shape};

/// Makes the model of a source usable on a backend. Matrices stay where they are until they are used.
///
/// # Errors
/// If tensors are missing, have another shape than the hyper-parameters imply, are stored in a type that cannot be
/// computed with, or small tensors hold values that are not finite.
pub fn load<B: Backend>(backend: &B, source: &Arc<dyn WeightSource>) -> Result<Network<B>, RunnerError> {
    let loader = Loader { backend, source, h: source.hyper_parameters() };
    loader.check_presence()?;
    let h = loader.h;
    let plain = Arc::new(backend.rope(plain_rope(h))?);
    let compressed = Arc::new(backend.rope(compressed_rope(h))?);
    let layers = (0..h.num_hidden_layers as u32)
        .map(|layer| loader.layer(layer, if h.compress_ratio(layer) == 0 { &plain } else { &compressed }))
        .collect::<Result<_, _>>()?;
    Ok(Network {
        embedding: loader.matrix("token_embd.weight")?,
        layers,
        head_mix: loader.hyper_connection("output_hc")?,
        output_norm: loader.vector("output_norm.weight")?,
        output: loader.matrix("output.weight")?,
        hyper_parameters: h.clone(),
    })
}

/// Files of ds4 may lack it: biases of zero.
fn is_optional(name: &str) -> bool {
    name.ends_with(".exp_probs_b.bias")
}

struct Loader<'a, B> {
    backend: &'a B,
    source: &'a Arc<dyn WeightSource>,
    h: &'a HyperParameters,
}

impl<B: Backend> Loader<'_, B> {
    /// All tensors are there and have the shapes that the hyper-parameters imply.
    fn check_presence(&self) -> Result<(), RunnerError> {
        let table = TensorTable::new(self.h);
        let mut missing = Vec::new();
        for spec in table.specs() {
            match self.source.find(&spec.gguf_name) {
                Some(found) => check_shape(self.source.as_ref(), &spec.gguf_name, &found, &spec.shape)?,
                None if is_optional(&spec.gguf_name) => {}
                None => missing.push(spec.gguf_name.clone()),
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        Err(RunnerError::MissingTensors {
            path: self.source.path().to_owned(),
            n_missing: missing.len(),
            first: missing.swap_remove(0),
        })
    }

    fn find(&self, name: &str) -> Result<FoundTensor, RunnerError> {
        self.source.find(name).ok_or_else(|| RunnerError::MissingTensors {
            path: self.source.path().to_owned(),
            n_missing: 1,
            first: name.to_owned(),
        })
    }

    fn matrix(&self, name: &str) -> Result<B::Matrix, RunnerError> {
        self.backend.matrix(self.source, self.places(name, 1)?[0])
    }

    /// Where the matrices of a stack of `n` lie.
    fn places(&self, name: &str, n: usize) -> Result<Vec<MatrixPlace>, RunnerError> {
        let found = self.find(name)?;
        if let Some(block_type) = self.source.block_type(found.index)
            && block_type.format().is_none()
        {
            let (path, tensor) = (self.source.path().to_owned(), name.to_owned());
            return Err(RunnerError::UncomputableType { path, tensor, block_type });
        }
        let (columns, outer) = found.shape.split_last().map_or((1, &[][..]), |(c, o)| (*c as usize, o));
        let rows = outer.iter().product::<u64>() as usize / n;
        let place = |i| MatrixPlace { tensor: found.index, first_row: i * rows, rows, columns };
        Ok((0..n).map(place).collect())
    }

    /// All values of a small tensor, finite.
    fn values(&self, name: &str) -> Result<Vec<f32>, RunnerError> {
        let found = self.find(name)?;
        let (columns, outer) = found.shape.split_last().map_or((1, &[][..]), |(c, o)| (*c as usize, o));
        let rows = outer.iter().product::<u64>() as usize;
        let mut values = vec![0.0; rows * columns];
        self.source.read_rows(found.index, 0..rows, &mut values)?;
        if let Some(index) = values.iter().position(|v| !v.is_finite()) {
            return Err(self.bad_value(name, index, values[index].to_string(), "a finite number".into()));
        }
        Ok(values)
    }

    fn bad_value(&self, tensor: &str, index: usize, found: String, expected: String) -> RunnerError {
        let (path, tensor) = (self.source.path().to_owned(), tensor.to_owned());
        RunnerError::BadValue { path, tensor, index, found, expected }
    }

    fn vector(&self, name: &str) -> Result<B::Vector, RunnerError> {
        self.backend.vector(self.values(name)?)
    }

    fn hyper_connection(&self, stem: &str) -> Result<HyperConnection<B>, RunnerError> {
        Ok(HyperConnection {
            mixer: self.matrix(&format!("{stem}_fn.weight"))?,
            scale: self.vector(&format!("{stem}_scale.weight"))?,
            base: self.vector(&format!("{stem}_base.weight"))?,
        })
    }

    fn compressor(&self, stem: &str) -> Result<CompressorWeights<B>, RunnerError> {
        Ok(CompressorWeights {
            values: self.matrix(&format!("{stem}_kv.weight"))?,
            gates: self.matrix(&format!("{stem}_gate.weight"))?,
            rest: Compressor {
                position_bias: self.vector(&format!("{stem}_ape.weight"))?,
                norm: self.vector(&format!("{stem}_norm.weight"))?,
            },
        })
    }

    fn layer(&self, layer: u32, rope: &Arc<B::Rope>) -> Result<Layer<B>, RunnerError> {
        let name = |rest: &str| format!("blk.{layer}.{rest}");
        let ratio = self.h.compress_ratio(layer);
        let compressor = (ratio != 0).then(|| self.compressor(&name("attn_compressor"))).transpose()?;
        let indexer = (ratio == 4).then(|| self.indexer(layer)).transpose()?;
        let attention = AttentionWeights {
            q_a: self.matrix(&name("attn_q_a.weight"))?,
            q_norm: self.vector(&name("attn_q_a_norm.weight"))?,
            q_b: self.matrix(&name("attn_q_b.weight"))?,
            kv: self.matrix(&name("attn_kv.weight"))?,
            kv_norm: self.vector(&name("attn_kv_a_norm.weight"))?,
            sinks: self.vector(&name("attn_sinks.weight"))?,
            output_a: self.matrix(&name("attn_output_a.weight"))?,
            output_b: self.matrix(&name("attn_output_b.weight"))?,
            compressor,
            indexer,
            rope: rope.clone(),
        };
        let n_experts = self.h.n_routed_experts as usize;
        let ffn = FfnWeights {
            router: self.matrix(&name("ffn_gate_inp.weight"))?,
            rule: self.backend.router_rule(self.router_rule(layer)?)?,
            experts: self.backend.experts(
                self.source,
                &GatedFfn {
                    gate: self.places(&name("ffn_gate_exps.weight"), n_experts)?,
                    up: self.places(&name("ffn_up_exps.weight"), n_experts)?,
                    down: self.places(&name("ffn_down_exps.weight"), n_experts)?,
                },
            )?,
            shared: GatedFfn {
                gate: self.matrix(&name("ffn_gate_shexp.weight"))?,
                up: self.matrix(&name("ffn_up_shexp.weight"))?,
                down: self.matrix(&name("ffn_down_shexp.weight"))?,
            },
        };
        Ok(Layer {
            attention_mix: self.hyper_connection(&name("hc_attn"))?,
            attention_norm: self.vector(&name("attn_norm.weight"))?,
            attention,
            ffn_mix: self.hyper_connection(&name("hc_ffn"))?,
            ffn_norm: self.vector(&name("ffn_norm.weight"))?,
            ffn,
        })
    }

    fn indexer(&self, layer: u32) -> Result<IndexerWeights<B>, RunnerError> {
        Ok(IndexerWeights {
            queries: self.matrix(&format!("blk.{layer}.indexer.attn_q_b.weight"))?,
            head_weights: self.matrix(&format!("blk.{layer}.indexer.proj.weight"))?,
            compressor: self.compressor(&format!("blk.{layer}.indexer_compressor"))?,
        })
    }

    fn router_rule(&self, layer: u32) -> Result<RouterRule, RunnerError> {
        let n_experts = self.h.n_routed_experts as usize;
        if u64::from(layer) >= self.h.num_hash_layers {
            let name = format!("blk.{layer}.exp_probs_b.bias");
            let is_there = self.source.find(&name).is_some();
            let bias = if is_there { self.values(&name)? } else { vec![0.0; n_experts] };
            return Ok(RouterRule::Bias(bias.into()));
        }
        let name = format!("blk.{layer}.ffn_gate_tid2eid.weight");
        let table = self.source.read_integers(self.find(&name)?.index)?;
        if let Some(index) = table.iter().position(|&e| !(0..n_experts as i32).contains(&e)) {
            let expected = format!("an expert from 0 to {}", n_experts - 1);
            return Err(self.bad_value(&name, index, table[index].to_string(), expected));
        }
        Ok(RouterRule::Hash(table.into()))
    }
}
