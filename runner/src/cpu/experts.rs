//! Router and experts, (4.7).

use rayon::prelude::*;

use super::matrix::{CpuMatrix, Inputs, Job, transposed};
use super::plain::{self, Sums};
use super::{CpuBackend, CpuTensor, for_rows};
use crate::error::RunnerError;
use crate::ops::{ExpertTap, GatedFfn, RouterRule, Routing, SharedTap};

/// Inputs that are gathered before their experts are run together: bounds memory, and lets small groups share threads.
const GROUP_INPUTS: usize = 256;

/// `silu(min(g, limit)) * clamp(u, -limit, limit)`, (3.4); the gate has no lower clamp.
pub(crate) fn swiglu(gate: f32, up: f32, limit: f32) -> f32 {
    let gate = gate.min(limit);
    gate / (1.0 + (-gate).exp()) * up.clamp(-limit, limit)
}

/// `sqrt(softplus(x))`; above 20 the softplus is `x` itself.
fn score(logit: f32) -> f32 {
    if logit > 20.0 { logit.sqrt() } else { logit.exp().ln_1p().sqrt() }
}

/// (4.7.1 to 4.7.3) for every token.
pub(super) fn route(
    logits: &CpuTensor,
    rule: &RouterRule,
    tokens: &[u32],
    n_used: usize,
    scaling_factor: f32,
    sums: Sums,
) -> Routing {
    let score = match sums {
        Sums::Own => score,
        Sums::PlainGgml => plain::score,
    };
    let mut routing = Routing { n_used, experts: Vec::new(), weights: Vec::new() };
    for (logits, &token) in logits.values.chunks_exact(logits.width).zip(tokens) {
        let scores: Vec<f32> = logits.iter().map(|&logit| score(logit)).collect();
        let chosen: Vec<u32> = match rule {
            RouterRule::Hash(table) => {
                table[token as usize * n_used..][..n_used].iter().map(|&e| e as u32).collect()
            }
            RouterRule::Bias(bias) => {
                let mut order: Vec<u32> = (0..scores.len() as u32).collect();
                let biased = |e: u32| scores[e as usize] + bias[e as usize];
                order.sort_by(|&a, &b| biased(b).total_cmp(&biased(a)).then(a.cmp(&b)));
                order.truncate(n_used);
                order
            }
        };
        // The bias takes part in the choice, not in the weights.
        let weights = chosen.iter().map(|&e| scores[e as usize]);
        let sum = match sums {
            Sums::Own => weights.sum::<f32>() + 1e-20,
            Sums::PlainGgml => plain::sum(weights),
        };
        routing.weights.extend(chosen.iter().map(|&e| scores[e as usize] / sum * scaling_factor));
        routing.experts.extend(chosen);
    }
    routing
}

/// Tokens that came to one expert.
struct Group {
    expert: usize,
    /// Places in `Routing::experts`, ascending.
    slots: Vec<usize>,
}

fn groups(routing: &Routing, n_experts: usize) -> Vec<Group> {
    let mut groups: Vec<Group> = (0..n_experts).map(|expert| Group { expert, slots: Vec::new() }).collect();
    for (slot, &expert) in routing.experts.iter().enumerate() {
        groups[expert as usize].slots.push(slot);
    }
    groups.retain(|group| !group.slots.is_empty());
    groups
}

/// Multiplies each row by its weight.
fn weigh(rows: &mut [f32], width: usize, weights: &[f32]) {
    for (row, weight) in rows.chunks_exact_mut(width).zip(weights) {
        for value in row {
            *value *= weight;
        }
    }
}

impl CpuBackend {
    /// (4.7.4) Weighted sum of the routed experts.
    pub(super) fn routed(
        &self,
        input: &CpuTensor,
        routing: &Routing,
        experts: &GatedFfn<Vec<CpuMatrix>>,
        limit: f32,
        mut tap: Option<&mut ExpertTap<'_>>,
    ) -> Result<CpuTensor, RunnerError> {
        let width = input.width;
        // What each expert gave for each token, `[tokens, n_used, D]`, so that sums run in the router's order.
        let mut parts = vec![0.0; routing.experts.len() * width];
        let groups = groups(routing, experts.gate.len());
        let mut rest = &groups[..];
        while !rest.is_empty() {
            let mut n_inputs = 0;
            let n_groups = rest
                .iter()
                .take_while(|group| {
                    let fits = n_inputs == 0 || n_inputs + group.slots.len() <= GROUP_INPUTS;
                    n_inputs += group.slots.len();
                    fits
                })
                .count();
            let (now, later) = rest.split_at(n_groups);
            self.run_groups(input, routing, experts, limit, now, &mut tap, &mut parts)?;
            rest = later;
        }
        let mut out = CpuTensor::zeros(input.len(), width);
        for_rows(&mut out.values, width, routing.n_used * width, |token, out| {
            for part in parts[token * routing.n_used * width..][..routing.n_used * width].chunks_exact(width)
            {
                for (out, &value) in out.iter_mut().zip(part) {
                    *out += value;
                }
            }
        });
        Ok(out)
    }

    #[expect(clippy::too_many_arguments, reason = "one step of the function above")]
    fn run_groups(
        &self,
        input: &CpuTensor,
        routing: &Routing,
        experts: &GatedFfn<Vec<CpuMatrix>>,
        limit: f32,
        groups: &[Group],
        tap: &mut Option<&mut ExpertTap<'_>>,
        parts: &mut [f32],
    ) -> Result<(), RunnerError> {
        let width = input.width;
        // ggml weighs what an expert gives. That is the same but for the rounding in front of `down`.
        let weighs_results = self.activations.rounds_as_ggml();
        let gathered: Vec<Vec<f32>> = groups
            .iter()
            .map(|group| {
                group.slots.iter().flat_map(|slot| input.row(slot / routing.n_used)).copied().collect()
            })
            .collect();
        let inputs: Vec<Inputs<'_>> = gathered.iter().map(|values| Inputs::new(values, width)).collect();
        let mut mids = self.gated(groups, &inputs, experts, limit)?;
        let inner = experts.gate[0].rows();
        for ((group, mid), inputs) in groups.iter().zip(&mut mids).zip(&gathered) {
            let weights: Vec<f32> = group.slots.iter().map(|&slot| routing.weights[slot]).collect();
            if let Some(tap) = tap {
                let rows: Vec<usize> = group.slots.iter().map(|slot| slot / routing.n_used).collect();
                tap(group.expert, &rows, &weights, inputs, mid);
            }
            if !weighs_results {
                weigh(mid, inner, &weights);
            }
        }
        let inputs: Vec<Inputs<'_>> = mids.iter().map(|mid| Inputs::new(mid, inner)).collect();
        let mut outs: Vec<Vec<f32>> = groups.iter().map(|g| vec![0.0; width * g.slots.len()]).collect();
        let jobs = groups.iter().zip(&inputs).zip(&mut outs).map(|((group, inputs), out)| {
            let matrix = &experts.down[group.expert];
            Job { matrix, rows: 0..matrix.rows(), inputs, out }
        });
        self.run_jobs(jobs.collect())?;
        for (group, out) in groups.iter().zip(outs) {
            let mut out = transposed(out, group.slots.len());
            if weighs_results {
                let weights: Vec<f32> = group.slots.iter().map(|&slot| routing.weights[slot]).collect();
                weigh(&mut out, width, &weights);
            }
            for (&slot, out) in group.slots.iter().zip(out.chunks_exact(width)) {
                parts[slot * width..][..width].copy_from_slice(out);
            }
        }
        Ok(())
    }

    /// Gate and up projections of all groups, activated: `[slots, F]` each.
    fn gated(
        &self,
        groups: &[Group],
        inputs: &[Inputs<'_>],
        experts: &GatedFfn<Vec<CpuMatrix>>,
        limit: f32,
    ) -> Result<Vec<Vec<f32>>, RunnerError> {
        let inner = experts.gate[0].rows();
        let empty = || groups.iter().map(|g| vec![0.0; inner * g.slots.len()]).collect::<Vec<_>>();
        let (mut gates, mut ups) = (empty(), empty());
        let outs = gates.iter_mut().zip(&mut ups);
        let jobs = groups.iter().zip(inputs).zip(outs).flat_map(|((group, inputs), (gate, up))| {
            let job = |matrix, out| Job { matrix, rows: 0..inner, inputs, out };
            [job(&experts.gate[group.expert], gate), job(&experts.up[group.expert], up)]
        });
        self.run_jobs(jobs.collect())?;
        let activate = |(mut gate, up): (Vec<f32>, Vec<f32>), n: usize| {
            for (gate, up) in gate.iter_mut().zip(up) {
                *gate = swiglu(*gate, up, limit);
            }
            transposed(gate, n)
        };
        Ok(gates
            .into_par_iter()
            .zip(ups)
            .zip(groups)
            .map(|(pair, group)| activate(pair, group.slots.len()))
            .collect())
    }

    /// (4.7.5) The shared expert.
    pub(super) fn shared(
        &self,
        input: &CpuTensor,
        expert: &GatedFfn<CpuMatrix>,
        limit: f32,
        tap: Option<&mut SharedTap<'_>>,
    ) -> Result<CpuTensor, RunnerError> {
        let inputs = Inputs::new(&input.values, input.width);
        let mut products = self.multiply_many(&inputs, &[&expert.gate, &expert.up])?.into_iter();
        let mut mid = products.next().expect("one product a matrix");
        let up = products.next().expect("one product a matrix");
        let inner = expert.gate.rows();
        for_rows(&mut mid, inner, 8 * inner, |token, mid| {
            for (gate, &up) in mid.iter_mut().zip(&up[token * inner..]) {
                *gate = swiglu(*gate, up, limit);
            }
        });
        if let Some(tap) = tap {
            tap(&mid);
        }
        let mut out = self.multiply_many(&Inputs::new(&mid, inner), &[&expert.down])?;
        Ok(CpuTensor { width: input.width, values: out.swap_remove(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_is_clamped_above_only_and_the_other_factor_on_both_sides() {
        assert_eq!(swiglu(100.0, 1.0, 10.0), swiglu(10.0, 1.0, 10.0));
        assert_eq!(swiglu(1.0, -100.0, 10.0), swiglu(1.0, -10.0, 10.0));
        assert_ne!(swiglu(-12.0, 1.0, 10.0), swiglu(-10.0, 1.0, 10.0));
    }

    #[test]
    fn the_bias_decides_the_choice_but_not_the_weight_and_ties_go_to_the_lower_expert() {
        let logits = CpuTensor { width: 4, values: vec![1.0, 2.0, 2.0, 0.0] };
        let rule = RouterRule::Bias([0.0, 0.0, 0.0, 9.0].into());
        let routing = route(&logits, &rule, &[0], 2, 1.5, Sums::Own);
        assert_eq!(routing.experts, [3, 1]);
        let (a, b) = (score(0.0), score(2.0));
        assert!((routing.weights[0] - 1.5 * a / (a + b)).abs() < 1e-6);
        assert!((routing.weights.iter().sum::<f32>() - 1.5).abs() < 1e-6);
    }

    #[test]
    fn hash_routing_follows_the_table_and_weighs_by_the_scores() {
        let logits = CpuTensor { width: 3, values: vec![1.0, 2.0, 3.0, 3.0, 2.0, 1.0] };
        let rule = RouterRule::Hash([0, 1, 2, 0].into());
        let routing = route(&logits, &rule, &[1, 0], 2, 1.0, Sums::Own);
        assert_eq!(routing.experts, [2, 0, 0, 1]);
        assert!(routing.weights[0] > routing.weights[1]);
    }
}
