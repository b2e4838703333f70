use std::fmt;

/// A model's name on a hub, such as `Qwen/Qwen2.5-7B-Instruct`, with an optional revision such as
/// `@main`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    pub(crate) repository: String,
    pub(crate) revision: Option<String>,
}

/// Maximum length of an owner, model or revision.
const PART_LETTERS_MAX: usize = 96;

impl HubName {
    /// Parses a name. `None` if it is not valid.
    pub fn parse(text: &str) -> Option<HubName> {
        let (repository, revision) = match text.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (text, None),
        };
        let (owner, model) = repository.split_once('/')?;
        let mut parts = [owner, model].into_iter().chain(revision);
        parts.all(is_part).then(|| HubName {
            repository: repository.to_owned(),
            revision: revision.map(str::to_owned),
        })
    }

    /// The same model at a given revision.
    pub fn at(&self, revision: &str) -> HubName {
        HubName { repository: self.repository.clone(), revision: Some(revision.to_owned()) }
    }

    pub(crate) fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

/// Formats the name as accepted by [`HubName::parse`].
impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))
    }
}

/// Whether a text is safe as a single component of a path and of a URL.
pub(crate) fn is_part(text: &str) -> bool {
    text.len() <= PART_LETTERS_MAX
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && !text.contains("--")
        && !text.contains("..")
}

/// Whether a text is a hash, such as a commit ID.
pub(crate) fn is_hash(text: &str) -> bool {
    (8..=128).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_an_owner_and_a_model() {
        for name in ["Qwen/Qwen2.5-7B-Instruct", "a/b", "a_b/c.d@main", "a/b@0123abcd"] {
            assert_eq!(HubName::parse(name).map(|name| name.to_string()).as_deref(), Some(name));
        }
        let long = format!("a/{}", "b".repeat(97));
        for name in [
            "gpt2", "a/b/c", "/a/b", "./a", "a/.b", "../b", "a/..", "a/b@", "a/b@../c", "a b/c",
            "a/", "a/b--c", &long, "a/b?c", "a/b%2f", "C:\\a/b", "ä/b",
        ] {
            assert_eq!(HubName::parse(name), None, "{name}");
        }
    }
}
