//! Published models by name.

use storm_model::{Family, ModelError, ParameterLayout, preset, preset_names};

/// Totals as published with the models; tied weights count once.
const PUBLISHED: &[(&str, u64)] = &[
    ("gpt2", 124_439_808),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
    // Published as "175B" only: GPT-2's formula, 12·L·C² + 13·L·C + (V + T + 2)·C.
    ("gpt3-175b", 174_604_259_328),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen2.5-14b", 14_770_033_664),
    ("qwen2.5-32b", 32_763_876_352),
    ("qwen2.5-72b", 72_706_203_648),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-4b", 4_022_468_096),
    ("qwen3-8b", 8_190_735_360),
    ("llama-2-7b", 6_738_415_616),
    ("llama-2-13b", 13_015_864_320),
    ("llama-2-70b", 68_976_648_192),
    ("llama-3.1-8b", 8_030_261_248),
    ("llama-3.1-70b", 70_553_706_496),
    // Not published: the 70B model with 56 of its 80 layers.
    ("llama-50b", 50_018_000_896),
    ("llama-3.2-1b", 1_235_814_400),
    ("mistral-7b", 7_248_023_552),
];

#[test]
fn parameter_counts_are_the_published_ones() {
    assert_eq!(preset_names().count(), PUBLISHED.len());
    for (name, count) in PUBLISHED {
        let config = preset(name).unwrap();
        config.validate().unwrap();
        assert_eq!(config.parameter_count(), *count, "{name}");
    }
}

#[test]
fn the_layout_holds_as_many_parameters_as_the_config_counts() {
    for name in preset_names() {
        let config = preset(name).unwrap();
        let layout = ParameterLayout::new(&config);
        let sum = |specs: &[storm_model::ParameterSpec]| {
            specs.iter().map(|spec| spec.element_count() as u64).sum::<u64>()
        };
        assert_eq!(sum(&layout.layer), config.layer_parameter_count(), "{name}");
        let total = sum(&layout.prologue)
            + sum(&layout.layer) * config.layer_count as u64
            + sum(&layout.epilogue);
        assert_eq!(total, config.parameter_count(), "{name}");
    }
}

#[test]
fn details_of_presets() {
    let qwen = preset("Qwen2.5-7B").unwrap();
    assert_eq!((qwen.family, qwen.head_dim, qwen.qkv_bias), (Family::Qwen2, 128, true));
    assert_eq!(preset("mistral-7b").unwrap().sliding_window, None);
    assert_eq!(preset("llama-3.2-1b").unwrap().head_dim, 64);
}

#[test]
fn an_unknown_name_suggests_the_closest() {
    for (name, closest) in [
        ("gpt-2", Some("gpt2")),
        ("qwen2.5-7", Some("qwen2.5-7b")),
        ("llama3.1-8b", Some("llama-3.1-8b")),
        ("mistral-7b-v0.3", Some("mistral-7b")),
        ("", None),
        ("something entirely different", None),
    ] {
        let error = preset(name).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("gpt3-175b"), "{message}");
        let ModelError::UnknownPreset { closest: found, .. } = error else { panic!("{message}") };
        assert_eq!(found, closest, "{name}");
    }
    preset(&"x".repeat(1 << 20)).unwrap_err();
}
