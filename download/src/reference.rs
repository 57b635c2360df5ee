//! What can be asked for: a target of the catalogue, files of a hub repository, any address.

use reqwest::Url;

use crate::error::DownloadError;

/// Something to download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reference {
    /// A name from the catalogue.
    Target(String),
    /// Files of a repository.
    Hub(HubReference),
    /// Any file.
    Url(Url),
}

/// A repository, perhaps one file of it, at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubReference {
    /// `ORG/NAME`.
    pub repository: String,
    /// Path of one file in the repository.
    pub path: Option<String>,
    /// Branch, tag or commit.
    pub revision: String,
}

/// Revision where none is given.
pub const DEFAULT_REVISION: &str = "main";

impl Reference {
    /// Reads `NAME`, `hf:ORG/NAME[/PATH][@REV]` or an address.
    ///
    /// # Errors
    /// [`DownloadError::Reference`] if the text is none of these.
    pub fn parse(text: &str) -> Result<Self, DownloadError> {
        if let Some(rest) = text.strip_prefix("hf:") {
            return HubReference::parse(text, rest.trim_start_matches('/')).map(Self::Hub);
        }
        if text.contains("://") {
            let url = Url::parse(text).map_err(|e| wrong(text, format!("it is no address: {e}")))?;
            if !matches!(url.scheme(), "https" | "http") {
                return Err(wrong(text, format!("addresses of type `{}` cannot be fetched", url.scheme())));
            }
            return Ok(Self::Url(url));
        }
        let name = !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        if name { Ok(Self::Target(text.to_owned())) } else { Err(wrong(text, "it is no name".to_owned())) }
    }
}

impl HubReference {
    fn parse(given: &str, text: &str) -> Result<Self, DownloadError> {
        let (text, revision) = match text.rsplit_once('@') {
            Some((_, "")) => return Err(wrong(given, "nothing follows the @".to_owned())),
            Some((text, revision)) => (text, revision),
            None => (text, DEFAULT_REVISION),
        };
        let mut parts = text.splitn(3, '/');
        let (Some(org), Some(name)) = (parts.next(), parts.next()) else {
            return Err(wrong(given, "a repository is ORG/NAME".to_owned()));
        };
        let sound = |part: &str| {
            !part.is_empty()
                && !part.contains("..")
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        if !sound(org) || !sound(name) {
            return Err(wrong(given, format!("`{org}/{name}` is no name of a repository")));
        }
        let path = parts.next().filter(|path| !path.is_empty());
        if let Some(path) = path.filter(|path| !is_safe_path(path)) {
            return Err(wrong(given, format!("`{path}` is no path within a repository")));
        }
        Ok(Self {
            repository: format!("{org}/{name}"),
            path: path.map(str::to_owned),
            revision: revision.to_owned(),
        })
    }

    /// `hf:ORG/NAME/PATH@REV`, as [`Reference::parse`] reads it.
    pub fn file(repository: &str, path: &str, revision: &str) -> String {
        format!("hf:{repository}/{path}@{revision}")
    }
}

/// Whether a path from a server stays within the folder that it is joined to.
pub(crate) fn is_safe_path(path: &str) -> bool {
    let component = |part: &str| !matches!(part, "" | "." | "..");
    !path.contains(['\\', '\0']) && path.split('/').all(component)
}

/// Whether `name` fits a pattern in which `*` stands for any text and `?` for one character, as in the hub's own tool.
pub fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Place after the last star, and up to where it reaches.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p + 1, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                Some((after, reached)) => {
                    star = Some((after, reached + 1));
                    p = after;
                    n = reached + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

fn wrong(given: &str, problem: String) -> DownloadError {
    DownloadError::Reference { given: given.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(repository: &str, path: Option<&str>, revision: &str) -> Reference {
        Reference::Hub(HubReference {
            repository: repository.to_owned(),
            path: path.map(str::to_owned),
            revision: revision.to_owned(),
        })
    }

    #[test]
    fn references_are_told_apart() {
        let of = |text: &str| Reference::parse(text).unwrap();
        assert_eq!(of("flash-q2"), Reference::Target("flash-q2".to_owned()));
        assert_eq!(of("hf:a/b"), hub("a/b", None, "main"));
        assert_eq!(of("hf:a/b/c/d.gguf@v1"), hub("a/b", Some("c/d.gguf"), "v1"));
        assert_eq!(of("hf://a/b@refs/pr/1"), hub("a/b", None, "refs/pr/1"));
        assert!(matches!(of("https://x.org/f?y=1"), Reference::Url(_)));
        for text in
            ["", "a/b", "hf:a", "hf:a/..", "hf:a/b/../../etc", "hf:a/b@", "ftp://x/y", "hf:a /b", "hf:a/b//c"]
        {
            assert!(matches!(Reference::parse(text), Err(DownloadError::Reference { .. })), "{text}");
        }
        assert_eq!(HubReference::file("a/b", "c.gguf", "v"), "hf:a/b/c.gguf@v");
    }

    #[test]
    fn patterns_fit_as_in_shells() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("*.gguf", "a/b.gguf", true),
            ("*.gguf", "b.gguf.part", false),
            ("a?c*", "abcd", true),
            ("a?c", "ac", false),
            ("*00001-of-*", "x-00001-of-00003.gguf", true),
            ("**", "x", true),
            ("", "x", false),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
    }
}
