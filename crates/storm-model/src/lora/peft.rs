//! adapter_config.json, as PEFT writes it.

use super::{LoraOptions, Targets};
use crate::error::clip;
use crate::{Family, ModelConfig, ModelError};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Fields that do not change the results of a trained adapter.
const HARMLESS: [&str; 13] = [
    "auto_mapping",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "lora_dropout",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];

/// Initializations that leave the base weights unchanged. Others change them, so the adapter alone
/// does not define the model.
const STARTS: [&str; 4] = ["gaussian", "eva", "orthogonal", "true"];

/// The content of an adapter_config.json.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PeftConfig {
    pub(super) options: LoraOptions,
    /// The base model: a directory or a name on a hub.
    pub(super) base: Option<String>,
}

/// Reads and checks the fields.
pub(super) fn read(path: &Path, map: &Map<String, Value>) -> Result<PeftConfig, ModelError> {
    Reader { path, map }.read()
}

struct Reader<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

impl Reader<'_> {
    fn read(&self) -> Result<PeftConfig, ModelError> {
        if self.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return self.refuse_field("peft_type", "only LORA adapters are supported");
        }
        if self.get("task_type").is_some_and(|task| task.as_str() != Some("CAUSAL_LM")) {
            return self.refuse_field("task_type", "only CAUSAL_LM is supported");
        }
        if self.get("bias").is_some_and(|bias| bias.as_str() != Some("none")) {
            return self
                .refuse_field("bias", "trained biases are not supported; train with \"none\"");
        }
        match self.get("init_lora_weights") {
            None | Some(Value::Bool(_)) => {}
            Some(Value::String(start)) if STARTS.contains(&start.to_lowercase().as_str()) => {}
            Some(_) => {
                return self.refuse_field(
                    "init_lora_weights",
                    "it changes the weights of the base; convert the adapter to plain LoRA in PEFT",
                );
            }
        }
        let options = LoraOptions {
            rank: self.count("r", self.map.get("r").unwrap_or(&Value::Null))?,
            alpha: self.number("lora_alpha", self.map.get("lora_alpha").unwrap_or(&Value::Null))?,
            dropout: match self.get("lora_dropout") {
                Some(dropout) => self.number("lora_dropout", dropout)?,
                None => 0.0,
            },
            targets: self.targets()?,
            rslora: self.flag("use_rslora")?,
            modules_to_save: match self.get("modules_to_save") {
                Some(names) => self.names("modules_to_save", names)?,
                None => Vec::new(),
            },
            rank_pattern: self.patterns("rank_pattern", Self::count)?,
            alpha_pattern: self.patterns("alpha_pattern", Self::number)?,
        };
        self.refuse_unknown()?;
        let base = self.get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned);
        Ok(PeftConfig { options, base: base.filter(|base| !base.is_empty()) })
    }

    /// Rejects other fields, which might change the result, unless their value has no effect.
    fn refuse_unknown(&self) -> Result<(), ModelError> {
        const READ: [&str; 12] = [
            "peft_type",
            "task_type",
            "bias",
            "init_lora_weights",
            "r",
            "lora_alpha",
            "target_modules",
            "use_rslora",
            "modules_to_save",
            "rank_pattern",
            "alpha_pattern",
            "base_model_name_or_path",
        ];
        let says_nothing = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(values) => values.is_empty(),
            Value::Object(values) => values.is_empty(),
            _ => false,
        };
        let is_known = |name: &str| READ.contains(&name) || HARMLESS.contains(&name);
        match self.map.iter().find(|(name, value)| !is_known(name) && !says_nothing(value)) {
            None => Ok(()),
            Some((name, _)) => self.refuse_field(name, "STORM does not support it"),
        }
    }

    fn targets(&self) -> Result<Targets, ModelError> {
        match self.get("target_modules") {
            Some(Value::String(text)) if text == "all-linear" => Ok(Targets::AllLinear),
            Some(Value::String(pattern)) => Ok(Targets::Pattern(pattern.clone())),
            Some(names) => Ok(Targets::Names(self.names("target_modules", names)?)),
            None => self.refuse_field("target_modules", "it must name the adapted modules"),
        }
    }

    fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn flag(&self, field: &str) -> Result<bool, ModelError> {
        match self.get(field) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => self.refuse_field(field, "it must be true or false"),
        }
    }

    fn count(&self, field: &str, value: &Value) -> Result<usize, ModelError> {
        match value.as_u64().and_then(|count| usize::try_from(count).ok()) {
            Some(count) => Ok(count),
            None => self.refuse_field(field, "it must be a whole number"),
        }
    }

    fn number(&self, field: &str, value: &Value) -> Result<f64, ModelError> {
        match value.as_f64() {
            Some(number) => Ok(number),
            None => self.refuse_field(field, "it must be a number"),
        }
    }

    fn names(&self, field: &str, value: &Value) -> Result<Vec<String>, ModelError> {
        let list = value.as_array().map(|names| names.iter().map(Value::as_str).collect());
        match list {
            Some(Some(names)) => {
                let names: Vec<&str> = names;
                Ok(names.into_iter().map(str::to_owned).collect())
            }
            _ => self.refuse_field(field, "it must be a list of names"),
        }
    }

    fn patterns<T>(
        &self,
        field: &str,
        read: impl Fn(&Self, &str, &Value) -> Result<T, ModelError>,
    ) -> Result<BTreeMap<String, T>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(BTreeMap::new()) };
        let Some(map) = value.as_object() else {
            return self.refuse_field(field, "it must be an object");
        };
        map.iter().map(|(name, value)| Ok((name.clone(), read(self, field, value)?))).collect()
    }

    fn refuse_field<T>(&self, field: &str, rule: &str) -> Result<T, ModelError> {
        let value = self.map.get(field).map_or("absent".to_owned(), Value::to_string);
        let problem = format!("`{}` is {}; {rule}", clip(field), clip(&value));
        Err(ModelError::BadAdapter { path: self.path.to_owned(), problem })
    }
}

/// Writes the fields in PEFT's format.
pub(super) fn write(config: &ModelConfig, options: &LoraOptions, base: Option<&str>) -> Value {
    let targets = match &options.targets {
        // PEFT replaces `all-linear` with the names of the projections.
        Targets::AllLinear => json!(all_linear(config)),
        Targets::Names(names) => json!(names),
        Targets::Pattern(pattern) => json!(pattern),
    };
    let modules_to_save = match options.modules_to_save.is_empty() {
        true => Value::Null,
        false => json!(options.modules_to_save),
    };
    json!({
        "alpha_pattern": options.alpha_pattern,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": config.family == Family::Gpt2,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "modules_to_save": modules_to_save,
        "peft_type": "LORA",
        "r": options.rank,
        "rank_pattern": options.rank_pattern,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": options.rslora,
    })
}

/// The distinct names of all projections in layers.
fn all_linear(config: &ModelConfig) -> Vec<String> {
    let layout = crate::ParameterLayout::new(config);
    let matrices = layout.layer.iter().filter(|spec| spec.shape.len() == 2);
    let mut names: Vec<String> = matrices
        .flat_map(|spec| &spec.pieces)
        .map(|piece| piece.hf_name.trim_end_matches(".weight"))
        // GPT-2 has `c_proj` in attention and in the MLP. The name covers both.
        .map(|module| module.rsplit('.').next().unwrap_or(module).to_owned())
        .collect();
    names.sort();
    names.dedup();
    names
}
