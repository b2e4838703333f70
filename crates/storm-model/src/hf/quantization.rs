//! `quantization_config` of a config.json: the supported formats of quantized weights.

use super::config_fields::show;
use crate::ModelError;
use serde_json::{Map, Value};
use std::fmt;

/// The format of a directory's quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantization {
    /// compressed-tensors: 8-bit codes with scales for rows or groups (`int-quantized`, symmetric).
    CompressedInt8,
    /// bitsandbytes: 8-bit codes with the largest magnitude of each row.
    BitsAndBytes8,
    /// bitsandbytes: NF4 codes with the largest magnitude of each block, which may be quantized
    /// again.
    BitsAndBytesNf4,
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Quantization::CompressedInt8 => "compressed-tensors int8",
            Quantization::BitsAndBytes8 => "bitsandbytes int8",
            Quantization::BitsAndBytesNf4 => "bitsandbytes nf4",
        })
    }
}

impl Quantization {
    /// The format named in a config.json. `None` if the weights are not quantized.
    pub(super) fn of_config(map: &Map<String, Value>) -> Result<Option<Quantization>, ModelError> {
        let Some(value) = map.get("quantization_config").filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let method = value.get("quant_method").and_then(Value::as_str);
        let fields = Fields { method: method.unwrap_or_default(), value };
        match method {
            Some("compressed-tensors") => fields.compressed().map(Some),
            Some("bitsandbytes") => fields.bits_and_bytes().map(Some),
            _ => {
                let named = value.get("quant_method");
                let method = named.map_or_else(|| "method not named".into(), show);
                Err(ModelError::Quantized { method })
            }
        }
    }
}

struct Fields<'a> {
    method: &'a str,
    value: &'a Value,
}

impl Fields<'_> {
    fn compressed(&self) -> Result<Quantization, ModelError> {
        self.must_be(self.value, "format", &["int-quantized", "naive-quantized"])?;
        self.must_be(self.value, "quantization_status", &["compressed", "frozen"])?;
        if let Some(sparsity) = self.value.get("sparsity_config").filter(|value| !value.is_null()) {
            let is_empty = sparsity.as_object().is_some_and(Map::is_empty);
            if !is_empty && sparsity.get("format").and_then(Value::as_str) != Some("dense") {
                return self.refuse("sparsity_config", Some(sparsity));
            }
        }
        let groups = self.value.get("config_groups").and_then(Value::as_object);
        let Some(groups) = groups.filter(|groups| !groups.is_empty()) else {
            return self.refuse("config_groups", self.value.get("config_groups"));
        };
        for group in groups.values() {
            let Some(weights) = group.get("weights").filter(|value| value.is_object()) else {
                return self.refuse("weights", group.get("weights"));
            };
            if weights.get("num_bits").and_then(Value::as_u64) != Some(8) {
                return self.refuse("num_bits", weights.get("num_bits"));
            }
            self.must_be(weights, "type", &["int"])?;
            if weights.get("symmetric").is_some_and(|value| value.as_bool() != Some(true)) {
                return self.refuse("symmetric", weights.get("symmetric"));
            }
            self.must_be(weights, "strategy", &["channel", "group", "tensor"])?;
            if weights.get("actorder").is_some_and(|value| !value.is_null()) {
                return self.refuse("actorder", weights.get("actorder"));
            }
        }
        Ok(Quantization::CompressedInt8)
    }

    fn bits_and_bytes(&self) -> Result<Quantization, ModelError> {
        let flag = |name: &str| self.value.get(name).and_then(Value::as_bool) == Some(true);
        match (flag("load_in_8bit"), flag("load_in_4bit")) {
            (true, false) => Ok(Quantization::BitsAndBytes8),
            (false, true) => {
                self.must_be(self.value, "bnb_4bit_quant_type", &["nf4"])?;
                self.must_be(self.value, "bnb_4bit_quant_storage", &["uint8"])?;
                Ok(Quantization::BitsAndBytesNf4)
            }
            _ => self.refuse("load_in_4bit", self.value.get("load_in_4bit")),
        }
    }

    /// Rejects a field whose value is not in `known`. An absent field is allowed.
    fn must_be(&self, value: &Value, field: &str, known: &[&str]) -> Result<(), ModelError> {
        match value.get(field) {
            None | Some(Value::Null) => Ok(()),
            Some(Value::String(text)) if known.contains(&text.as_str()) => Ok(()),
            other => self.refuse(field, other),
        }
    }

    fn refuse<T>(&self, field: &str, value: Option<&Value>) -> Result<T, ModelError> {
        let value = value.map_or("absent".to_owned(), show);
        Err(ModelError::Quantized { method: format!("{}, {field} is {value}", self.method) })
    }
}
