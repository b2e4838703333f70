//! The pages that STORM writes, opened in Chromium: as wide as a desktop and as narrow as a phone,
//! with mouse and touch.
//!
//! Screenshots are left in `target/tmp/pages`. Without Chromium nothing is checked, and `cargo
//! xtask test` says so.

mod browser;
mod chromium;

use browser::Browser;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use storm_graph::random::Random;
use tempfile::TempDir;

/// CSS pixels: a desktop, and a phone.
const WIDTHS: [u32; 2] = [1280, 390];

/// What an attacker could write into a dataset, a config or a model.
const HOSTILE: &str =
    "</pre></script><script>document.title = 'taken over'</script><img src=x onerror=f()> '\"&";

/// A model of a few thousand parameters that evaluates often and writes some text.
const CONFIG: &str = r#"
model = "gpt2"
layers = 2
width = 16
heads = 2
seq = 16
batch = 2
accumulate = 2
steps = 60
eval-every = 15
warmup = 10
learning-rate = 1e-2
device = "cpu"
threads = 1
vram = "64MiB"
ram = "256MiB"
sample-tokens = 12
"#;

/// A small network for pictures.
const PICTURES: &str = r#"
model = "small-cnn"
data = "pictures"
batch = 8
optimizer = "sgd"
learning-rate = 0.02
steps = 12
eval-every = 3
seed = 5
device = "cpu"
threads = 2
precision = "f32"
data-ram = "16MiB"
"#;

/// Pictures in the format of CIFAR-10. Each class has its own colors, and one has a name that is
/// hard to show.
fn write_pictures(folder: &Path) {
    let cifar = folder.join("cifar");
    fs::create_dir(&cifar).expect("a folder");
    let mut random = Random(1);
    for (name, records) in [("data_batch_1.bin", 60), ("test_batch.bin", 50)] {
        let mut bytes = Vec::new();
        for record in 0..records {
            let label: u64 = record % 10;
            bytes.push(label as u8);
            let value = |at: u64| (40 * (label * (1 + at / 1024) % 5) + random.bits() % 60) as u8;
            bytes.extend((0..3072).map(value));
        }
        fs::write(cifar.join(name), bytes).expect("a file");
    }
    let long = "class".repeat(20);
    let names = ["one", "two", "three", "four", "five", "six", "seven", "eight", &long, HOSTILE];
    fs::write(cifar.join("batches.meta.txt"), names.join("\n")).expect("a file");
}

fn storm(folder: &Path, args: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    let output = command.current_dir(folder).args(args).output().expect("storm starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Names and pages: a run, the same run from its metrics alone, a run on pictures, and a step.
fn pages(folder: &Path) -> Vec<(&'static str, String)> {
    // Has no place to break, and is longer than a phone is wide.
    let data = format!("{}.txt", "data".repeat(40));
    let text: String = (0..400).map(|i| format!("{} and {}; ", i * 7 % 100, i % 13)).collect();
    fs::write(folder.join(&data), text).expect("a file");
    fs::write(folder.join("tiny.toml"), CONFIG).expect("a file");
    storm(folder, &["train", "tiny.toml", "--quiet", "--data", &data, "--sample-prompt", HOSTILE]);
    let whole = fs::read_to_string(folder.join("runs/tiny/report.html")).expect("a page");
    // A folder can have any name, and that of a killed run has no page.
    let moved = folder.join("<b>&run");
    fs::rename(folder.join("runs/tiny"), &moved).expect("moved");
    fs::remove_file(moved.join("report.html")).expect("removed");
    storm(folder, &["report", "<b>&run"]);
    let rebuilt = fs::read_to_string(moved.join("report.html")).expect("a page");
    write_pictures(folder);
    storm(folder, &["data", "pack", "cifar", "--out", "pictures"]);
    fs::write(folder.join("pictures.toml"), PICTURES).expect("a file");
    storm(folder, &["train", "pictures.toml", "--quiet"]);
    let pictures = fs::read_to_string(folder.join("runs/pictures/report.html")).expect("a page");
    let bench = "bench train --device cpu --model gpt2 --layers 1 --batch 1 --seq 8 --accumulate 2 --chunk-rows 8 \
                 --precision f32 --vram 500MiB --ram 2GiB --steps 1 --warmup 0 --report step.html";
    storm(folder, &bench.split_whitespace().collect::<Vec<_>>());
    let step = fs::read_to_string(folder.join("step.html")).expect("a page");
    vec![("run", whole), ("rebuilt", rebuilt), ("pictures", pictures), ("step", step)]
}

#[test]
fn pages_fit_and_answer_wide_and_narrow() {
    let Some(browser) = Browser::find() else { return };
    let folder = TempDir::new().expect("a folder");
    let pages = pages(folder.path());
    let findings = browser.check(&pages, &WIDTHS);
    assert_eq!(findings.len(), pages.len() * WIDTHS.len());
    for found in &findings {
        let at = format!("{} at {}", found["page"], found["width"]);
        for list in ["problems", "errors"] {
            let list = found[list].as_array().expect("a list");
            assert!(list.is_empty(), "{at}: {list:#?}");
        }
        assert!(found["title"] != "taken over", "{at}");
        let (charts, has_timeline) = match found["page"].as_str() {
            Some("run") => (7, true),
            Some("rebuilt") => (7, false),
            Some("pictures") => (8, true),
            _ => (0, true),
        };
        assert_eq!(
            (&found["charts"], &found["has_timeline"]),
            (&charts.into(), &has_timeline.into())
        );
        assert!(found["checks"].as_u64() >= Some(if charts > 0 { 200 } else { 10 }), "{found}");
        let is_of_pictures = found["page"] == "pictures";
        // Eight pictures after each evaluation but the last.
        let pictures = if is_of_pictures { 32 + 3 * 8 } else { 0 };
        assert_eq!(found["pictures"], pictures, "{at}");
        if charts > 0 {
            assert_eq!(found["held_out_points"], 4, "{at}");
        }
        if charts > 0 && !is_of_pictures {
            let sample = found["sample"].as_str().expect("a sample");
            assert!(sample.starts_with(HOSTILE) && sample.len() > HOSTILE.len(), "{at}: {sample}");
        }
    }
    let widths: Vec<&Value> =
        findings[..WIDTHS.len()].iter().map(|found| &found["width"]).collect();
    assert_eq!(widths, WIDTHS);
    for (name, page) in &pages {
        browser.picture(name, page, &WIDTHS, &findings);
    }
}

/// Makes sure that the checks find faults.
#[test]
fn pages_with_faults_are_found() {
    let Some(browser) = Browser::find() else { return };
    let page = |body: &str| format!("<!doctype html><html><head></head><body>{body}</body></html>");
    let faults = [
        ("too wide", "<div style='width:600px;height:9px'></div>", "problems", "608 wide"),
        (
            "cut off",
            "<div style='width:99px;overflow:hidden'><p style='width:600px'>a</p></div>",
            "problems",
            "cut",
        ),
        ("to the left", "<p style='position:absolute;left:-9px'>a</p>", "problems", "from -9"),
        ("throws", "<script>throw new Error('of the page')</script>", "errors", "of the page"),
        ("no JavaScript", "<script>const = 1</script>", "errors", "SyntaxError"),
        ("fetches", "<img src='x.png'>", "errors", "cannot load <img>"),
    ];
    let pages: Vec<(&str, String)> =
        faults.iter().map(|(name, body, ..)| (*name, page(body))).collect();
    let findings = browser.check(&pages, &[390]);
    for ((name, _, list, part), found) in faults.iter().zip(&findings) {
        assert!(found[list].to_string().contains(part), "{name}: {found}");
    }
    // A page without faults passes.
    let findings = browser.check(&[("plain", page("<p>all is well</p>"))], &[390]);
    assert_eq!(
        (&findings[0]["problems"], &findings[0]["errors"]),
        (&Value::from([0; 0]), &Value::from([0; 0]))
    );
}
