//! Recipes: which type each tensor becomes. Built-in ones by name, own ones as TOML.

use std::collections::BTreeMap;

use regex::Regex;
use serde::{Deserialize, Serialize};

use super::PlanError;
use crate::block::{BlockType, Objective, UnknownBlockType};
use crate::gguf::Gguf;
use crate::model::{Family, TensorSpec};

/// Which type every tensor of a model becomes, and how it is quantized.
///
/// The last rule that matches a tensor decides; without one, the type of its family.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// Name of the recipe, recorded in the file.
    pub name: String,
    /// Alignment of every tensor in bytes; 4096 puts every expert slice of Flash on a page of its own.
    #[serde(default = "default_alignment")]
    pub alignment: u32,
    /// Which weighted error the quantizers minimise: `importance`, `ggml` or `flat`.
    #[serde(default = "default_objective")]
    pub objective: String,
    /// Factor on the stored scales that undoes the shrinkage of the fit; absent: each format's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_gain: Option<f32>,
    /// Use a 32-wide type where a row is no multiple of 256 values; `false` refuses such a plan.
    #[serde(default = "yes")]
    pub fallback: bool,
    /// Type of each family of tensors.
    pub types: BTreeMap<String, String>,
    /// Exceptions, in order; the last one that matches a tensor decides.
    #[serde(default, rename = "rule", skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
}

/// One exception to the types of the families.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Regular expression that the GGUF name must contain a match of; absent: any name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// Families the rule is for; absent: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub families: Vec<String>,
    /// The rule is for the last so many layers only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_layers: Option<u32>,
    /// Inclusive layer range `FIRST:LAST` the rule is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<String>,
    /// The type those tensors become.
    #[serde(rename = "type")]
    pub target: String,
}

/// Keys of a recipe in TOML.
const KEYS: [&str; 7] = ["name", "alignment", "objective", "scale_gain", "fallback", "types", "rule"];
/// Keys of a rule in TOML.
const RULE_KEYS: [&str; 5] = ["tensor", "families", "last_layers", "layers", "type"];

fn default_alignment() -> u32 {
    4096
}

fn default_objective() -> String {
    "importance".to_owned()
}

fn yes() -> bool {
    true
}

/// The built-in recipes with one line on what each is for.
pub const BUILT_IN: [(&str, &str); 4] = [
    ("q2", "IQ2_XXS gate/up and Q2_K down experts, Q8_0 attention, F16 small matrices: 80.8 GiB for Flash"),
    ("q2-q4", "as q2, with the experts of the last six layers in Q4_K"),
    ("q4", "Q4_K experts, the rest as q2"),
    ("mxfp4", "experts kept exactly as released (MXFP4), the rest as q2"),
];

impl Recipe {
    /// A built-in recipe by name; `None` if there is none of that name.
    pub fn built_in(name: &str) -> Option<Self> {
        let [gate_up, down] = match name {
            "q2" | "q2-q4" => [BlockType::Iq2Xxs, BlockType::Q2K],
            "q4" => [BlockType::Q4K; 2],
            "mxfp4" => [BlockType::Mxfp4; 2],
            _ => return None,
        };
        let types = Family::all().map(|family| {
            let target = match family {
                Family::RoutedGate | Family::RoutedUp => gate_up,
                Family::RoutedDown => down,
                Family::SharedExpert | Family::Attention | Family::Output => BlockType::Q8_0,
                Family::Norm => BlockType::F32,
                Family::RoutingTable => BlockType::I32,
                Family::Embedding
                | Family::Router
                | Family::Compressor
                | Family::Indexer
                | Family::HyperConnection => BlockType::F16,
            };
            (family.name().to_owned(), target.name().to_owned())
        });
        let mut rules = Vec::new();
        if name == "q2-q4" {
            rules.push(Rule {
                tensor: None,
                families: Family::ROUTED.iter().map(|f| f.name().to_owned()).collect(),
                last_layers: Some(6),
                layers: None,
                target: BlockType::Q4K.name().to_owned(),
            });
        }
        Some(Self {
            name: name.to_owned(),
            alignment: default_alignment(),
            objective: default_objective(),
            scale_gain: None,
            fallback: true,
            types: types.collect(),
            rules,
        })
    }

    /// Reads a recipe from TOML text.
    ///
    /// # Errors
    /// [`PlanError::Recipe`] with every problem found.
    pub fn from_toml(text: &str) -> Result<Self, PlanError> {
        // A text that is no TOML at all is reported once, by the second reading, which knows lines.
        let mut problems = text.parse().map_or_else(|_| Vec::new(), |table| unknown_keys(&table));
        match toml::from_str::<Self>(text) {
            Err(e) => problems.push(e.to_string().trim_end().to_owned()),
            Ok(recipe) => match recipe.compile(1) {
                Err(more) => problems.extend(more),
                Ok(_) if problems.is_empty() => return Ok(recipe),
                Ok(_) => {}
            },
        }
        Err(PlanError::Recipe { problems })
    }

    /// The recipe that gives every tensor the type it has in a file, with the settings the file records.
    ///
    /// # Errors
    /// [`PlanError::Recipe`] if the recorded recipe is damaged.
    pub fn of_file(gguf: &Gguf) -> Result<Self, PlanError> {
        let recorded = gguf.metadata().get("ggsmith.recipe").and_then(|v| v.as_str());
        let mut recipe = match recorded {
            Some(text) => Self::from_toml(text)?,
            None => Self::built_in("q2").expect("a built-in recipe"),
        };
        recipe.rules.extend(gguf.tensors().iter().map(|tensor| {
            Rule::for_tensors(&format!("^{}$", regex::escape(&tensor.name)), tensor.block_type)
        }));
        Ok(recipe)
    }

    /// The recipe as TOML text, as [`Recipe::from_toml`] reads it.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a recipe holds only strings, numbers and tables")
    }

    /// The objective as the quantizers take it.
    pub(crate) fn objective(&self) -> Option<Objective> {
        Objective::NAMES.iter().find(|(name, _)| *name == self.objective).map(|(_, o)| *o)
    }

    /// Checks every name, pattern and range, for a model of `n_layers` layers.
    ///
    /// # Errors
    /// Every problem found.
    pub(super) fn compile(&self, n_layers: u32) -> Result<Compiled, Vec<String>> {
        let mut problems = Vec::new();
        let mut types = BTreeMap::new();
        for (family, target) in &self.types {
            let known = Family::from_name(family);
            if known.is_none() {
                problems.push(format!("[types]: {}", unknown_family(family)));
            }
            let target = parse_type(target, &format!("[types] {family}"), &mut problems);
            if let (Some(target), Some(family)) = (target, known) {
                if let Some(fixed) = fixed_type(family).filter(|fixed| *fixed != target) {
                    problems
                        .push(format!("[types] {family}: is always {fixed}, which every runtime demands"));
                }
                types.insert(family, target);
            }
        }
        for family in Family::all() {
            if !self.types.contains_key(family.name()) {
                problems.push(format!("[types]: no type for `{}`", family.name()));
            }
        }
        if self.objective().is_none() {
            let names: Vec<_> = Objective::NAMES.iter().map(|(name, _)| *name).collect();
            problems.push(format!("objective `{}`: expected one of {}", self.objective, names.join(", ")));
        }
        if self.scale_gain.is_some_and(|gain| !(0.5..=2.0).contains(&gain)) {
            problems.push("scale_gain: expected a factor from 0.5 to 2".to_owned());
        }
        let rules = self
            .rules
            .iter()
            .enumerate()
            .filter_map(|(i, rule)| rule.compile(i + 1, n_layers, &mut problems))
            .collect();
        if problems.is_empty() { Ok(Compiled { types, rules }) } else { Err(problems) }
    }
}

/// One line for every key that no recipe has: most likely a mistyped one.
fn unknown_keys(recipe: &toml::Table) -> Vec<String> {
    let unknown = |place: &str, table: &toml::Table, known: &[&str]| -> Vec<String> {
        let keys = table.keys().filter(|key| !known.contains(&key.as_str()));
        keys.map(|key| format!("{place}no key is called `{key}`; known keys: {}", known.join(", "))).collect()
    };
    let mut problems = unknown("", recipe, &KEYS);
    let rules = recipe.get("rule").and_then(toml::Value::as_array).into_iter().flatten();
    for (i, rule) in rules.enumerate() {
        let table = rule.as_table();
        problems
            .extend(table.map_or_else(Vec::new, |t| unknown(&format!("rule {}: ", i + 1), t, &RULE_KEYS)));
    }
    problems
}

/// The type that no recipe changes, because every runtime demands it.
pub(super) fn fixed_type(family: Family) -> Option<BlockType> {
    match family {
        Family::Norm => Some(BlockType::F32),
        Family::RoutingTable => Some(BlockType::I32),
        _ => None,
    }
}

fn unknown_family(name: &str) -> String {
    let known: Vec<_> = Family::all().map(Family::name).collect();
    format!("no family is called `{name}`; known families: {}", known.join(", "))
}

fn parse_type(name: &str, place: &str, problems: &mut Vec<String>) -> Option<BlockType> {
    name.parse().map_err(|e: UnknownBlockType| problems.push(format!("{place}: {e}"))).ok()
}

impl Rule {
    /// A rule for every tensor whose name contains a match of `pattern`.
    pub fn for_tensors(pattern: &str, target: BlockType) -> Self {
        Self {
            tensor: Some(pattern.to_owned()),
            families: Vec::new(),
            last_layers: None,
            layers: None,
            target: target.name().to_owned(),
        }
    }

    fn compile(&self, number: usize, n_layers: u32, problems: &mut Vec<String>) -> Option<CompiledRule> {
        let before = problems.len();
        let pattern = self.tensor.as_deref().and_then(|text| {
            Regex::new(text)
                .map_err(|e| problems.push(format!("rule {number}: tensor pattern `{text}`: {e}")))
                .ok()
        });
        let families: Vec<Family> = self
            .families
            .iter()
            .filter_map(|name| {
                let family = Family::from_name(name);
                if family.is_none() {
                    problems.push(format!("rule {number}: {}", unknown_family(name)));
                }
                family
            })
            .collect();
        let layers = match (&self.layers, self.last_layers) {
            (Some(_), Some(_)) => {
                problems.push(format!("rule {number}: give `layers` or `last_layers`, not both"));
                None
            }
            (Some(text), None) => {
                let range = parse_layers(text);
                if range.is_none() {
                    problems.push(format!("rule {number}: layers `{text}`: expected FIRST:LAST, as 37:42"));
                }
                range
            }
            (None, Some(last)) => Some((n_layers.saturating_sub(last), u32::MAX)),
            (None, None) => None,
        };
        let target = parse_type(&self.target, &format!("rule {number}"), problems)?;
        (problems.len() == before).then_some(CompiledRule { pattern, families, layers, target })
    }
}

/// `FIRST:LAST`, both included.
fn parse_layers(text: &str) -> Option<(u32, u32)> {
    let (first, last) = text.split_once(':')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (first <= last).then_some((first, last))
}

/// A checked recipe.
#[derive(Debug)]
pub(super) struct Compiled {
    types: BTreeMap<Family, BlockType>,
    rules: Vec<CompiledRule>,
}

#[derive(Debug)]
struct CompiledRule {
    pattern: Option<Regex>,
    families: Vec<Family>,
    layers: Option<(u32, u32)>,
    target: BlockType,
}

impl CompiledRule {
    fn matches(&self, tensor: &TensorSpec) -> bool {
        let in_layers = |(first, last): (u32, u32)| tensor.layer.is_some_and(|l| (first..=last).contains(&l));
        self.pattern.as_ref().is_none_or(|p| p.is_match(&tensor.gguf_name))
            && (self.families.is_empty() || self.families.contains(&tensor.family))
            && self.layers.is_none_or(in_layers)
    }
}

impl Compiled {
    /// The type that the recipe gives to a tensor.
    pub(super) fn target(&self, tensor: &TensorSpec) -> BlockType {
        let rule = || self.rules.iter().rev().find(|rule| rule.matches(tensor));
        fixed_type(tensor.family)
            .unwrap_or_else(|| rule().map_or(self.types[&tensor.family], |rule| rule.target))
    }

    /// Numbers (from 1) of the rules that match no tensor whose type a recipe decides: most likely a mistyped pattern.
    pub(super) fn idle_rules(&self, tensors: &[TensorSpec]) -> Vec<usize> {
        let idle = |rule: &CompiledRule| {
            let obeys = |t: &TensorSpec| fixed_type(t.family).is_none_or(|fixed| fixed == rule.target);
            !tensors.iter().any(|t| rule.matches(t) && obeys(t))
        };
        self.rules.iter().enumerate().filter(|(_, rule)| idle(rule)).map(|(i, _)| i + 1).collect()
    }
}
