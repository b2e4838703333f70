//! Command line arguments. A command takes the ones that it knows, and refuses the rest.

use std::fmt::Display;
use std::str::FromStr;

use anyhow::{Result, anyhow, bail};

/// Arguments that have not been taken yet.
pub(crate) struct Args(Vec<String>);

impl Args {
    pub(crate) fn new(args: impl Iterator<Item = String>) -> Self {
        Self(args.collect())
    }

    /// Takes the first argument.
    pub(crate) fn word(&mut self) -> Option<String> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }

    /// Takes `--name` if it is there.
    pub(crate) fn flag(&mut self, name: &str) -> bool {
        let found = self.0.iter().position(|arg| arg == name);
        found.map(|at| self.0.remove(at)).is_some()
    }

    /// Takes `--name VALUE` if it is there.
    pub(crate) fn value<T>(&mut self, name: &str) -> Result<Option<T>>
    where
        T: FromStr,
        T::Err: Display,
    {
        let Some(at) = self.0.iter().position(|arg| arg == name) else {
            return Ok(None);
        };
        if at + 1 == self.0.len() {
            bail!("{name} needs a value");
        }
        self.0.remove(at);
        let text = self.0.remove(at);
        let value = text.parse().map_err(|error| anyhow!("{name} {text}: {error}"))?;
        Ok(Some(value))
    }

    /// Fails if any argument is left.
    pub(crate) fn finish(self) -> Result<()> {
        match self.0.first() {
            None => Ok(()),
            Some(arg) => bail!("unexpected argument `{arg}`; see `cargo xtask help`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> Args {
        Args::new(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn takes_flags_and_values_in_any_order() {
        let mut args = args("cpu --steps 7 --quick");
        assert!(args.flag("--quick"));
        assert_eq!(args.value::<u32>("--steps").unwrap(), Some(7));
        assert_eq!(args.value::<u32>("--rounds").unwrap(), None);
        assert_eq!(args.word().as_deref(), Some("cpu"));
        args.finish().unwrap();
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        assert!(args("--lnog").finish().is_err());
        assert!(args("--steps").value::<u32>("--steps").is_err());
        assert!(args("--steps many").value::<u32>("--steps").is_err());
    }
}
