//! The repository's own rules, which no other tool checks.
//!
//! Each rule is a pure function from a file's text to its violations. [`run`] applies the rules to
//! the tree.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::lexer::{code_only, has_word};
use crate::workspace::{crate_dirs, entries, name, root};

/// The maximum length of a source file, in lines. A file has one purpose.
const LINES_MAX: usize = 900;

/// Where `unsafe` code is allowed: host memory, the devices, calls of MPI and NCCL, and the one
/// file that trusts PyTorch about its memory.
const UNSAFE_PLACES: [&str; 4] = [
    "crates/storm-host/",
    "crates/storm-device/",
    "crates/storm-ranks/",
    "crates/storm-py/src/torch.rs",
];

/// The crates in the order in which data flows. Each may depend only on crates in earlier rows.
const CRATE_ORDER: [&[&str]; 15] = [
    &["storm-files"],
    &["storm-host"],
    &["storm-ranks"],
    &["storm-hub"],
    &["storm-graph"],
    &["storm-plan"],
    &["storm-testing"],
    &["storm-device"],
    &["storm-saved"],
    &["storm-exec"],
    &["storm-model"],
    &["storm-data"],
    &["storm-train"],
    &["storm-verify"],
    &["storm-cli", "storm-py", "storm-parity"],
];

/// Marks of unfinished work, split so that this file does not contain them.
const MARKS: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];

/// Macros that stand in for missing code or print debug output.
const MACROS: [&str; 3] = ["todo!", "unimplemented!", "dbg!"];

/// Placeholders that must be replaced before a document is complete.
const STAND_INS: [&str; 2] = ["MEASURED_TABLE", "PLACEHOLDER"];

/// A broken rule, and where it is broken.
struct Violation {
    file: String,
    line: Option<usize>,
    message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file, self.message),
            None => write!(f, "{}: {}", self.file, self.message),
        }
    }
}

/// Checks the whole tree.
pub(crate) fn run() -> Result<()> {
    let mut violations = Vec::new();
    let mut sources = Vec::new();
    collect_sources(root(), &mut sources)?;
    for path in &sources {
        let text = read(path)?;
        let file = relative(path);
        violations.extend(check_marks(&file, &text));
        violations.extend(check_length(&file, &text));
        if file.ends_with(".rs") {
            violations.extend(check_rust(&file, &text));
        }
    }
    for dir in crate_dirs()? {
        let manifest = dir.join("Cargo.toml");
        let text = read(&manifest)?;
        violations.extend(check_dependencies(&relative(&manifest), name(&dir), &text));
        violations.extend(check_crate_doc(&dir)?);
    }
    for path in documents()? {
        violations.extend(check_document(&relative(&path), &read(&path)?));
    }
    for violation in &violations {
        eprintln!("{violation}");
    }
    match violations.len() {
        0 => eprintln!("{} source files are tidy", sources.len()),
        count => bail!("{count} violations of the repository's rules"),
    }
    Ok(())
}

/// No marks of unfinished work.
fn check_marks(file: &str, text: &str) -> Vec<Violation> {
    let found = |line: &str| MARKS.into_iter().find(|mark| has_word(line, mark));
    each_line(file, text, |line| {
        found(line).map(|mark| format!("`{mark}`: do it, or open an issue and say nothing here"))
    })
}

/// No placeholders in documents.
fn check_document(file: &str, text: &str) -> Vec<Violation> {
    let found = |line: &str| STAND_INS.into_iter().find(|word| line.contains(word));
    each_line(file, text, |line| found(line).map(|word| format!("`{word}`: put in what it means")))
}

fn check_length(file: &str, text: &str) -> Option<Violation> {
    let counted = [".rs", ".cu", ".cuh", ".py"];
    let lines = text.lines().count();
    let too_long = counted.iter().any(|end| file.ends_with(end)) && lines > LINES_MAX;
    too_long.then(|| Violation {
        file: file.to_owned(),
        line: None,
        message: format!("{lines} lines; split it, {LINES_MAX} is the limit"),
    })
}

/// Rules on Rust code, without comments and string literals.
fn check_rust(file: &str, text: &str) -> Vec<Violation> {
    each_line(file, &code_only(text), |line| {
        if let Some(name) = MACROS.into_iter().find(|name| has_word(line, name)) {
            return Some(format!("`{name}` does not belong into the repository"));
        }
        if line.replace(' ', "").contains("#[ignore") {
            return Some("ignored test: make it run, or delete it".to_owned());
        }
        let allowed = UNSAFE_PLACES.iter().any(|place| file.starts_with(place));
        if has_word(line, "unsafe") && !allowed {
            return Some(format!("`unsafe` is allowed only in {}", UNSAFE_PLACES.join(", ")));
        }
        None
    })
}

/// A crate may depend only on crates that come before it. Tests may use any crate.
fn check_dependencies(file: &str, crate_name: &str, manifest: &str) -> Vec<Violation> {
    let violation = |line: usize, message: String| Violation {
        file: file.to_owned(),
        line: Some(line),
        message,
    };
    let Some(own_rank) = rank(crate_name) else {
        let message = format!("`{crate_name}` has no place in the crate order in xtask's tidy.rs");
        return vec![violation(1, message)];
    };
    dependencies(manifest)
        .into_iter()
        .filter(|(_, dependency)| rank(dependency).is_none_or(|rank| rank >= own_rank))
        .map(|(line, dependency)| {
            let message = format!("`{crate_name}` may not depend on `{dependency}`: wrong way");
            violation(line, message)
        })
        .collect()
}

/// The `storm-*` crates that a manifest depends on outside tests, with their line numbers.
fn dependencies(manifest: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_table = false;
    for (index, line) in manifest.lines().map(str::trim).enumerate() {
        let key = if let Some(table) = line.strip_prefix('[') {
            // Both `[dependencies]` and `[dependencies.storm-x]`, possibly below `target.'cfg(…)'`.
            let table = table.trim_end_matches(']');
            let parts: Vec<&str> = table.split('.').map(str::trim).collect();
            let at =
                parts.iter().position(|part| ["dependencies", "build-dependencies"].contains(part));
            in_table = at.is_some_and(|at| at + 1 == parts.len());
            at.and_then(|at| parts.get(at + 1).copied())
        } else if in_table {
            line.split(['.', '=', ' ']).next()
        } else {
            None
        };
        let key = key.unwrap_or_default().trim_matches('"');
        if key.starts_with("storm-") {
            found.push((index + 1, key.to_owned()));
        }
    }
    found
}

fn rank(crate_name: &str) -> Option<usize> {
    CRATE_ORDER.iter().position(|row| row.contains(&crate_name))
}

/// Every crate starts with a comment that states its purpose.
fn check_crate_doc(dir: &Path) -> Result<Option<Violation>> {
    let roots = ["src/lib.rs", "src/main.rs"].map(|file| dir.join(file));
    let Some(path) = roots.iter().find(|path| path.is_file()) else {
        return Ok(Some(Violation {
            file: relative(dir),
            line: None,
            message: "no src/lib.rs or src/main.rs".to_owned(),
        }));
    };
    Ok(check_root_file(&relative(path), &read(path)?))
}

fn check_root_file(file: &str, text: &str) -> Option<Violation> {
    let documented = text.trim_start().starts_with("//!");
    (!documented).then(|| Violation {
        file: file.to_owned(),
        line: Some(1),
        message: "start with a `//!` comment that says what the crate is for".to_owned(),
    })
}

fn each_line(file: &str, text: &str, rule: impl Fn(&str) -> Option<String>) -> Vec<Violation> {
    let numbered = text.lines().zip(1..);
    let violations = numbered.filter_map(|(line, number)| {
        let message = rule(line)?;
        let (file, line) = (file.to_owned(), Some(number));
        Some(Violation { file, line, message })
    });
    violations.collect()
}

/// All handwritten source files below `dir`, without build outputs and hidden folders.
fn collect_sources(dir: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let sources = ["rs", "cu", "cuh", "py", "toml", "sh"];
    for path in entries(dir)? {
        let file_name = name(&path);
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            let left_out = ["target", "runs", "__pycache__"].contains(&file_name);
            if !left_out && !file_name.starts_with('.') {
                collect_sources(&path, found)?;
            }
        } else if let Some(ext) = path.extension().and_then(|ext| ext.to_str())
            && sources.contains(&ext)
        {
            found.push(path);
        }
    }
    Ok(())
}

/// README.md and docs/*.md.
fn documents() -> Result<Vec<PathBuf>> {
    let mut found = entries(&root().join("docs"))?;
    found.retain(|path| path.extension().is_some_and(|ext| ext == "md"));
    found.push(root().join("README.md"));
    Ok(found)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// The path below the root, with forward slashes.
fn relative(path: &Path) -> String {
    let path = path.strip_prefix(root()).unwrap_or(path);
    path.to_string_lossy().replace('\\', "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that there is one violation for each expected text, and that it starts with that
    /// text.
    fn check(violations: impl IntoIterator<Item = Violation>, expected: &[&str]) {
        let found: Vec<String> = violations.into_iter().map(|v| v.to_string()).collect();
        let matches = found.len() == expected.len()
            && found.iter().zip(expected).all(|(f, e)| f.starts_with(e));
        assert!(matches, "found {found:#?}, expected {expected:#?}");
    }

    #[test]
    fn finds_marks_in_comments_and_text() {
        for mark in MARKS {
            let expected = format!("a.py:2: `{mark}`");
            check(check_marks("a.py", &format!("x\n# {mark}: y")), &[&expected]);
        }
        check(check_marks("a.rs", "// a todo list in prose"), &[]);
        check(check_marks("a.rs", "let MY_TODO_LIST = TODOS;"), &[]);
    }

    #[test]
    fn finds_stand_ins_in_documents() {
        check(
            check_document("README.md", "# Speed\n\nMEASURED_TABLE\n(PLACEHOLDER_2)\n"),
            &["README.md:3: `MEASURED_TABLE`", "README.md:4: `PLACEHOLDER`"],
        );
        check(check_document("README.md", "a measured table, no placeholder"), &[]);
        assert!(documents().unwrap().iter().any(|path| path.ends_with("README.md")));
    }

    #[test]
    fn finds_macros_in_code_only() {
        check(
            check_rust("a.rs", "f();\ntodo!()\ndbg!(x);\nunimplemented!(\"y\")"),
            &["a.rs:2: `todo!`", "a.rs:3: `dbg!`", "a.rs:4: `unimpl"],
        );
        check(check_rust("a.rs", "// todo!()\nf(\"dbg!(x)\")"), &[]);
    }

    #[test]
    fn finds_ignored_tests() {
        check(check_rust("a.rs", "#[ignore]"), &["a.rs:1: ignored test"]);
        check(check_rust("a.rs", "#[ignore = \"slow\"]"), &["a.rs:1: ign"]);
        check(check_rust("a.rs", "// #[ignore]"), &[]);
    }

    #[test]
    fn keeps_unsafe_in_one_crate() {
        let code = "\n    unsafe { f() }";
        check(
            check_rust("crates/storm-exec/src/a.rs", code),
            &["crates/storm-exec/src/a.rs:2: `unsafe`"],
        );
        check(check_rust("crates/storm-device/src/a.rs", code), &[]);
        check(check_rust("crates/storm-host/src/a.rs", code), &[]);
        check(check_rust("a.rs", "#![forbid(unsafe_code)] // unsafe"), &[]);
    }

    #[test]
    fn limits_the_length_of_files() {
        let long = "x\n".repeat(LINES_MAX + 1);
        check(check_length("a.cu", &long), &["a.cu: 901 lines"]);
        check(check_length("a.rs", &"x\n".repeat(LINES_MAX)), &[]);
        check(check_length("a.toml", &long), &[]);
    }

    #[test]
    fn keeps_the_direction_of_dependencies() {
        let manifest = "\
[package]
name = \"storm-device\"
[dependencies]
storm-graph.workspace = true
rayon = \"1\"
storm-exec = { path = \"../storm-exec\" }
[dev-dependencies]
storm-train.workspace = true
[target.'cfg(unix)'.dependencies]
storm-model.workspace = true
[build-dependencies.storm-cli]
path = \"../storm-cli\"
";
        check(
            check_dependencies("Cargo.toml", "storm-device", manifest),
            &[
                "Cargo.toml:6: `storm-device` may not depend on `storm-exec`",
                "Cargo.toml:10: `storm-device` may not depend on `storm-model`",
                "Cargo.toml:11: `storm-device` may not depend on `storm-cli`",
            ],
        );
    }

    #[test]
    fn knows_every_crate() {
        check(
            check_dependencies("Cargo.toml", "storm-new", ""),
            &["Cargo.toml:1: `storm-new` has no place"],
        );
        let manifest = "[dependencies]\nstorm-new = \"1\"";
        check(
            check_dependencies("Cargo.toml", "storm-cli", manifest),
            &["Cargo.toml:2: `storm-cli` may not depend on `storm-new`"],
        );
        let manifest = "[dependencies]\nstorm-cli = \"1\"";
        check(
            check_dependencies("Cargo.toml", "storm-py", manifest),
            &["Cargo.toml:2: `storm-py` may not depend on `storm-cli`"],
        );
    }

    #[test]
    fn wants_crate_docs() {
        check(check_root_file("lib.rs", "\n//! Tensors.\n"), &[]);
        check(check_root_file("lib.rs", "pub mod a;"), &["lib.rs:1: start"]);
    }
}
