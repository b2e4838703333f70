//! The `storm` binary, as users run it.

mod broken_pipe;
mod data;
mod escapes;
mod guide;
mod manual;
mod outputs;
mod plan;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use storm_model::{
    Dtype, HfDirectory, ModelConfig, SaveOptions, WeightDtype, load_parameter, parameters, preset,
    preset_names, save,
};
use tempfile::TempDir;

struct Done {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Done {
    #[track_caller]
    fn succeeded(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout
    }

    /// Fails unless it ended with this code and a message with all of these parts.
    #[track_caller]
    fn failed(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}\n{}", self.stdout, self.stderr);
        let mut lines = self.stderr.lines();
        assert!(lines.any(|line| line.starts_with("error: ")), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "{part} is not in: {}", self.stderr);
        }
    }
}

fn storm<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Done {
    let output = Command::new(env!("CARGO_BIN_EXE_storm")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Done { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

fn words(line: &str) -> Done {
    storm(line.split_whitespace())
}

/// A model directory of a few thousand parameters, exact in bf16, in a folder with room for others.
struct Tiny {
    folder: TempDir,
    config: ModelConfig,
}

impl Tiny {
    fn new() -> Self {
        let mut config = preset("qwen2.5-0.5b").unwrap();
        config.vocab_size = 40;
        config.hidden_size = 16;
        config.intermediate_size = 24;
        config.layer_count = 2;
        config.query_heads = 4;
        config.kv_heads = 2;
        config.head_dim = 4;
        config.max_positions = 32;
        let tiny = Self { folder: TempDir::new().unwrap(), config };
        let options = SaveOptions { dtype: WeightDtype::F32, ..SaveOptions::default() };
        save::<f32, _>(&tiny.path("model"), &tiny.config, &options, |_, elements, dest| {
            for (value, index) in dest.iter_mut().zip(elements) {
                *value = (index % 255) as f32 / 64.0 - 1.0;
            }
            Ok(())
        })
        .unwrap();
        tiny
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn export(&self, output: &str, options: &[&str]) -> Done {
        let (input, output) = (self.path("model"), self.path(output));
        let paths = [OsStr::new("export"), input.as_os_str(), output.as_os_str()];
        storm(paths.into_iter().chain(options.iter().map(OsStr::new)))
    }

    /// Opens a directory, which must have the weights of the model.
    #[track_caller]
    fn check(&self, name: &str, dtype: Dtype) {
        let directory = HfDirectory::open(&self.path(name)).unwrap();
        assert_eq!(directory.model(), &self.config);
        for tensor in directory.names() {
            assert_eq!(directory.tensor(tensor).unwrap().dtype, dtype, "{tensor}");
        }
        for spec in parameters(&self.config) {
            let mut values = vec![0f32; spec.element_count()];
            load_parameter(&directory, &spec, &mut values).unwrap();
            let expected = (0..values.len()).map(|index| (index % 255) as f32 / 64.0 - 1.0);
            assert!(values.iter().copied().eq(expected), "{}", spec.name);
        }
    }
}

/// All files of a folder with their contents.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

fn shard_count(folder: &Path) -> usize {
    let is_shard = |path: &&PathBuf| path.extension().is_some_and(|ext| ext == "safetensors");
    contents(folder).keys().filter(is_shard).count()
}

#[test]
fn help_names_the_commands() {
    let help = words("--help").succeeded();
    for command in ["model", "export", "data", "plan", "bench", "probe", "doctor", "verify"] {
        let named = help.lines().any(|line| line.trim_start().starts_with(command));
        assert!(named, "{command} is not in:\n{help}");
    }
    // Undoes the wrapping to the terminal.
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for code in ["0 done", "1 failure", "2 usage", "3 does not fit", "4 bad input"] {
        assert!(help.contains(code), "{code} is not in: {help}");
    }
}

#[test]
fn presets_are_listed_and_shown() {
    let list = words("model list").succeeded();
    for name in preset_names() {
        assert!(list.lines().any(|line| line.split(' ').next() == Some(name)), "{name}: {list}");
    }
    let shown = words("model show qwen2.5-0.5b").succeeded();
    assert!(shown.contains("494,032,768"), "{shown}");
    let tiny = Tiny::new();
    let path = tiny.path("model");
    let shown = storm([OsStr::new("model"), OsStr::new("show"), path.as_os_str()]).succeeded();
    assert!(shown.contains("all tensors present"), "{shown}");
}

#[test]
fn wrong_calls() {
    words("model show qwen2.5-0.5").failed(4, &["did you mean qwen2.5-0.5b?"]);
    words("model list --frobnicate").failed(2, &["--frobnicate"]);
    words("frobnicate").failed(2, &["frobnicate"]);
    words("export a b --shard-size 5parsecs").failed(2, &["parsecs"]);
    words("bench cpu --steps 0").failed(2, &["--steps"]);
}

#[test]
fn exports_hold_the_same_weights() {
    let tiny = Tiny::new();
    for (name, dtype) in [("f32", Dtype::F32), ("bf16", Dtype::BF16)] {
        let said = tiny.export(name, &["--dtype", name, "--shard-size", "4KiB"]).succeeded();
        assert!(said.contains(&tiny.config.parameter_count().to_string()), "{said}");
        assert!(shard_count(&tiny.path(name)) > 1);
        tiny.check(name, dtype);
    }
    tiny.export("default", &[]).succeeded();
    assert_eq!(shard_count(&tiny.path("default")), 1);
    tiny.check("default", Dtype::BF16);
}

#[test]
fn exports_replace_only_when_told() {
    let tiny = Tiny::new();
    tiny.export("out", &["--dtype", "f32"]).succeeded();
    let before = contents(&tiny.path("out"));
    let refused = tiny.export("out", &["--dtype", "bf16"]);
    assert_ne!(refused.code, Some(0));
    assert!(refused.stderr.contains("out"), "{}", refused.stderr);
    assert!(contents(&tiny.path("out")) == before, "the refused export changed the directory");
    tiny.export("out", &["--dtype", "bf16", "--replace"]).succeeded();
    tiny.check("out", Dtype::BF16);
    // Nothing half-written is left beside it.
    assert_eq!(fs::read_dir(tiny.folder.path()).unwrap().count(), 2);
    // A folder that is not a model is not replaced.
    fs::create_dir(tiny.path("photos")).unwrap();
    fs::write(tiny.path("photos").join("cat.jpg"), "meow").unwrap();
    assert_ne!(tiny.export("photos", &["--replace"]).code, Some(0));
    assert_eq!(fs::read(tiny.path("photos").join("cat.jpg")).unwrap(), b"meow");
}

#[test]
fn inputs_that_are_no_models() {
    let tiny = Tiny::new();
    let model = tiny.path("model");
    fs::remove_file(model.join("model.safetensors")).unwrap();
    fs::write(model.join("pytorch_model.bin"), b"\x80\x02}q\x00X\x04\x00\x00\x00evil.").unwrap();
    tiny.export("out", &[]).failed(4, &["pytorch_model.bin", "pickle"]);
    fs::remove_file(model.join("config.json")).unwrap();
    tiny.export("out", &[]).failed(4, &["pytorch_model.bin", "pickle"]);
    fs::remove_dir_all(&model).unwrap();
    tiny.export("out", &[]).failed(4, &["model"]);
    assert!(!tiny.path("out").exists());
}

#[test]
fn what_needs_a_gpu_says_so() {
    if Path::new("/proc/driver/nvidia").exists() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("profile.json");
    words("verify").failed(1, &["driver"]);
    words("bench train --layers 1").failed(1, &["driver"]);
    storm([OsStr::new("probe"), OsStr::new("--out"), out.as_os_str()])
        .failed(1, &["no NVIDIA driver was found", "nvidia-smi"]);
    assert!(!out.exists(), "a profile of nothing");
}

#[test]
fn probe_looks_at_its_output_first() {
    let help = words("probe --help").succeeded();
    for option in ["--out", "--quick", "--gpu"] {
        assert!(help.contains(option), "{option} is not in:\n{help}");
    }
    words("probe --out /no/such/folder/profile.json").failed(1, &["/no/such/folder", "folder"]);
    words("probe --out /").failed(4, &["does not name a file"]);
    words("probe --gpu many").failed(2, &["--gpu"]);
    words("probe --device cpu --quick").failed(2, &["--quick is for GPUs"]);
    words("probe --device cpu --gpu 0").failed(2, &["--gpu is for GPUs"]);
}

#[test]
fn the_training_bench_prints_json() {
    let line = "bench train --device cpu --model gpt2 --layers 1 --batch 1 --seq 8 --accumulate 1 \
                --chunk-rows 8 --precision f32 --steps 1 --warmup 0 --json";
    let line = words(line).succeeded();
    let result: serde_json::Value = serde_json::from_str(&line).unwrap();
    for figure in ["tokens_per_second", "matrix_tflops", "gemm_tflops"] {
        assert!(result[figure].as_f64().unwrap() > 0.0, "{line}");
    }
    // It uses no GPU.
    for figure in ["launch_seconds", "launch_share", "driver_bytes"] {
        assert!(result[figure].is_null(), "{line}");
    }
}

/// A benchmark wears a drive as a run does, and says how it accesses the disk.
#[test]
fn the_training_bench_asks_about_wear() {
    let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let line = format!(
        "bench train --device cpu --model gpt2 --layers 2 --batch 1 --seq 8 --accumulate 1 --chunk-rows 8 --vram 1GiB --ram 2GiB \
         --hardware reference --steps 1 --warmup 0 --optimizer-state streamed --on-disk moments --disk-space 1GiB --disk {}",
        folder.path().display()
    );
    let worn = format!("{line} --disk-endurance 1MB");
    let much = "of what the drive is rated for";
    words(&worn).failed(2, &[much, "--accept-wear true"]);
    let done = words(&format!("{worn} --accept-wear true"));
    let said = done.stderr.clone();
    done.succeeded();
    assert!(said.contains(much) && said.contains("the disk is accessed by "), "{said}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    words("bench train --device cpu --disk-endurance 1TB").failed(2, &["--vram"]);
}

#[test]
fn the_checkpoint_bench_prints_json_and_leaves_nothing() {
    let folder = TempDir::new().unwrap();
    let line = "bench checkpoint --device cpu --model gpt2 --layers 1 --batch 1 --seq 8 --accumulate 1 \
                --chunk-rows 8 --vram 1GiB --ram 2GiB --steps 1 --warmup 0 --rounds 1 --json --dir";
    let args = line.split_whitespace().map(OsStr::new);
    let line = storm(args.chain([folder.path().as_os_str()])).succeeded();
    let result: serde_json::Value = serde_json::from_str(&line).unwrap();
    for figure in ["step_seconds", "snapshot_seconds", "written_seconds", "pause_seconds"] {
        assert!(result[figure].as_f64().unwrap() > 0.0, "{line}");
    }
    assert!(result["overhead_share"].is_f64() && result["save_every_min"].is_u64(), "{line}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A run under a budget too small for everything, and its last step as a page and for Perfetto.
#[test]
fn the_training_bench_shows_its_last_step() {
    let folder = TempDir::new().unwrap();
    let [report, trace] = ["step.html", "step.json"].map(|name| folder.path().join(name));
    let line = "bench train --device cpu --model gpt2 --layers 1 --batch 1 --seq 8 --accumulate 2 \
                --chunk-rows 8 --precision f32 --vram 500MiB --ram 2GiB --steps 1 --warmup 0 --report";
    let args = line.split_whitespace().map(OsStr::new);
    let files = [report.as_os_str(), OsStr::new("--trace"), trace.as_os_str()];
    storm(args.chain(files)).succeeded();
    let page = fs::read_to_string(&report).unwrap();
    for part in ["gpt2", "host to device", "device to host", "optimizer state to the device"] {
        assert!(page.contains(part), "{part} is not in the report");
    }
    let (_, data) = page.split_once("id=\"data\">").unwrap();
    let (data, _) = data.split_once("</script>").unwrap();
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    let of_instructions = data["instructions"]["kind"].as_array().unwrap();
    for kind in ["forward", "backward", "optimizer", "optimizer-state", "inputs"] {
        let kinds = data["kinds"].as_array().unwrap();
        let number = kinds.iter().position(|entry| entry[0] == kind).unwrap();
        assert!(of_instructions.iter().any(|of| *of == number), "nothing is {kind}");
    }
    assert!(fs::read_to_string(&trace).unwrap().contains("traceEvents"));

    words("bench train --device cpu --report x.html").failed(2, &["--vram"]);
    let line = "bench train --device cpu --vram 1GiB --report /no/such/folder/x.html";
    words(line).failed(1, &["/no/such/folder"]);
}

#[test]
fn the_cpu_bench_prints_json() {
    let line = words("bench cpu --steps 1 --warmup 0 --json").succeeded();
    let result: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert!(result["tokens_per_second"].as_f64().unwrap() > 0.0, "{line}");
    assert!(result["loss"].as_f64().unwrap() > 0.0, "{line}");
}
