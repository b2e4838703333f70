use crate::{Hub, HubError};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const ENDPOINT: &str = "https://huggingface.co";

const RETRY_PAUSE: Duration = Duration::from_secs(1);

impl Hub {
    /// The hub configured by the environment variables of `huggingface_hub`: `HF_HUB_CACHE`,
    /// `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// No variable determines the cache directory.
    pub fn from_environment() -> Result<Hub, HubError> {
        Hub::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Hub, HubError> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let folder = |name: &str| given(name).map(PathBuf::from);
        let home = || folder("HF_HOME").map(|home| home.join("hub"));
        let shared = || folder("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub"));
        let user = || folder("HOME").map(|home| home.join(".cache/huggingface/hub"));
        let cache = folder("HF_HUB_CACHE").or_else(home).or_else(shared).or_else(user);
        let cache = cache.ok_or(HubError::NoCache)?;
        // Links in a snapshot are relative, so both of their paths must be absolute.
        let cache = std::path::absolute(&cache).unwrap_or(cache);
        let text = |name: &str| given(name).and_then(|value| value.into_string().ok());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let token_file = || {
            let path = folder("HF_TOKEN_PATH").or_else(|| Some(cache.parent()?.join("token")))?;
            std::fs::read_to_string(path).ok()
        };
        let token = text("HF_TOKEN").or_else(token_file).map(|token| token.trim().to_owned());
        let is_set = |name: &str| {
            text(name).is_some_and(|value| {
                ["1", "true", "yes", "on"].contains(&value.to_lowercase().as_str())
            })
        };
        Ok(Hub {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.filter(|token| !token.is_empty()),
            is_offline: is_set("HF_HUB_OFFLINE") || is_set("TRANSFORMERS_OFFLINE"),
            retry_pause: RETRY_PAUSE,
            cache,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(variables: &[(&str, &str)]) -> Result<Hub, HubError> {
        Hub::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn variables_are_those_of_the_python_library() {
        let cache = |variables: &[(&str, &str)]| hub(variables).map(|hub| hub.cache);
        assert!(matches!(cache(&[("HOME", "")]), Err(HubError::NoCache)));
        assert_eq!(cache(&[("HOME", "/u")]).unwrap(), PathBuf::from("/u/.cache/huggingface/hub"));
        let given =
            [("HOME", "/u"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")];
        assert_eq!(cache(&given[..2]).unwrap(), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&given[..3]).unwrap(), PathBuf::from("/h/hub"));
        assert_eq!(cache(&given).unwrap(), PathBuf::from("/c"));
        let plain = hub(&[("HF_HOME", "/nowhere")]).unwrap();
        assert_eq!(
            (plain.endpoint.as_str(), plain.token, plain.is_offline),
            (ENDPOINT, None, false)
        );
        let given = [
            ("HF_HOME", "/h"),
            ("HF_ENDPOINT", "http://a/"),
            ("HF_TOKEN", " t\n"),
            ("HF_HUB_OFFLINE", "YES"),
        ];
        let given = hub(&given).unwrap();
        assert_eq!(
            (given.endpoint.as_str(), given.token.as_deref(), given.is_offline),
            ("http://a", Some("t"), true)
        );
        assert!(!hub(&[("HF_HOME", "/h"), ("HF_HUB_OFFLINE", "0")]).unwrap().is_offline);
    }
}
