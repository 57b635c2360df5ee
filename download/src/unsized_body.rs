//! Files whose server tells no size and gives no ranges: fetched in one go, and from the start if that fails.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use crate::digest::Hasher;
use crate::error::DownloadError;
use crate::http::{Ask, Client, Trouble, describe_body, host, recognise};
use crate::part::{BUFFER_BYTES, PART_SUFFIX, beside, sync_folder};
use crate::probe::repeat;
use crate::progress::{Event, Observer};
use crate::settings::Settings;
use crate::transfer::{Fetched, Item};

/// Fetches one file. `None` if stopped.
pub(crate) fn fetch(
    client: &Client,
    settings: &Settings,
    item: &Item,
    observer: &dyn Observer,
    stopped: &dyn Fn() -> bool,
) -> Result<Option<Fetched>, DownloadError> {
    let part = beside(&item.target, PART_SUFFIX);
    let folder = item.target.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(DownloadError::io("make the folder", folder))?;
    let fetched = repeat(settings, &item.name, observer, || attempt(client, item, &part, stopped))?;
    let Some(fetched) = fetched else { return Ok(None) };
    if let Some(expected) = item.digest.as_ref().filter(|expected| **expected != fetched.digest) {
        return Err(DownloadError::Digest {
            file: item.name.clone(),
            algorithm: expected.algorithm(),
            found: fetched.digest.hex().to_owned(),
            expected: expected.hex().to_owned(),
            compared_bytes: 0,
            part,
        });
    }
    fs::rename(&part, &item.target).map_err(|source| DownloadError::Rename {
        part: part.clone(),
        target: item.target.clone(),
        source,
    })?;
    sync_folder(&item.target);
    let (digest, checked) = (fetched.digest.hex(), fetched.checked);
    observer.event(&Event::Finished { file: &item.name, path: &item.target, digest, checked });
    Ok(Some(fetched))
}

fn attempt(
    client: &Client,
    item: &Item,
    part: &Path,
    stopped: &dyn Fn() -> bool,
) -> Result<Option<Fetched>, Trouble> {
    let mut answer = client.send(&Ask::get(&item.url))?;
    let host = host(&answer.url);
    let passing = |what: &str| Trouble::Passing { what: format!("{host}: {what}"), wait: None };
    let not_the_file = |found, advice| {
        Trouble::Final(DownloadError::NotTheFile {
            file: item.name.clone(),
            host: host.clone(),
            found,
            advice,
        })
    };
    if answer.encoding().is_some() {
        return Err(passing("sends the file compressed, which was not asked for"));
    }
    if !answer.is_chunked() && item.digest.is_none() {
        return Err(not_the_file(
            "a body of unknown length",
            "a cut download could not be told from a whole one; give its digest with --sha256",
        ));
    }
    let mut file = File::create(part).map_err(DownloadError::io("make", part))?;
    let mut hasher = Hasher::new(item.digest.as_ref(), 0);
    let (mut buffer, mut n_bytes) = (vec![0; BUFFER_BYTES], 0);
    loop {
        if stopped() {
            return Ok(None);
        }
        let n = answer.response.read(&mut buffer).map_err(|e| passing(&describe_body(&e)))?;
        if n == 0 {
            break;
        }
        if n_bytes == 0
            && let Some(unwanted) = recognise(&buffer[..n])
        {
            return Err(not_the_file(unwanted.found, unwanted.advice));
        }
        file.write_all(&buffer[..n]).map_err(DownloadError::io("write", part))?;
        hasher.update(&buffer[..n]);
        n_bytes += n as u64;
    }
    if n_bytes == 0 {
        return Err(passing("the body is empty"));
    }
    file.sync_all().map_err(DownloadError::io("flush", part))?;
    Ok(Some(Fetched { digest: hasher.finish(), checked: item.digest.is_some(), n_bytes }))
}
