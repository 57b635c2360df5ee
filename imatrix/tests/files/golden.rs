//! Against statistics made by independent code.

use std::path::Path;

use gguf_tools::importance::{Found, ImportanceSource, Matrix};
use imatrix::{Imatrix, StackedTensor, Target};
use test_vectors::{fixtures, golden_arrays};

use crate::common::Scratch;

/// Compares every matrix of the file with sum / count; returns the worst relative difference and the unseen experts.
fn worst_difference(imatrix: &Imatrix, folder: &Path) -> (f64, usize) {
    let arrays = golden_arrays(&folder.join("imatrix.safetensors"));
    let counts = arrays["count"].i32();
    let [n_layers, n_experts] = arrays["count"].shape[..] else { panic!("the count has two dimensions") };
    let (mut worst, mut n_unseen) = (0.0_f64, 0);
    for (kind, sums) in [("gate", "gate_up_sum2"), ("up", "gate_up_sum2"), ("down", "down_sum2_weighted")] {
        let n_columns = arrays[sums].shape[2];
        let sums = arrays[sums].f32();
        for (index, sums) in sums.chunks_exact(n_columns).enumerate() {
            let tensor = format!("blk.{}.ffn_{kind}_exps.weight", index / n_experts);
            let expert_index = index % n_experts;
            let found = imatrix.importance(&Matrix {
                tensor: &tensor,
                source: None,
                expert_index,
                n_experts,
                n_columns,
            });
            let count = f64::from(counts[index]);
            match found {
                Found::Values(values) => {
                    for (&value, &sum) in values.iter().zip(sums) {
                        let expected = f64::from(sum) / count;
                        worst = worst.max((f64::from(value) - expected).abs() / expected.max(1e-30));
                    }
                }
                Found::Unseen => {
                    assert_eq!(count, 0.0, "{tensor} expert {expert_index}");
                    n_unseen += 1;
                }
                other => panic!("{tensor} expert {expert_index}: {other:?}"),
            }
        }
    }
    assert_eq!(n_unseen, 3 * counts.iter().filter(|&&count| count == 0).count());
    assert_eq!(n_layers * 3, imatrix.entries().len());
    (worst, n_unseen)
}

#[test]
fn golden_means_and_unseen_experts_are_found_before_and_after_conversion() {
    let Some(fixtures) = fixtures("golden imatrix") else { return };
    let scratch = Scratch::new();
    for variant in ["tiny-native", "tiny-bf16"] {
        let folder = fixtures.join("golden").join(variant);
        let ds4 = Imatrix::open(folder.join("imatrix_ds4.dat")).unwrap();
        assert!(ds4.is_packed_by_expert());
        assert_eq!(ds4.datasets(), ["mid150+long620"]);
        let (worst, n_unseen) = worst_difference(&ds4, &folder);
        assert!(worst < 1e-6, "{variant}: {worst}");

        let path = scratch.path(&format!("{variant}.gguf"));
        ds4.write(&path, Target::Gguf, false).unwrap();
        let gguf = Imatrix::open(path).unwrap();
        assert_eq!(worst_difference(&gguf, &folder), (worst, n_unseen));

        let tensors: Vec<_> = ds4
            .entries()
            .iter()
            .map(|entry| StackedTensor {
                tensor: entry.name(),
                sources: &[],
                n_experts: entry.n_values() / 256,
                n_columns: 256,
            })
            .collect();
        let totals = ds4.coverage(&tensors).totals;
        assert_eq!((totals.n_unseen, totals.n_unusable, totals.n_without_entry), (n_unseen, 0, 0));
    }
}
