//! What the compiler says about what it made.

use std::collections::BTreeMap;

/// Bytes of registers that each function stores to and loads from local memory, from the report of `ptxas -v`:
///
/// ```text
/// ptxas info    : Function properties for a_kernel
/// ptxas         .     56 bytes stack frame, 36 bytes spill stores, 36 bytes spill loads
/// ```
pub(crate) fn spills(log: &str) -> BTreeMap<String, u32> {
    let mut found = BTreeMap::new();
    let mut function = None;
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            function = Some(name.trim().to_owned());
        } else if line.contains("bytes spill stores")
            && let Some(name) = function.take()
        {
            let spilled = |what: &str| -> u32 {
                let before = line.split(what).next().unwrap_or_default();
                before.split_whitespace().next_back().and_then(|n| n.parse().ok()).unwrap_or_default()
            };
            found.insert(name, spilled(" bytes spill stores").max(spilled(" bytes spill loads")));
        }
    }
    found
}

/// What the compiler warns of that costs speed: products on tensor cores (`wgmma`) of which each waits for the one before. It
/// makes them so wherever it sees an operand or a sum written between two of them, or a branch it cannot look behind.
pub(crate) fn serialized(log: &str) -> Vec<&str> {
    log.lines().filter(|line| line.contains("wgmma") && line.contains("serialized")).map(str::trim).collect()
}

/// Version of the compiler, from a comment of its PTX: `// Cuda compilation tools, release 13.0, V13.0.88`.
pub(crate) fn compiler(ptx: &str) -> Option<&str> {
    let line = ptx.lines().find(|line| line.contains("Cuda compilation tools"))?;
    line.rsplit_once(", V").map(|(_, version)| version.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_are_read() {
        let log = "ptxas info    : 56 bytes gmem\n\
                   ptxas info    : Compiling entry function 'first' for 'sm_120'\n\
                   ptxas info    : Function properties for first\n\
                   ptxas         .     56 bytes stack frame, 36 bytes spill stores, 40 bytes spill loads\n\
                   ptxas info    : Used 128 registers, used 0 barriers, 56 bytes cumulative stack size\n\
                   ptxas info    : Function properties for second\n\
                   ptxas         .     32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n";
        let expected = [("first".to_owned(), 40), ("second".to_owned(), 0)];
        assert_eq!(spills(log), BTreeMap::from(expected));
    }

    #[test]
    fn products_that_wait_for_each_other_are_found() {
        let log = "ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
                   non wgmma instructions defining input registers of a wgmma in the function 'down_Q4_K'\n\
                   ptxas info    : Function properties for down_Q4_K\n";
        assert_eq!(serialized(log).len(), 1);
        assert!(serialized(log)[0].ends_with("in the function 'down_Q4_K'"));
        assert!(serialized("ptxas info    : Used 128 registers\n").is_empty());
    }

    #[test]
    fn the_compiler_names_itself() {
        let ptx = "//\n// Cuda compilation tools, release 13.0, V13.0.88\n// Based on NVVM 20.0.0\n";
        assert_eq!(compiler(ptx), Some("13.0.88"));
        assert_eq!(compiler(".version 9.0"), None);
    }
}
