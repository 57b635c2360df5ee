//! Split sets by llama.cpp's convention: `PREFIX-00001-of-00003.gguf`, with three `split.*` keys in every shard.

use std::path::{Path, PathBuf};

use super::Metadata;

/// Which shard of how many a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct SplitPlace {
    /// Number of the shard, from 0 (file names count from 1).
    pub shard_index: usize,
    /// Shards of the set.
    pub n_shards: usize,
    /// Tensors of the whole set.
    pub n_tensors: u64,
}

impl SplitPlace {
    /// The place that the metadata states; `None` for a file that is whole.
    ///
    /// # Errors
    /// What is wrong with the keys.
    pub(crate) fn of(metadata: &Metadata) -> Result<Option<Self>, String> {
        let number =
            |key: &str| metadata.get(key).map(|v| v.as_u64().ok_or_else(|| not_a_count(key, v.type_name())));
        let Some(count) = number("split.count").transpose()? else { return Ok(None) };
        if count <= 1 {
            return Ok(None);
        }
        let index = number("split.no")
            .transpose()?
            .ok_or("key `split.no` is missing although `split.count` is there")?;
        if index >= count {
            return Err(format!("key `split.no`: found {index}, expected less than `split.count` ({count})"));
        }
        if count > 99_999 {
            return Err(format!("key `split.count`: found {count}, expected at most 99999"));
        }
        let n_tensors =
            number("split.tensors.count").transpose()?.ok_or("key `split.tensors.count` is missing")?;
        Ok(Some(Self { shard_index: index as usize, n_shards: count as usize, n_tensors }))
    }
}

fn not_a_count(key: &str, found: &str) -> String {
    format!("key `{key}`: found a value of type {found}, expected a count")
}

/// The names of all shards of the set that `path` is shard `place` of.
///
/// # Errors
/// If the name does not follow the convention.
pub(crate) fn shard_paths(path: &Path, place: SplitPlace) -> Result<Vec<PathBuf>, String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let ending = |index: usize| format!("-{:05}-of-{:05}.gguf", index + 1, place.n_shards);
    let Some(prefix) = name.strip_suffix(&ending(place.shard_index)) else {
        return Err(format!(
            "this is shard {} of {} by its metadata, so its name should end in `{}`, as its siblings' do; rename it",
            place.shard_index + 1,
            place.n_shards,
            ending(place.shard_index)
        ));
    };
    Ok((0..place.n_shards).map(|index| path.with_file_name(format!("{prefix}{}", ending(index)))).collect())
}
