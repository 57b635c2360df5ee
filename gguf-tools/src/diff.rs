//! What distinguishes two GGUF files: metadata, tensors, bytes.

use crate::gguf::{Gguf, GgufError, Metadata, PART_PLAN_KEY, TensorInfo};
use crate::inspect::shown;
use crate::progress::{Progress, Step};

/// How two files differ.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Difference {
    /// Keys with other values, or in one file only.
    pub metadata: Vec<KeyDifference>,
    /// Tensors of other type, shape, place or bytes, or in one file only.
    pub tensors: Vec<TensorDifference>,
    /// Tensors that are the same in everything that was compared.
    pub n_equal_tensors: usize,
    /// Whether the tensors of both files stand in the same order.
    pub same_order: bool,
    /// Whether the data of tensors of the same type and shape was compared.
    pub compared_bytes: bool,
}

impl Difference {
    /// Whether nothing differs.
    pub fn is_nothing(&self) -> bool {
        self.metadata.is_empty() && self.tensors.is_empty() && self.same_order
    }
}

/// A key that differs.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct KeyDifference {
    /// The key.
    pub key: String,
    /// Type and value in the first file, abbreviated; `None` if it is not there.
    pub first: Option<String>,
    /// Type and value in the second file.
    pub second: Option<String>,
}

/// A tensor that differs.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TensorDifference {
    /// Its name.
    pub tensor: String,
    /// Type and shape in the first file; `None` if it is not there.
    pub first: Option<String>,
    /// Type and shape in the second file.
    pub second: Option<String>,
    /// Bytes that differ, where type and shape are the same.
    pub differing_bytes: Option<u64>,
    /// The first of them, from the start of the tensor.
    pub first_differing_byte: Option<u64>,
}

/// Bytes that are compared between two looks at the progress.
const STEP_BYTES: usize = 64 << 20;

/// Compares two files or sets. `bytes`: also the data of tensors that have the same type and shape.
///
/// Keys of split sets are left out, so that a set and its merged file are equal.
///
/// # Errors
/// [`GgufError`] for data that is not there, and if the caller asks to stop.
pub fn diff(
    first: &Gguf,
    second: &Gguf,
    bytes: bool,
    progress: &dyn Progress,
) -> Result<Difference, GgufError> {
    let mut difference = Difference {
        metadata: metadata_differences(first.metadata(), second.metadata()),
        same_order: order(first, second) == order(second, first),
        compared_bytes: bytes,
        ..Difference::default()
    };
    let total_bytes = first.tensors().iter().map(|t| t.n_bytes).sum();
    let mut done_bytes = 0;
    for (done_items, tensor) in first.tensors().iter().enumerate() {
        let other = second.tensor(&tensor.name);
        let mut found = TensorDifference {
            tensor: tensor.name.clone(),
            first: Some(kind(tensor)),
            second: other.map(kind),
            differing_bytes: None,
            first_differing_byte: None,
        };
        if let Some(other) = other.filter(|_| bytes && found.first == found.second) {
            let (a, b) = (first.data(tensor)?, second.data(other)?);
            let mut n_differing = 0;
            for (at, (a, b)) in a.chunks(STEP_BYTES).zip(b.chunks(STEP_BYTES)).enumerate() {
                if progress.interrupted() {
                    return Err(GgufError::Interrupted { path: first.shards()[0].path.clone() });
                }
                if a != b {
                    let here = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(0);
                    found.first_differing_byte.get_or_insert((at * STEP_BYTES + here) as u64);
                    n_differing += a.iter().zip(b).filter(|(a, b)| a != b).count() as u64;
                }
                done_bytes += a.len() as u64;
                let item = &tensor.name;
                let total_items = first.tensors().len();
                progress.step(&Step { item, done_bytes, total_bytes, done_items, total_items });
            }
            found.differing_bytes = Some(n_differing);
        }
        if found.first == found.second && found.differing_bytes.unwrap_or(0) == 0 {
            difference.n_equal_tensors += 1;
        } else {
            difference.tensors.push(found);
        }
    }
    let new = second.tensors().iter().filter(|tensor| first.tensor(&tensor.name).is_none());
    difference.tensors.extend(new.map(|tensor| TensorDifference {
        tensor: tensor.name.clone(),
        first: None,
        second: Some(kind(tensor)),
        differing_bytes: None,
        first_differing_byte: None,
    }));
    Ok(difference)
}

fn kind(tensor: &TensorInfo) -> String {
    format!("{} {:?}", tensor.block_type, tensor.shape)
}

/// Names that both files have, in the order of the first.
fn order<'a>(one: &'a Gguf, other: &Gguf) -> Vec<&'a str> {
    one.tensors().iter().map(|t| t.name.as_str()).filter(|name| other.tensor(name).is_some()).collect()
}

fn metadata_differences(first: &Metadata, second: &Metadata) -> Vec<KeyDifference> {
    let mut keys: Vec<&str> = first.iter().map(|(key, _)| key).collect();
    keys.extend(second.iter().map(|(key, _)| key).filter(|key| first.get(key).is_none()));
    keys.into_iter()
        .filter(|key| !key.starts_with("split.") && *key != PART_PLAN_KEY)
        .filter_map(|key| {
            let (a, b) = (first.get(key), second.get(key));
            // As text, since NaN is not equal to itself.
            let differ = format!("{a:?}") != format!("{b:?}");
            let text =
                |value: Option<&crate::gguf::Value>| value.map(|v| format!("{} {}", v.type_name(), shown(v)));
            differ.then(|| KeyDifference { key: key.to_owned(), first: text(a), second: text(b) })
        })
        .collect()
}
