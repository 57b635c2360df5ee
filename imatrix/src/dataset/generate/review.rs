//! Code with one planted fault, and the review that finds it.

use super::{Random, Task};

/// Language, code with slots, what is wrong, how to put it right.
type Fault = (&'static str, &'static str, &'static str, &'static str);

const FAULTS: &[Fault] = &[
    (
        "python",
        "def {f}({xs}):\n    total = 0\n    for i in range(len({xs}) - 1):\n        total += {xs}[i].{a}\n    return total\n",
        "the loop ends one element early, so the last entry of `{xs}` is never added",
        "iterate over the elements themselves: `for item in {xs}: total += item.{a}`",
    ),
    (
        "python",
        "def {f}({a}, cache={}):\n    if {a} not in cache:\n        cache[{a}] = load_{xs}({a})\n    return cache[{a}]\n",
        "the default argument is created once and shared by all calls, so entries outlive every caller",
        "take `cache=None` and make a new dictionary inside when none is given",
    ),
    (
        "rust",
        "fn {f}({xs}: &[u32]) -> u32 {\n    let mut sum = 0u32;\n    for {a} in {xs} {\n        sum += {a};\n    }\n    sum / {xs}.len() as u32\n}\n",
        "an empty `{xs}` divides by zero, and the sum can overflow for large values",
        "return an `Option<u32>`, answer `None` for an empty slice, and sum in `u64`",
    ),
    (
        "rust",
        "fn {f}(path: &Path) -> String {\n    let {a} = std::fs::read_to_string(path).unwrap();\n    {a}.lines().filter(|{b}| {b}.contains(\"{xs}\")).collect()\n}\n",
        "a missing or unreadable file ends the program, and the caller is never told which file it was",
        "return `std::io::Result<String>` and pass the error on with `?`, adding the path where it is reported",
    ),
    (
        "c",
        "char *{f}(const char *{a}) {\n    char buffer[64];\n    snprintf(buffer, sizeof buffer, \"{xs}-%s\", {a});\n    return buffer;\n}\n",
        "the function returns the address of a local array, which no longer exists after the return",
        "let the caller pass a buffer and its size, or allocate the result and document who frees it",
    ),
    (
        "c",
        "int {f}(const int *{xs}, size_t n) {\n    int best = 0;\n    for (size_t i = 0; i < n; i++)\n        if ({xs}[i] > best)\n            best = {xs}[i];\n    return best;\n}\n",
        "`best` begins at 0, so a list of negative numbers gives 0, which is not among them",
        "begin with `{xs}[0]` and say what an empty list means",
    ),
    (
        "javascript",
        "async function {f}({xs}) {\n  const results = [];\n  {xs}.forEach(async ({a}) => {\n    results.push(await fetch{b}({a}));\n  });\n  return results;\n}\n",
        "`forEach` does not wait for the asynchronous callbacks, so the function returns an empty list",
        "use `return Promise.all({xs}.map(({a}) => fetch{b}({a})))`",
    ),
    (
        "javascript",
        "function {f}({a}) {\n  if ({a}.{b} == '0') {\n    return null;\n  }\n  return {xs}[{a}.{b}] || 'unknown';\n}\n",
        "`==` converts types, so the number 0 and the text '0' are treated alike, and a stored empty text is replaced",
        "compare with `===` and use `??` so that only missing values are replaced",
    ),
    (
        "sql",
        "SELECT {a}.name, COUNT(*) AS {b}\nFROM {a}\nLEFT JOIN {xs} ON {xs}.{a}_id = {a}.id\nWHERE {xs}.state = 'open'\nGROUP BY {a}.name;\n",
        "the condition on `{xs}` in WHERE drops the rows without a match, so the left join behaves like an inner one",
        "move the condition into the ON clause and count `{xs}.id` instead of `*`",
    ),
    (
        "go",
        "func {f}({xs} []string) []func() string {\n\tvar out []func() string\n\tvar {a} string\n\tfor _, {a} = range {xs} {\n\t\tout = append(out, func() string { return {a} })\n\t}\n\treturn out\n}\n",
        "all closures share the variable `{a}` declared outside the loop, so each returns the last element",
        "declare the variable in the loop: `for _, {a} := range {xs}`",
    ),
    (
        "go",
        "func {f}(m map[string]int, {xs} []string) {\n\tfor _, {a} := range {xs} {\n\t\tgo func() { m[{a}]++ }()\n\t}\n}\n",
        "several goroutines write the map at once, and nobody waits for them",
        "guard the map with a mutex, or count in one goroutine, and wait with a `sync.WaitGroup`",
    ),
    (
        "bash",
        "{f}() {\n  for {a} in $(ls {xs}); do\n    rm -rf $DEST/$(basename ${a})\n  done\n}\n",
        "names with spaces are split, and with an empty `DEST` the command deletes below the root folder",
        "loop over `{xs}/*`, quote every expansion and begin with `: \"${DEST:?}\"`",
    ),
];
const VERBS: &[&str] =
    &["collect", "merge", "count", "resolve", "summarize", "find", "load", "scan", "group", "rank"];
const NOUNS: &[&str] = &[
    "orders", "users", "tokens", "events", "records", "sessions", "invoices", "routes", "samples", "tickets",
];
const FIELDS: &[&str] =
    &["amount", "weight", "owner", "status", "score", "region", "price", "level", "group", "label"];
const OTHERS: &[&str] = &["key", "entry", "line", "Item", "count", "Row", "Part", "total", "Page", "mark"];
const QUESTIONS: &[&str] = &[
    "Please review this function before I merge it.",
    "What is wrong with the following code?",
    "Our tests pass, but production misbehaves sometimes. Can you spot the fault?",
    "Act as a careful reviewer. Name the most serious problem and how to fix it.",
    "I wrote this in a hurry; be strict.",
    "Is this safe to ship? Explain briefly.",
    "Find the bug and propose the smallest change that removes it.",
    "A colleague says this is broken, and I cannot see why.",
];
const SYSTEMS: &[&str] = &[
    "",
    "You are a senior engineer who reviews code. Be concrete and short.",
    "You review changes for correctness first, then for safety, then for style.",
    "Answer as a reviewer: one paragraph on the fault, one on the fix.",
];

pub(super) fn task(random: &mut Random) -> Task {
    let (language, code, fault, fix) = FAULTS[random.below(FAULTS.len())];
    let noun = random.pick(NOUNS);
    let function = format!("{}_{noun}", random.pick(VERBS));
    let (field, other) = (random.pick(FIELDS), random.pick(OTHERS));
    let fill = |text: &str| {
        let text = text.replace("{f}", &function).replace("{xs}", noun);
        text.replace("{a}", field).replace("{b}", other)
    };
    let n_callers = random.between(2, 40);
    let (question, system) = (random.pick(QUESTIONS), random.pick(SYSTEMS));
    Task {
        system: system.to_owned(),
        user: format!(
            "{question}\n\n```{language}\n{}```\n\nIt is called from {n_callers} places.",
            fill(code)
        ),
        reasoning: format!(
            "The function `{function}` is written in {language}. I follow the values: {}. With {n_callers} callers it \
             is worth to fix it here. The smallest repair: {}.",
            fill(fault),
            fill(fix)
        ),
        answer: format!(
            "There is one serious fault in `{function}`: {}.\n\nFix: {}. Add a test for this case, because {n_callers} \
             callers rely on it.",
            fill(fault),
            fill(fix)
        ),
        then: None,
    }
}
