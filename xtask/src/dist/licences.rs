//! Licenses of everything that is linked into the release files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::process::{cargo, output};
use crate::workspace::{entries, name};

/// The packages that are released.
const PACKAGES: [&str; 2] = ["storm-cli", "storm-py"];

/// A dependency and the folder of its sources.
struct Dependency {
    name: String,
    version: String,
    licence: String,
    dir: PathBuf,
}

/// One text with the name, the version, the license and the license texts of every dependency.
pub(super) fn text() -> Result<String> {
    let mut metadata = cargo();
    metadata.args(["metadata", "--format-version=1", "--locked"]);
    metadata.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let metadata: Value =
        serde_json::from_str(&output(&mut metadata)?).context("cargo metadata")?;
    let dependencies = dependencies(&metadata)?;
    let mut text = String::from("Third-party code in STORM, and its licences\n");
    // Many crates ship the same text. It appears once, with the names of these crates.
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for Dependency { name, version, licence, dir } in &dependencies {
        writeln!(text, "  {name} {version}: {licence}")?;
        for file in licence_files(dir)? {
            let shipped =
                fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
            texts.entry(shipped.trim().to_owned()).or_default().push(format!("{name} {version}"));
        }
    }
    for (shipped, crates) in texts {
        write!(text, "\n{}\n{}\n\n{shipped}\n", "=".repeat(100), crates.join(", "))?;
    }
    Ok(text)
}

/// Third-party packages that are linked into the released packages, sorted by name.
fn dependencies(metadata: &Value) -> Result<Vec<Dependency>> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, Value> = list(&metadata["packages"])
        .into_iter()
        .map(|package| (text(&package["id"]), package))
        .collect();
    let nodes: BTreeMap<String, Value> = list(&metadata["resolve"]["nodes"])
        .into_iter()
        .map(|node| (text(&node["id"]), node))
        .collect();
    let is_wanted = |id: &&String| PACKAGES.contains(&text(&packages[*id]["name"]).as_str());
    let mut open: Vec<String> = packages.keys().filter(is_wanted).cloned().collect();
    ensure!(open.len() == PACKAGES.len(), "cargo metadata misses one of {PACKAGES:?}");
    let mut seen: BTreeSet<String> = BTreeSet::new();
    while let Some(id) = open.pop() {
        if !seen.insert(id.clone()) {
            continue;
        }
        for dependency in list(&nodes[&id]["deps"]) {
            // Dependencies of tests and build scripts are not linked.
            let links = list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
            if links {
                open.push(text(&dependency["pkg"]));
            }
        }
    }
    let mut found = Vec::new();
    for package in seen.iter().map(|id| &packages[id]) {
        // Packages of this repository have no `source`.
        if package["source"].is_null() {
            continue;
        }
        let manifest = text(&package["manifest_path"]);
        let dir = Path::new(&manifest).parent().map(Path::to_path_buf).unwrap_or_default();
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        let licence = text(&package["license"]);
        let licence = if licence.is_empty() { text(&package["license_file"]) } else { licence };
        ensure!(!licence.is_empty(), "{name} {version} names no licence");
        found.push(Dependency { name, version, licence, dir });
    }
    found.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    Ok(found)
}

/// The license files that a package ships.
fn licence_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let is_text = |path: &PathBuf| {
        let upper = name(path).to_uppercase();
        path.is_file()
            && ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"]
                .iter()
                .any(|start| upper.starts_with(start))
    };
    Ok(entries(dir)?.into_iter().filter(is_text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, source: &str, licence: &str) -> String {
        format!(
            r#"{{"id":"{name}","name":"{name}","version":"1.0","source":{source},"license":{licence},"license_file":null,"manifest_path":"/x/{name}/Cargo.toml"}}"#
        )
    }

    fn metadata(licence: &str) -> Value {
        let packages = [
            package("storm-cli", "null", "\"MIT\""),
            package("storm-py", "null", "\"MIT\""),
            package("linked", "\"r\"", licence),
            package("below", "\"r\"", "\"Zlib\""),
            package("for-tests", "\"r\"", "\"MIT\""),
        ]
        .join(",");
        let dependency = |name: &str, kind: &str| {
            format!(r#"{{"pkg":"{name}","dep_kinds":[{{"kind":{kind}}}]}}"#)
        };
        let node = |name: &str, deps: &[String]| {
            format!(r#"{{"id":"{name}","deps":[{}]}}"#, deps.join(","))
        };
        let nodes = [
            node("storm-cli", &[dependency("linked", "null"), dependency("for-tests", "\"dev\"")]),
            node("storm-py", &[]),
            node("linked", &[dependency("below", "null")]),
            node("below", &[]),
            node("for-tests", &[]),
        ]
        .join(",");
        let text = format!(r#"{{"packages":[{packages}],"resolve":{{"nodes":[{nodes}]}}}}"#);
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn what_is_linked_is_listed_and_nothing_else() {
        let found = dependencies(&metadata("\"MIT\"")).unwrap();
        let names: Vec<&str> = found.iter().map(|dependency| dependency.name.as_str()).collect();
        assert_eq!(names, ["below", "linked"]);
    }

    #[test]
    fn a_package_without_a_licence_is_an_error() {
        let error = dependencies(&metadata("null")).err().expect("it has none");
        assert_eq!(error.to_string(), "linked 1.0 names no licence");
    }
}
