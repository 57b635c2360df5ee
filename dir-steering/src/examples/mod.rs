//! Sets of prompt pairs that come with the program, one prompt a line, line `i` of both files a pair.

/// Prompts that ask for the same in two ways.
#[derive(Debug, Clone, Copy)]
pub struct Example {
    /// Name.
    pub name: &'static str,
    /// What positive means: the direction points to these.
    pub good: &'static str,
    /// What it is told apart from.
    pub bad: &'static str,
}

/// The sets: 100 pairs each.
pub const EXAMPLES: [Example; 2] = [
    Example { name: "terse-verbose", good: include_str!("terse.txt"), bad: include_str!("verbose.txt") },
    Example { name: "formal-casual", good: include_str!("formal.txt"), bad: include_str!("casual.txt") },
];

impl Example {
    /// The set of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        EXAMPLES.into_iter().find(|example| example.name == name)
    }
}

/// Prompts of a text, one a line; empty lines and lines that begin with `#` are none.
pub fn prompts(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{EXAMPLES, prompts};

    #[test]
    fn each_set_has_a_hundred_different_pairs() {
        for example in EXAMPLES {
            let (good, bad) = (prompts(example.good), prompts(example.bad));
            assert_eq!((good.len(), bad.len()), (100, 100), "{}", example.name);
            let all: HashSet<_> = good.iter().chain(&bad).collect();
            assert_eq!(all.len(), 200, "{} repeats a prompt", example.name);
        }
    }
}
