//! Models with weights or results that are not finite: `eval` and `sample` say so, as training
//! does.

use crate::support::Place;
use serde_json::Value;
use std::fs;
use std::process::Command;

const NAN: [u8; 2] = [0xc0, 0x7f];

/// About 3e38, near the maximum of bf16.
const HUGE: [u8; 2] = [0x61, 0x7f];

/// Changes bf16 values of a tensor in the saved model of a run.
fn overwrite(place: &Place, tensor: &str, elements: std::ops::Range<usize>, value: [u8; 2]) {
    let path = place.run_folder("a").join("model/model.safetensors");
    let mut bytes = fs::read(&path).expect("a model");
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_bytes]).expect("a header");
    assert_eq!(header[tensor]["dtype"], "BF16", "{header:#}");
    let start = header[tensor]["data_offsets"][0].as_u64().expect("an offset") as usize;
    for element in elements {
        let at = 8 + header_bytes + start + 2 * element;
        bytes[at..at + 2].copy_from_slice(&value);
    }
    fs::write(path, bytes).expect("written");
}

/// Fails unless the command ends with this code, and its errors have these parts.
#[track_caller]
fn check(place: &Place, args: &str, code: i32, parts: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    let output = command.current_dir(place.path()).args(args.split_whitespace()).output();
    let output = output.expect("storm starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args}: {errors}");
    for part in parts {
        assert!(errors.contains(part), "{args}: {part} is not in {errors}");
    }
}

const EVAL: &str = "eval runs/a/model --data runs/a/data --seq 16";
const SAMPLE: &str = "sample runs/a/model --tokenizer bytes --prompt 1 --tokens 2";

#[test]
fn a_weight_that_is_no_number_is_named() {
    let place = Place::new();
    place.run("a", &["--steps", "1"]).succeeded();
    overwrite(&place, "transformer.h.1.mlp.c_fc.bias", 3..4, NAN);
    let parts = ["the parameter `layers.1.mlp.up.bias` has NaN at element 3"];
    for command in [EVAL, SAMPLE] {
        check(&place, command, 4, &parts);
        check(&place, &format!("{command} --dtype bf16"), 4, &parts);
    }
    let train = "train --name b --model runs/a/model --data runs/a/data --seq 16 --steps 1 --device cpu \
                 --hardware reference --vram 1GiB --ram 1GiB --threads 1";
    check(&place, train, 4, &parts);
}

#[test]
fn a_result_that_is_no_number_is_an_error() {
    let place = Place::new();
    place.run("a", &["--steps", "1"]).succeeded();
    for tensor in ["transformer.ln_f.weight", "transformer.ln_f.bias"] {
        overwrite(&place, tensor, 0..16, HUGE);
    }
    check(&place, EVAL, 1, &["the loss of the model is", "all of its parameters are finite"]);
    check(&place, SAMPLE, 1, &["logit of the model is", "all of its parameters are finite"]);
}
