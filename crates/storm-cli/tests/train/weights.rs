//! Runs and checkpoints as models: finished, killed, damaged, in progress.

use crate::support::{Place, finish, is, tree};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn storm(place: &Place, args: &str) -> Output {
    storm_in(place.path(), args)
}

fn storm_in(folder: &Path, args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(folder).args(args.split_whitespace());
    command.output().expect("storm starts")
}

#[track_caller]
fn done(output: Output) -> (String, String) {
    let errors = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(0), "{errors}");
    (String::from_utf8(output.stdout).expect("text"), errors)
}

#[track_caller]
fn failed(output: &Output, code: i32, part: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{errors}");
    assert!(errors.contains(part), "{part} is not in: {errors}");
}

const STEPS: [&str; 6] = ["--steps", "6", "--save-every", "2", "--keep-last", "9"];

/// The weights of a checkpoint are those that the run exports, from masters if there are any.
#[test]
fn the_newest_checkpoint_is_the_model_of_its_run() {
    let place = Place::new();
    for (precision, dtype) in [("f32", "f32"), ("bf16-master", "bf16"), ("bf16-stochastic", "bf16")]
    {
        let name = format!("run-{precision}");
        let flags = [&STEPS[..], &["--precision", precision]].concat();
        place.run(&name, &flags).succeeded();
        let args = format!("export runs/{name} out-{precision} --dtype {dtype}");
        let (_, said) = done(storm(&place, &args));
        assert!(said.contains("checkpoint of step 6, the newest"), "{said}");
        // Text is generated in the same precision by the run and by its saved model.
        for (model, why) in [
            (format!("runs/{name}"), format!("the run's precision is {precision}")),
            (format!("runs/{name}/model"), format!("the model's weights are {dtype}")),
        ] {
            let (_, said) = done(storm(&place, &format!("sample {model} --prompt 1 --tokens 1")));
            assert!(said.contains(&format!("precision {dtype}: {why}")), "{said}");
            let args = format!("sample {model} --prompt 1 --tokens 1 --dtype f32");
            let (_, said) = done(storm(&place, &args));
            assert!(!said.contains("precision"), "{said}");
        }
        let read = |folder: &str| fs::read(place.path().join(folder).join("model.safetensors"));
        let expected = read(&format!("runs/{name}/model")).expect("weights");
        assert!(read(&format!("out-{precision}")).expect("weights") == expected, "{precision}");
    }
    // Masters have more digits than the weights used for compute.
    for folder in ["run-bf16-master", "run-bf16-stochastic"] {
        done(storm(&place, &format!("export runs/{folder} {folder}-f32 --dtype f32")));
        let bytes = fs::read(place.path().join(format!("{folder}-f32/model.safetensors")));
        let bytes = bytes.expect("weights");
        let header = u64::from_le_bytes(*bytes.first_chunk().expect("a header")) as usize;
        let has_digits = bytes[8 + header..].chunks(4).any(|value| value[..2] != [0, 0]);
        assert_eq!(has_digits, folder == "run-bf16-master", "{folder}");
    }
}

#[test]
fn a_killed_run_writes_text_and_is_not_touched() {
    let place = Place::new();
    let flags =
        ["--steps", "1000000", "--save-every", "2", "--keep-last", "2", "--eval-every", "2"];
    let mut run = place.start("a", &flags);
    let mut saved = 0;
    while saved < 3 {
        saved += usize::from(is(&run.next().expect("more steps"), "saved"));
        if saved == 2 {
            // While it runs, checkpoints are written and deleted.
            let (text, said) =
                done(storm(&place, "sample runs/a --prompt 12 --tokens 3 --device cpu"));
            assert!(text.starts_with("12") && said.contains("the newest"), "{text}{said}");
            assert!(!said.contains("warning"), "{said}");
            let (page, _) = done(storm(&place, "report runs/a"));
            assert_eq!(page.trim(), "runs/a/report.html");
        }
    }
    run.child.kill().expect("killed");
    run.child.wait().expect("it ends");
    drop(run);
    let before = tree(place.path());
    let args = "--prompt 12 --tokens 8 --temperature 0";
    let (text, _) = done(storm(&place, &format!("sample runs/a {args}")));
    let checkpoints = fs::read_dir(place.run_folder("a").join("checkpoints")).expect("a folder");
    let names = checkpoints.map(|entry| entry.expect("an entry").file_name());
    let names = names.map(|name| name.into_string().expect("text"));
    let newest = names.filter(|name| !name.contains('.')).max().expect("a checkpoint");
    let (same, said) = done(storm(&place, &format!("sample runs/a/checkpoints/{newest} {args}")));
    assert_eq!(text, same);
    assert!(said.contains("checkpoint of step"), "{said}");
    // Also from another folder.
    let (same, _) = done(storm_in(&place.run_folder("a"), &format!("sample . {args}")));
    assert_eq!(text, same);
    assert!(tree(place.path()) == before, "a file was changed");
    done(storm(&place, "report runs/a --out page.html"));
    let page = fs::read_to_string(place.path().join("page.html")).expect("a page");
    assert!(page.contains("<h1>Run a</h1>") && page.contains("held out"), "{page}");
    assert!(page.ends_with("</html>\n"));
}

#[test]
fn other_checkpoints_are_chosen_and_damaged_ones_passed_over() {
    let place = Place::new();
    let flags = [&STEPS[..], &["--eval-every", "2", "--learning-rate", "0.2"]].concat();
    let events = place.run("a", &flags).succeeded();
    let best = events.iter().rfind(|event| event["is_best"] == true).expect("a best one");
    let sample = |more: &str| {
        storm(&place, &format!("sample runs/a --prompt 1 --tokens 12 --temperature 0 {more}"))
    };
    let (newest, _) = done(sample(""));
    let (second, said) = done(sample("--step 2"));
    assert!(said.contains("checkpoint of step 2, as asked for"), "{said}");
    assert_ne!(newest, second);
    let (_, said) = done(sample("--best"));
    let step = &best["step"];
    assert!(said.contains(&format!("checkpoint of step {step}, its best")), "{said}");
    failed(&sample("--step 3"), 4, "it has those of steps 2, 4, 6");
    failed(&sample("--step 3 --best"), 2, "cannot be used with");
    failed(&storm(&place, "sample runs/a/model --best"), 2, "is not the folder of a run");

    let file = |step: u64| {
        place.run_folder("a").join(format!("checkpoints/step-{step:08}/parameters.safetensors"))
    };
    let damage = |step: u64| {
        let mut bytes = fs::read(file(step)).expect("a file");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(file(step), bytes).expect("written");
    };
    damage(6);
    let (_, said) = done(sample(""));
    assert!(said.contains("warning: skipping the checkpoint of step 6"), "{said}");
    assert!(said.contains("checkpoint of step 4, the newest that is intact"), "{said}");
    failed(&sample("--step 6"), 4, "is damaged");
    damage(4);
    damage(2);
    failed(&sample(""), 4, "none of the 3 checkpoints");
    fs::remove_dir_all(place.run_folder("a").join("checkpoints")).expect("removed");
    fs::create_dir(place.run_folder("a").join("checkpoints")).expect("made");
    let (model, said) = done(sample(""));
    assert!(said.contains("taking runs/a/model"), "{said}");
    assert_eq!(model, newest);
    fs::remove_dir_all(place.run_folder("a").join("model")).expect("removed");
    failed(&sample(""), 4, "has no checkpoint yet");
}

/// Only the run knows the results of its plan and the picture of a step.
#[test]
fn a_page_that_is_made_anew_keeps_its_step() {
    let place = Place::new();
    let flags = ["--steps", "3", "--sample-tokens", "4", "--sample-prompt", "12"];
    place.run("a", &flags).succeeded();
    let page = place.run_folder("a").join("report.html");
    let step = |page: &str| page.find("The last plan").map(|at| page[at..].to_owned());
    let before = fs::read_to_string(&page).expect("a page");
    let metrics = place.run_folder("a").join("metrics.jsonl");
    let lines = fs::read_to_string(&metrics).expect("metrics");
    let more = lines.lines().next().expect("a line").replace("\"step\":1,", "\"step\":777,");
    fs::write(&metrics, format!("{lines}{more}\n{{\"half")).expect("written");
    done(storm(&place, "report runs/a"));
    let after = fs::read_to_string(&page).expect("a page");
    assert!(step(&before).is_some_and(|step| step.contains("A step as it ran")));
    assert!(step(&after) == step(&before));
    let has_step = |page: &str| page.contains("<dt>steps</dt><dd>777 of 3</dd>");
    assert!(has_step(&after) && !has_step(&before));
    for part in [
        "<pre class=\"sample\"><b>12</b>",
        "<dt>duration</dt><dd>0:0",
        "<dt>learning rate</dt><dd>0.01, cosine</dd>",
        "<dt>decay-targets</dt><dd>matrices</dd>",
    ] {
        assert!(before.contains(part) && after.contains(part), "{part}");
    }
    failed(&storm(&place, "report runs/a/model"), 4, "has no metrics.jsonl");
}

/// A run that began from a directory has its config and tokenizer, even if called from elsewhere.
#[test]
fn a_run_from_a_directory_has_what_belongs_to_it() {
    let place = Place::new();
    place.run("a", &["--steps", "2"]).succeeded();
    fs::rename(place.run_folder("a").join("model"), place.path().join("began")).expect("moved");
    let flags = "train --json --name b --model began --data text.txt --seq 16 --steps 4 --save-every 2 --device cpu \
                 --vram 64MiB --ram 256MiB --keep-last 9 --threads 1";
    done(storm(&place, flags));
    fs::remove_dir_all(place.run_folder("b").join("model")).expect("removed");
    let args = "--prompt 12 --tokens 8 --temperature 0";
    let (text, _) = done(storm(&place, &format!("sample runs/b {args}")));
    let (same, _) = done(storm_in(&place.run_folder("b"), &format!("sample . {args}")));
    assert_eq!(text, same);
    fs::rename(place.path().join("began"), place.path().join("elsewhere")).expect("moved");
    failed(&storm(&place, &format!("sample runs/b {args}")), 4, "restore the model");
}

/// A run records the commit that it began from, whatever the name means later.
#[test]
fn a_name_on_the_hub_is_taken_from_the_cache() {
    let place = Place::new();
    place.run("a", &["--steps", "2"]).succeeded();
    let repository = place.path().join("hf/hub/models--o--m");
    let [first, second] = ["0123456789abcdef", "fedcba9876543210"];
    fs::create_dir_all(repository.join("snapshots")).expect("made");
    fs::create_dir_all(repository.join("refs")).expect("made");
    let model = place.run_folder("a").join("model");
    fs::rename(&model, repository.join("snapshots").join(first)).expect("moved");
    fs::write(repository.join("refs/main"), first).expect("written");
    let hub = |args: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
        command.current_dir(place.path()).args(args.split_whitespace());
        command.env("HF_HOME", place.path().join("hf")).env("HF_HUB_OFFLINE", "1");
        command.env_remove("HF_HUB_CACHE").output().expect("storm starts")
    };
    let sample = "--prompt 12 --tokens 8 --temperature 0";
    let (text, said) = done(hub(&format!("sample o/m {sample}")));
    assert!(
        said.contains(&format!("o/m: revision {first}, from the Hugging Face cache")),
        "{said}"
    );
    done(hub("model show o/m"));
    let plan = "plan --model o/m --batch 1 --seq 8 --vram 1GiB --ram 256MiB --hardware reference";
    done(hub(plan));
    let train = "train --json --name b --model o/m --data text.txt --seq 16 --save-every 2 --device cpu --vram 64MiB \
                 --ram 256MiB --threads 1 --steps";
    done(hub(&format!("{train} 2")));
    let config = fs::read_to_string(place.run_folder("b").join("config.toml")).expect("a config");
    assert!(config.contains(&format!("model = \"o/m@{first}\"")), "{config}");

    // The name now means something else, but not for the run.
    let snapshots = repository.join("snapshots");
    fs::create_dir(snapshots.join(second)).expect("made");
    for entry in fs::read_dir(snapshots.join(first)).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name");
        fs::copy(&path, snapshots.join(second).join(name)).expect("copied");
    }
    fs::write(repository.join("refs/main"), second).expect("written");
    let (_, said) = done(hub(&format!("{train} 4 --resume")));
    assert!(said.contains(&format!("revision {first}")), "{said}");
    fs::remove_dir_all(place.run_folder("b").join("model")).expect("removed");
    done(hub(&format!("sample runs/b {sample}")));
    failed(&hub("sample o/other"), 4, "HF_HUB_OFFLINE");
    failed(&hub("sample runs/slip"), 4, "cannot use runs/slip");
    // Local files come first.
    fs::create_dir(place.path().join("o")).expect("made");
    fs::rename(snapshots.join(first), place.path().join("o/m")).expect("moved");
    let (same, said) = done(hub(&format!("sample o/m {sample}")));
    assert!(same == text && !said.contains("revision"), "{said}");
}

/// A base model without a head in its files, though its config unties it.
#[test]
fn a_model_without_a_head_starts_a_fresh_one_and_writes_nothing() {
    let place = Place::new();
    place.run("base", &["--steps", "2"]).succeeded();
    let model = place.run_folder("base").join("model");
    let path = model.join("config.json");
    let config = fs::read_to_string(&path).expect("a config");
    let untied =
        config.replace(r#""tie_word_embeddings": true"#, r#""tie_word_embeddings": false"#);
    assert_ne!(config, untied);
    fs::write(&path, untied).expect("a config");
    for command in ["sample runs/base/model --prompt 1", "export runs/base/model out"] {
        failed(&storm(&place, command), 4, "the model has no head");
    }
    let toml = fs::read_to_string(place.path().join("tiny.toml")).expect("a config");
    let of_directory: Vec<&str> = toml
        .lines()
        .filter(|line| {
            !["model", "layers", "width", "heads"].iter().any(|key| line.starts_with(key))
        })
        .collect();
    let toml = format!("model = \"runs/base/model\"\n{}", of_directory.join("\n"));
    fs::write(place.path().join("head.toml"), toml).expect("a config");
    let flags = ["--steps", "1", "--learning-rate", "0", "--other-tokenizer"];
    let run = finish(place.command_of("head.toml", "tuned", &flags));
    assert!(run.stderr.contains("training starts with a fresh head"), "{}", run.stderr);
    run.succeeded();
    // The head is random, and everything else is unchanged.
    let (_, _) = done(storm(&place, "sample runs/tuned/model --prompt 1 --tokens 3"));
    let after =
        fs::read(place.run_folder("tuned").join("model/model.safetensors")).expect("weights");
    let before = fs::read(model.join("model.safetensors")).expect("weights");
    let data = |file: &[u8]| {
        let header = u64::from_le_bytes(*file.first_chunk().expect("a header")) as usize;
        file[8 + header..].to_vec()
    };
    let (before, after) = (data(&before), data(&after));
    assert!(after.starts_with(&before), "weights that were there have changed");
    let head: Vec<&[u8]> = after[before.len()..].chunks(2).collect();
    assert!(head.iter().filter(|value| **value == head[0]).count() < head.len() / 2);
}
