//! Coverage of a plan and what is decided from it.

use imatrix::{Finding, ImatrixError, MissingPolicy, StackedTensor};

use crate::common::{DOWN, GATE, gguf, legacy, message, open};

const QUERY: &str = "blk.0.attn_q_a.weight";

fn stack(tensor: &str, n_experts: usize, n_columns: usize) -> StackedTensor<'_> {
    StackedTensor { tensor, sources: &[], n_experts, n_columns }
}

#[test]
fn experts_are_counted_and_listed_as_seen_unseen_and_unusable() {
    let sums = [1.0, 1.0, 0.0, 0.0, 6.0, 6.0, f32::NAN, 1.0, 0.0, 0.0];
    let bytes =
        gguf(&[(GATE, [5, 2], &sums, &[7.0, 0.0, 3.0, 4.0, 0.0]), ("other", [1, 2], &[1.0; 2], &[1.0])]);
    let imatrix = open(&bytes).unwrap();
    let coverage = imatrix.coverage(&[stack(GATE, 5, 2), stack(QUERY, 1, 4)]);
    let gate = &coverage.tensors[0];
    assert!(gate.matched);
    assert_eq!((gate.n_seen, gate.share_seen), (2, 0.4));
    assert_eq!(gate.unseen, [1, 4]);
    assert_eq!(gate.unusable.len(), 1);
    assert_eq!(gate.unusable[0].0, 3);
    let counts = gate.counts.unwrap();
    assert_eq!((counts.min, counts.median, counts.max), (0.0, 3.0, 7.0));
    assert!(!coverage.tensors[1].matched);
    assert_eq!(coverage.unmatched_entries, ["other"]);
    let totals = coverage.totals;
    assert_eq!((totals.n_tensors, totals.n_tensors_matched, totals.n_matrices), (2, 1, 6));
    assert_eq!((totals.n_seen, totals.n_unseen, totals.n_unusable, totals.n_without_entry), (2, 2, 1, 1));
    let json = serde_json::to_value(&coverage).unwrap();
    assert_eq!(json["tensors"][0]["unseen"], serde_json::json!([1, 4]));
    assert_eq!(json["format"], "gguf");
}

#[test]
fn what_is_missing_is_an_error_a_warning_or_in_strict_mode_an_error_again() {
    let bytes = legacy(&[(GATE, 1, &[1.0, 1.0, 2.0, 3.0]), (DOWN, 1, &[2.0, 2.5, 3.0, 3.5])], None, None);
    let imatrix = open(&bytes).unwrap();
    let tensors = [stack(GATE, 2, 2), stack(DOWN, 2, 2), stack(QUERY, 1, 4)];
    let coverage = imatrix.coverage(&tensors);
    let findings = coverage.judge(MissingPolicy::Fallback, false).unwrap();
    assert_eq!(
        findings,
        [
            Finding::Unseen { tensor: GATE.to_owned(), experts: vec![0], n_experts: 2 },
            Finding::NoEntry { tensor: QUERY.to_owned() },
        ]
    );
    assert_eq!(
        findings[0].to_string(),
        format!("`{GATE}`: 1 of 2 experts (0) never reached by the calibration")
    );
    for (policy, strict) in
        [(MissingPolicy::Error, false), (MissingPolicy::Fallback, true), (MissingPolicy::Error, true)]
    {
        let error = coverage.judge(policy, strict).unwrap_err();
        let text = message(&error);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].ends_with("does not cover what is to be quantized"), "{text}");
        assert_eq!(lines[1..3], findings.iter().map(|f| format!("  {f}")).collect::<Vec<_>>());
        assert!(lines[3].contains("--imatrix-missing fallback"), "{text}");
        assert_eq!(lines.len(), 4, "the tensor that is covered is not listed");
    }
    let complete = imatrix.coverage(&tensors[1..2]);
    assert_eq!(complete.judge(MissingPolicy::Error, true).unwrap(), []);
    assert_eq!(complete.unmatched_entries, [GATE]);
}

#[test]
fn a_wrong_number_of_experts_is_unusable_as_a_whole() {
    let imatrix = open(&legacy(&[(GATE, 1, &[2.0; 6])], None, None)).unwrap();
    let coverage = imatrix.coverage(&[stack(GATE, 4, 2)]);
    let text = message(&coverage.judge(MissingPolicy::Error, false).unwrap_err());
    assert!(text.contains("4 of 4 experts") && text.contains("6 values, expected 4 x 2"), "{text}");
}

#[test]
fn a_file_of_another_model_is_refused_under_every_policy() {
    let imatrix = open(&legacy(&[("model.layers.0.w", 1, &[2.0; 4])], None, None)).unwrap();
    let coverage = imatrix.coverage(&[stack(QUERY, 1, 4)]);
    let error = coverage.judge(MissingPolicy::Fallback, false).unwrap_err();
    assert!(matches!(error, ImatrixError::NothingMatches { n_tensors: 1, .. }), "{error}");
    assert!(error.to_string().contains("model.layers.0.w"));
    assert_eq!(imatrix.coverage(&[]).judge(MissingPolicy::Error, true).unwrap(), []);
}

#[test]
fn experts_without_an_entry_of_their_own_are_listed() {
    let name = format!("{GATE}.expert.1");
    let imatrix = open(&legacy(&[(&name, 1, &[2.0, 3.0])], None, None)).unwrap();
    let coverage = imatrix.coverage(&[stack(GATE, 3, 2)]);
    assert_eq!(coverage.tensors[0].without_entry, [0, 2]);
    let finding = &coverage.findings()[0];
    assert_eq!(finding.to_string(), format!("`{GATE}`: no entry for 2 of 3 experts (0, 2)"));
    assert_eq!(coverage.unmatched_entries, <[&str; 0]>::default());
}
