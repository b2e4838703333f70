//! Directories of quantized weights, as compressed-tensors and bitsandbytes leave them: what they stand for, and damage.

use std::fs;
use std::path::Path;

use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use storm_model::{
    Family, HfConfig, HfDirectory, ParameterSource, Quantization, Remark, parameters,
};

use crate::directory::{Tensors, edit, model, open};
use crate::support::Random;

/// The code points of NF4 and the map that magnitudes are quantized with, as a test needs it: any will do.
const POINTS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// What a directory is changed to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Channel,
    Group(usize),
    Tensor,
    Scb,
    Nf4 { nested: bool },
}

impl Form {
    fn config(self) -> Value {
        let weights = |strategy: &str, group: Option<usize>| {
            json!({
                "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
                "quantization_status": "compressed", "kv_cache_scheme": null,
                "config_groups": {"group_0": {
                    "targets": ["Linear"], "input_activations": {"num_bits": 8, "dynamic": true},
                    "weights": {"num_bits": 8, "type": "int", "symmetric": true, "strategy": strategy,
                                "group_size": group, "dynamic": false, "actorder": null},
                }},
            })
        };
        match self {
            Form::Channel => weights("channel", None),
            Form::Tensor => weights("tensor", None),
            Form::Group(size) => weights("group", Some(size)),
            Form::Scb => json!({
                "quant_method": "bitsandbytes", "load_in_8bit": true, "load_in_4bit": false,
                "llm_int8_threshold": 6.0,
            }),
            Form::Nf4 { nested } => json!({
                "quant_method": "bitsandbytes", "load_in_8bit": false, "load_in_4bit": true,
                "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested,
                "bnb_4bit_quant_storage": "uint8",
            }),
        }
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Replaces every projection by random codes, and returns what they stand for.
fn quantize(path: &Path, form: Form, seed: u64) -> Vec<(String, Vec<f64>)> {
    let config_path = path.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&config_path).unwrap()).unwrap();
    config["quantization_config"] = form.config();
    fs::write(&config_path, config.to_string()).unwrap();
    let mut random = Random(seed);
    let mut expected = Vec::new();
    edit(path, |tensors| {
        let names: Vec<String> =
            tensors.keys().filter(|name| name.ends_with("_proj.weight")).cloned().collect();
        assert!(!names.is_empty());
        for name in names {
            let shape = tensors[&name].1.clone();
            expected.push((name.clone(), replace(tensors, &name, &shape, form, &mut random)));
        }
    });
    expected
}

fn replace(
    tensors: &mut Tensors,
    name: &str,
    shape: &[usize],
    form: Form,
    random: &mut Random,
) -> Vec<f64> {
    let (rows, columns) = (shape[0], shape[1]);
    let count = rows * columns;
    let mut scale = || 0.01 + random.below(1000) as f32 / 50_000.0;
    if let Form::Nf4 { nested } = form {
        let (block, nested_block) = (64, 256);
        let blocks = count.div_ceil(block);
        let offset = 0.015_625;
        let map: Vec<f32> = (0..256).map(|i| (i as f32 - 127.0) / 128.0).collect();
        let nested_scales: Vec<f32> = (0..blocks.div_ceil(nested_block)).map(|_| scale()).collect();
        let magnitudes: Vec<f32> = (0..blocks).map(|_| scale()).collect();
        let magnitude_codes: Vec<u8> = (0..blocks).map(|_| random.below(256) as u8).collect();
        let codes: Vec<u8> = (0..count).map(|_| random.below(16) as u8).collect();
        let bytes = codes.chunks(2).map(|pair| pair[0] << 4 | pair.get(1).copied().unwrap_or(0));
        let bytes: Vec<u8> = bytes.collect();
        tensors.insert(name.to_owned(), (Dtype::U8, vec![bytes.len(), 1], bytes));
        let mut part = |suffix: &str, dtype, shape: usize, data: Vec<u8>| {
            tensors.insert(format!("{name}.{suffix}"), (dtype, vec![shape], data));
        };
        part("quant_map", Dtype::F32, 16, floats(&POINTS));
        let mut state = json!({
            "quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": shape,
        });
        match nested {
            true => {
                part("absmax", Dtype::U8, blocks, magnitude_codes.clone());
                part("nested_absmax", Dtype::F32, nested_scales.len(), floats(&nested_scales));
                part("nested_quant_map", Dtype::F32, 256, floats(&map));
                state["nested_blocksize"] = json!(nested_block);
                state["nested_offset"] = json!(offset);
                state["nested_dtype"] = json!("float32");
            }
            false => part("absmax", Dtype::F32, blocks, floats(&magnitudes)),
        }
        let state = state.to_string().into_bytes();
        part("quant_state.bitsandbytes__nf4", Dtype::U8, state.len(), state);
        let magnitude = |at: usize| match nested {
            true => {
                let scale = f64::from(nested_scales[at / nested_block]);
                f64::from(map[usize::from(magnitude_codes[at])]) * scale + offset
            }
            false => f64::from(magnitudes[at]),
        };
        let value = |at: usize| f64::from(POINTS[usize::from(codes[at])]) * magnitude(at / block);
        return (0..count).map(value).collect();
    }
    let (block, divisor) = match form {
        Form::Channel => (columns, 1.0),
        // Where groups divide a row; else one for all of it.
        Form::Group(size) if columns.is_multiple_of(size) => (size, 1.0),
        Form::Group(_) => (columns, 1.0),
        Form::Tensor => (count, 1.0),
        _ => (columns, 127.0),
    };
    let scales: Vec<f32> = (0..count / block).map(|_| scale()).collect();
    let codes: Vec<i8> = (0..count).map(|_| random.below(255) as i8).collect();
    let bytes = codes.iter().map(|code| code.cast_unsigned()).collect();
    tensors.insert(name.to_owned(), (Dtype::I8, shape.to_vec(), bytes));
    let module = name.strip_suffix("weight").unwrap();
    match form {
        Form::Scb => {
            tensors.insert(format!("{module}SCB"), (Dtype::F32, vec![rows], floats(&scales)));
            tensors.insert(format!("{module}weight_format"), (Dtype::U8, vec![], vec![0]));
        }
        _ => {
            let shape = if form == Form::Tensor { vec![1] } else { vec![rows, columns / block] };
            tensors.insert(format!("{name}_scale"), (Dtype::F32, shape, floats(&scales)));
        }
    }
    let value = |at: usize| f64::from(codes[at]) * f64::from(scales[at / block]) / divisor;
    (0..count).map(value).collect()
}

const FORMS: [Form; 6] = [
    Form::Channel,
    Form::Group(4),
    Form::Tensor,
    Form::Scb,
    Form::Nf4 { nested: false },
    Form::Nf4 { nested: true },
];

/// A directory that [`quantize`] changed.
fn quantized(form: Form) -> (tempfile::TempDir, std::path::PathBuf, Vec<(String, Vec<f64>)>) {
    let (folder, path) = model(Family::Qwen2);
    let expected = quantize(&path, form, 11);
    (folder, path, expected)
}

#[test]
fn values_are_what_the_codes_stand_for() {
    for form in FORMS {
        let (_folder, path, expected) = quantized(form);
        let directory = open(&path).unwrap_or_else(|error| panic!("{form:?}: {error}"));
        let by = match form {
            Form::Scb => Quantization::BitsAndBytes8,
            Form::Nf4 { .. } => Quantization::BitsAndBytesNf4,
            _ => Quantization::CompressedInt8,
        };
        assert_eq!(directory.config().quantization(), Some(by));
        let remark = Remark::Quantized { by, tensors: expected.len() };
        assert!(directory.remarks().contains(&remark), "{form:?}");
        for (name, expected) in &expected {
            let mut values = vec![0f32; expected.len()];
            directory.read(name, &mut values).unwrap();
            let expected: Vec<f32> = expected.iter().map(|&value| value as f32).collect();
            assert_eq!(values, expected, "{form:?} {name}");
            let mut narrow = vec![half::bf16::ZERO; expected.len()];
            directory.read(name, &mut narrow).unwrap();
            let close = |(a, b): (&half::bf16, &f32)| (a.to_f32() - b).abs() <= b.abs() / 200.0;
            assert!(narrow.iter().zip(&expected).all(close), "{form:?} {name}");
        }
    }
}

/// Rows by themselves are rows of the whole, whatever blocks they cut.
#[test]
fn rows_are_read_by_themselves() {
    for form in FORMS {
        let (_folder, path, _) = quantized(form);
        let directory = open(&path).unwrap();
        for spec in parameters(directory.model()) {
            let mut whole = vec![0f32; spec.element_count()];
            directory.load(&spec, &mut whole).unwrap();
            let row = spec.row_elements();
            for start in (0..spec.rows().end).step_by(3) {
                let rows = start..spec.rows().end.min(start + 3);
                let mut part = vec![0f32; rows.len() * row];
                directory.load_rows(&spec, rows.clone(), &mut part).unwrap();
                assert_eq!(part, whole[rows.start * row..rows.end * row], "{form:?} {}", spec.name);
            }
        }
    }
}

fn error(path: &Path, form: Form, change: impl FnOnce(&mut Tensors)) -> String {
    edit(path, change);
    let opened = HfDirectory::open(path).and_then(|directory| {
        for spec in parameters(directory.model()) {
            directory.load(&spec, &mut vec![0f32; spec.element_count()])?;
        }
        Ok(())
    });
    match opened {
        Ok(()) => panic!("{form:?} was read"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn damage_is_named() {
    const WEIGHT: &str = "model.layers.1.mlp.up_proj.weight";
    type Change = fn(&mut Tensors);
    fn set_last(tensors: &mut Tensors, name: &str, value: f32) {
        let (_, _, data) = tensors.get_mut(name).unwrap();
        let end = data.len();
        data[end - 4..].copy_from_slice(&value.to_le_bytes());
    }
    fn state(tensors: &mut Tensors, field: &str, value: Value) {
        let name = format!("{WEIGHT}.quant_state.bitsandbytes__nf4");
        let (_, shape, data) = tensors.get_mut(&name).unwrap();
        let mut json: Value = serde_json::from_slice(data).unwrap();
        json[field] = value;
        *data = json.to_string().into_bytes();
        *shape = vec![data.len()];
    }
    let nested = Form::Nf4 { nested: true };
    let cases: Vec<(Form, Change, &str)> = vec![
        (Form::Channel, |t| set_last(t, &format!("{WEIGHT}_scale"), f32::NAN), "scales is NaN"),
        (Form::Group(4), |t| set_last(t, &format!("{WEIGHT}_scale"), f32::INFINITY), "is inf"),
        (Form::Channel, |t| drop(t.remove(&format!("{WEIGHT}_scale"))), "there is no"),
        (
            Form::Channel,
            |t| drop(t.insert(format!("{WEIGHT}_scale"), (Dtype::F32, vec![5], vec![0; 20]))),
            "5 scales for",
        ),
        (
            Form::Channel,
            |t| drop(t.insert(format!("{WEIGHT}_scale"), (Dtype::U8, vec![17], vec![1; 17]))),
            "its scales are U8",
        ),
        (
            Form::Channel,
            |t| drop(t.insert(format!("{WEIGHT}_zero_point"), (Dtype::I8, vec![17], vec![1; 17]))),
            "a form that STORM does not read",
        ),
        (
            Form::Scb,
            |t| {
                drop(t.insert(
                    "model.layers.1.mlp.up_proj.weight_format".into(),
                    (Dtype::U8, vec![], vec![2]),
                ))
            },
            "a form that STORM does not read",
        ),
        (Form::Scb, |t| drop(t.remove("model.layers.1.mlp.up_proj.SCB")), "there is no"),
        (nested, |t| set_last(t, &format!("{WEIGHT}.nested_absmax"), f32::NAN), "scales is NaN"),
        (nested, |t| set_last(t, &format!("{WEIGHT}.quant_map"), f32::NAN), "no numbers"),
        (nested, |t| drop(t.remove(&format!("{WEIGHT}.nested_quant_map"))), "there is no"),
        (nested, |t| state(t, "blocksize", json!(0)), "blocksize is 0"),
        (nested, |t| state(t, "blocksize", json!(128)), "magnitudes for"),
        (nested, |t| state(t, "nested_offset", Value::Null), "nested_offset"),
        (nested, |t| state(t, "quant_type", json!("fp4")), "quant_type is fp4"),
        (nested, |t| state(t, "shape", json!([u64::MAX, 2])), "not that of a matrix"),
        (nested, |t| state(t, "shape", json!([3, 3])), "codes"),
        (nested, |t| state(t, "shape", json!([12, 17])), "found [12, 17], expected [17, 12]"),
        (nested, |t| state(t, "shape", json!("x")), "JSON"),
    ];
    for (form, change, part) in cases {
        let (_folder, path, _) = quantized(form);
        let error = error(&path, form, change);
        assert!(error.contains(part), "{form:?}: `{part}` is not in: {error}");
        let names_it = error.contains("up_proj") || error.contains("JSON");
        assert!(names_it, "{form:?}: {error}");
    }
}

#[test]
fn other_quantizations_are_refused_by_name() {
    let mut group = Form::Channel.config();
    let change = |pointer: &str, value: Value| {
        let mut config = Form::Channel.config();
        *config.pointer_mut(pointer).unwrap() = value;
        config
    };
    let weights = "/config_groups/group_0/weights";
    let cases = [
        (json!({"quant_method": "gptq", "bits": 4}), "gptq"),
        (json!({"bits": 4}), "method not named"),
        (change("/format", json!("pack-quantized")), "pack-quantized"),
        (change("/format", json!("float-quantized")), "float-quantized"),
        (change(&format!("{weights}/num_bits"), json!(4)), "num_bits is 4"),
        (change(&format!("{weights}/type"), json!("float")), "type is"),
        (change(&format!("{weights}/symmetric"), json!(false)), "symmetric is false"),
        (change(&format!("{weights}/strategy"), json!("block")), "strategy is"),
        (change(&format!("{weights}/actorder"), json!("group")), "actorder is"),
        (change("/config_groups", json!({})), "config_groups"),
        (json!({"quant_method": "bitsandbytes"}), "load_in_4bit"),
        (
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "fp4"}),
            "fp4",
        ),
    ];
    group["sparsity_config"] = json!({"format": "sparse-24-bitmask"});
    for (quantization, part) in cases.into_iter().chain([(group, "sparsity_config")]) {
        let (_folder, path) = model(Family::Llama);
        let config_path = path.join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&config_path).unwrap()).unwrap();
        config["quantization_config"] = quantization;
        fs::write(&config_path, config.to_string()).unwrap();
        let error = HfConfig::of_directory(&path).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("dequantize"), "{part}: {error}");
    }
}
