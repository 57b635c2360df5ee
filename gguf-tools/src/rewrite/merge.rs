//! Merging a split set, or layer files, back to one file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::layers::{cover_problems, layer_count};
use super::split::whole_metadata;
use super::{LayerPart, NewFile, Origin, POSITIONS_KEY, RewriteError, SPLIT_KEYS};
use crate::gguf::{Array, Gguf, Metadata, TensorInfo, Value};

/// Opens everything that belongs to the files given: any shard stands for its set, one layer file for those beside it
/// whose names differ in the layers only.
///
/// # Errors
/// As [`Gguf::open`].
pub fn open_parts(paths: &[PathBuf]) -> Result<Vec<Gguf>, RewriteError> {
    let mut parts: Vec<Gguf> = Vec::new();
    for path in paths {
        let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let wanted = canonical(path);
        let opened = parts.iter().flat_map(Gguf::shards).any(|shard| canonical(&shard.path) == wanted);
        if !opened {
            parts.push(Gguf::open(path)?);
        }
    }
    if let ([only], [path]) = (parts.as_slice(), paths)
        && only.split_place().is_none()
    {
        for sibling in layer_siblings(path) {
            parts.push(Gguf::open(sibling)?);
        }
    }
    Ok(parts)
}

/// Other files of this folder with the same name but for the layers.
fn layer_siblings(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some((prefix, _)) = name.rsplit_once("-Layers") else { return Vec::new() };
    let begins = format!("{prefix}-Layers");
    let Ok(entries) = std::fs::read_dir(super::write::folder_of(path)) else { return Vec::new() };
    let mut siblings: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| {
            let other = entry.file_name().to_string_lossy().into_owned();
            other != name
                && other.starts_with(&begins)
                && entry.path().extension().is_some_and(|e| e == "gguf")
        })
        .map(|entry| path.with_file_name(entry.file_name()))
        .collect();
    siblings.sort();
    siblings
}

/// The one file that these parts make: a split set, or layer files in any order.
///
/// # Errors
/// [`RewriteError::Request`] for a single whole file, [`RewriteError::Mismatch`] for parts of different models, tensors
/// in two parts, and layers in none.
pub fn merge<'a>(parts: &'a [Gguf], out: &Path) -> Result<NewFile<'a>, RewriteError> {
    let (first, alignment) = match parts {
        [] => return Err(RewriteError::request("give the files to merge")),
        // A set of one shard has the keys of a set too.
        [only] if only.metadata().get(SPLIT_KEYS[2]).is_some() => (only, only.alignment()),
        _ => return merge_layers(parts, out),
    };
    let origins = first.tensors().iter().map(|tensor| Origin { gguf: first, tensor }).collect();
    Ok(NewFile::new(out.to_owned(), whole_metadata(first), origins, alignment)?)
}

/// One layer file.
struct LayerFile<'a> {
    gguf: &'a Gguf,
    part: LayerPart,
}

fn merge_layers<'a>(parts: &'a [Gguf], out: &Path) -> Result<NewFile<'a>, RewriteError> {
    let n_layers = layer_count(parts[0].metadata())?;
    let mut problems = Vec::new();
    let mut files = Vec::new();
    for gguf in parts {
        let path = gguf.shards()[0].path.display();
        if gguf.split_place().is_some() {
            problems.push(format!("`{path}` is a shard of a split set; merge that set by itself"));
            continue;
        }
        match LayerPart::of_tensors(gguf.tensors().iter().map(|t| t.name.as_str()), n_layers) {
            Ok(part) => files.push(LayerFile { gguf, part }),
            Err(problem) => problems.push(format!("`{path}`: {problem}")),
        }
    }
    if problems.is_empty() && parts.len() == 1 && cover_problems(&[files[0].part], n_layers).is_empty() {
        let path = parts[0].shards()[0].path.display();
        return Err(RewriteError::request(format!(
            "`{path}` is a whole file already; there is nothing to merge"
        )));
    }
    for file in &files[1.min(files.len())..] {
        problems.extend(metadata_differences(files[0].gguf, file.gguf));
    }
    problems.extend(double_tensors(parts));
    if problems.is_empty() {
        let held: Vec<LayerPart> = files.iter().map(|file| file.part).collect();
        problems = cover_problems(&held, n_layers);
        if !problems.is_empty() {
            let path = |gguf: &Gguf| gguf.shards()[0].path.display().to_string();
            problems.extend(
                files.iter().map(|f| format!("`{}` holds {}", path(f.gguf), f.part.describe(n_layers))),
            );
        }
    }
    if !problems.is_empty() {
        return Err(RewriteError::Mismatch {
            what: "these files do not make one model".to_owned(),
            problems,
            advice: "give all layer files of one model, and each once",
        });
    }
    files.sort_by_key(|file| file.part.first.unwrap_or(u32::MAX));
    let origins = in_whole_order(&files)?;
    let gguf = files[0].gguf;
    Ok(NewFile::new(out.to_owned(), whole_metadata(gguf), origins, gguf.alignment())?)
}

/// Keys that differ between two parts of one model.
fn metadata_differences(one: &Gguf, other: &Gguf) -> Vec<String> {
    let (a, b) = (whole_metadata(one), whole_metadata(other));
    let names = |gguf: &Gguf| gguf.shards()[0].path.display().to_string();
    // As text, since NaN is not equal to itself.
    let text = |metadata: &Metadata, key: &str| metadata.get(key).map(|value| format!("{value:?}"));
    let mut keys: Vec<&str> = a.iter().map(|(key, _)| key).collect();
    keys.extend(b.iter().map(|(key, _)| key).filter(|key| a.get(key).is_none()));
    keys.into_iter()
        .filter(|key| text(&a, key) != text(&b, key))
        .map(|key| format!("key `{key}` differs between `{}` and `{}`", names(one), names(other)))
        .collect()
}

fn double_tensors(parts: &[Gguf]) -> Vec<String> {
    let mut seen: HashMap<&str, &Gguf> = HashMap::new();
    let mut problems = Vec::new();
    for gguf in parts {
        for tensor in gguf.tensors() {
            if let Some(other) = seen.insert(&tensor.name, gguf) {
                let path = |gguf: &Gguf| gguf.shards()[0].path.display().to_string();
                problems.push(format!(
                    "tensor `{}` is in `{}` and in `{}`",
                    tensor.name,
                    path(other),
                    path(gguf)
                ));
            }
        }
    }
    problems
}

/// The tensors in the order of the whole file: by recorded positions, or layer file after layer file.
fn in_whole_order<'a>(files: &[LayerFile<'a>]) -> Result<Vec<Origin<'a>>, RewriteError> {
    let mut origins: Vec<(Option<u64>, Origin<'a>)> = Vec::new();
    for file in files {
        let positions = match file.gguf.metadata().get(POSITIONS_KEY) {
            None => None,
            Some(Value::Array(Array::U32(list))) if list.len() == file.gguf.tensors().len() => Some(list),
            Some(_) => return Err(bad_positions(file.gguf)),
        };
        let with_position = |(at, tensor): (usize, &'a TensorInfo)| {
            (positions.map(|list| u64::from(list[at])), Origin { gguf: file.gguf, tensor })
        };
        origins.extend(file.gguf.tensors().iter().enumerate().map(with_position));
    }
    if origins.iter().all(|(position, _)| position.is_some()) {
        origins.sort_by_key(|(position, _)| *position);
        if origins.iter().enumerate().any(|(at, (position, _))| *position != Some(at as u64)) {
            return Err(bad_positions(files[0].gguf));
        }
    } else if let Some((_, origin)) = origins.iter().find(|(position, _)| position.is_some()) {
        return Err(bad_positions(origin.gguf));
    }
    Ok(origins.into_iter().map(|(_, origin)| origin).collect())
}

fn bad_positions(gguf: &Gguf) -> RewriteError {
    RewriteError::Mismatch {
        what: "the order of the whole file is not known".to_owned(),
        problems: vec![format!(
            "`{}`: key `{POSITIONS_KEY}` does not give each tensor of all parts one place",
            gguf.shards()[0].path.display()
        )],
        advice: "take layer files of one split, or remove the key from all of them with `ggsmith relabel --unset`",
    }
}
