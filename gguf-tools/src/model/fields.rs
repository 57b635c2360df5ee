//! Reads the fields of a configuration and collects every problem instead of stopping at the first.

use serde_json::{Map, Value};

use super::{FieldProblem, ModelError};

/// Largest value of any width or count: sizes are products of two or three of them and must fit 64 bits.
const MAX_COUNT: u64 = u32::MAX as u64;

/// A JSON object that is being read. A field that cannot be used yields a harmless value and a problem.
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    prefix: &'static str,
    problems: Vec<FieldProblem>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(object: &'a Map<String, Value>) -> Self {
        Self { object, prefix: "", problems: Vec::new() }
    }

    /// Records a problem with `field`.
    pub(super) fn problem(&mut self, field: &str, problem: impl Into<String>) {
        self.problems
            .push(FieldProblem { field: format!("{}{field}", self.prefix), problem: problem.into() });
    }

    /// Whether a problem with `field` was recorded.
    pub(super) fn has_problem(&self, field: &str) -> bool {
        self.problems.iter().any(|problem| problem.field == field)
    }

    /// The problems as an error, if there are any.
    pub(super) fn finish(self) -> Result<(), ModelError> {
        if self.problems.is_empty() { Ok(()) } else { Err(ModelError::Fields { problems: self.problems }) }
    }

    /// The field, with JSON's null as absent.
    pub(super) fn optional(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// Names of all fields.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.object.keys().map(String::as_str)
    }

    fn required(&mut self, field: &str) -> Option<&'a Value> {
        let value = self.optional(field);
        if value.is_none() {
            self.problem(field, "missing; it is required and has no default");
        }
        value
    }

    /// A whole number of at least `least`.
    pub(super) fn count(&mut self, field: &str, least: u64) -> u64 {
        let Some(value) = self.required(field) else { return least.max(1) };
        match value.as_u64() {
            Some(n) if (least..=MAX_COUNT).contains(&n) => n,
            _ => {
                self.problem(
                    field,
                    format!("found {value}, expected a whole number from {least} to {MAX_COUNT}"),
                );
                least.max(1)
            }
        }
    }

    /// A whole number of at least `least`, or `default` if the field is absent.
    pub(super) fn count_or(&mut self, field: &str, least: u64, default: u64) -> u64 {
        if self.optional(field).is_some() { self.count(field, least) } else { default }
    }

    /// A finite positive number.
    pub(super) fn positive(&mut self, field: &str) -> f32 {
        let Some(value) = self.required(field) else { return 1.0 };
        match value.as_f64().map(|x| x as f32) {
            Some(x) if x.is_finite() && x > 0.0 => x,
            _ => {
                self.problem(field, format!("found {value}, expected a positive number"));
                1.0
            }
        }
    }

    /// A list of whole numbers.
    pub(super) fn counts(&mut self, field: &str) -> Vec<u32> {
        let Some(value) = self.required(field) else { return Vec::new() };
        let numbers = value.as_array().and_then(|list| {
            list.iter().map(|n| n.as_u64().and_then(|n| u32::try_from(n).ok())).collect::<Option<Vec<_>>>()
        });
        numbers.unwrap_or_else(|| {
            self.problem(field, "expected a list of whole numbers");
            Vec::new()
        })
    }

    /// Demands that the field holds exactly `wanted`.
    pub(super) fn exactly(&mut self, field: &str, wanted: &Value) {
        if let Some(found) = self.required(field)
            && found != wanted
        {
            self.problem(field, format!("found {found}, only {wanted} is supported"));
        }
    }

    /// Demands that the field is absent or holds exactly `wanted`.
    pub(super) fn absent_or(&mut self, field: &str, wanted: &Value) {
        if self.optional(field).is_some() {
            self.exactly(field, wanted);
        }
    }

    /// Reads a nested object; its problems are named `field.inner`.
    pub(super) fn nested<T>(
        &mut self,
        field: &'static str,
        prefix: &'static str,
        read: impl FnOnce(&mut Fields<'a>) -> T,
    ) -> Option<T> {
        let value = self.required(field)?;
        let Some(object) = value.as_object() else {
            self.problem(field, format!("found {value}, expected an object"));
            return None;
        };
        let mut inner = Fields { object, prefix, problems: Vec::new() };
        let result = read(&mut inner);
        self.problems.append(&mut inner.problems);
        Some(result)
    }
}
