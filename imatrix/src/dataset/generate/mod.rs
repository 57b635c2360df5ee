//! Conversations of our own making: tasks put together from word lists, with answers that are right by construction.
//!
//! Answers matter as much as questions: a model spends most of its time on what it writes itself.

mod extraction;
mod long_context;
mod reasoning;
mod review;
mod tools;
mod translation;
mod words;

use rand_core::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use runner::chat::{Message, render, to_text};
use sha2::{Digest, Sha256};

/// The kinds that can be generated.
pub const GENERATED: [&str; 6] =
    ["code_review", "extraction", "long_context", "reasoning", "tool_calls", "translation"];

/// A task and its answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Task {
    system: String,
    user: String,
    /// What comes before the answer, if thinking is on.
    reasoning: String,
    answer: String,
    /// A second turn: what the user or a tool says, and the answer.
    then: Option<(String, String)>,
}

/// Text number `index` of a generated kind, rendered with and without thinking in turn; `None` for an unknown kind.
pub(super) fn text(kind: &str, seed: u64, index: u64) -> Option<String> {
    let random = &mut Random::new(seed, kind, index);
    let task = match kind {
        "code_review" => review::task(random),
        "extraction" => extraction::task(random),
        "long_context" => long_context::task(random),
        "reasoning" => reasoning::task(random),
        "tool_calls" => tools::task(random),
        "translation" => translation::task(random),
        _ => return None,
    };
    let mut messages = vec![
        Message::System(&task.system),
        Message::User(&task.user),
        Message::Assistant { reasoning: &task.reasoning, content: &task.answer },
    ];
    if let Some((user, answer)) = &task.then {
        messages.extend([Message::User(user), Message::Assistant { reasoning: "", content: answer }]);
    }
    // A second turn drops the reasoning before it, so such a conversation is one without thinking.
    let thinking = index.is_multiple_of(2) && task.then.is_none();
    Some(to_text(&render(&messages, thinking, false)))
}

/// Random numbers that are the same everywhere, forever.
pub(super) struct Random(Pcg64);

impl Random {
    /// Numbers of their own for each `seed`, `purpose` and `index`.
    pub(super) fn new(seed: u64, purpose: &str, index: u64) -> Self {
        let digest = Sha256::digest(format!("{seed}/{purpose}/{index}"));
        Self(Pcg64::seed_from_u64(u64::from_le_bytes(digest[..8].try_into().expect("eight bytes"))))
    }

    /// A number below `n`, which is above 0.
    fn below(&mut self, n: usize) -> usize {
        (self.0.next_u64() % n as u64) as usize
    }

    /// A number from `low` to `high`, both included.
    fn between(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low + 1) as usize) as i64
    }

    fn pick<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }

    pub(super) fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn hundreds_of_texts_of_every_kind_differ_and_are_made_again_from_the_seed() {
        for kind in GENERATED {
            let texts: Vec<_> = (0..300).map(|index| text(kind, 7, index).unwrap()).collect();
            let distinct: HashSet<_> = texts.iter().collect();
            assert!(distinct.len() >= 295, "{kind}: {} of 300 differ", distinct.len());
            assert_eq!(texts[41], text(kind, 7, 41).unwrap());
            assert_ne!(texts[0], text(kind, 8, 0).unwrap());
            let with = texts.iter().filter(|text| text.contains("<think>")).count();
            assert!((50..=200).contains(&with), "{kind}: {with} with thinking");
            for text in texts {
                assert!(
                    text.starts_with("<｜begin▁of▁sentence｜>") && text.ends_with("<｜end▁of▁sentence｜>")
                );
                assert!(!text.contains('{') || kind != "translation", "a slot was left: {text}");
            }
        }
    }

    #[test]
    fn tool_calls_are_in_the_models_own_syntax() {
        let text = text("tool_calls", 1, 1).unwrap();
        for part in ["<｜DSML｜tool_calls>", "<｜DSML｜invoke name=\"", "</｜DSML｜parameter>", "## Tools"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
