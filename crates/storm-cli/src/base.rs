//! Storage format of the frozen base weights of a LoRA run.

use crate::UsageError;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use storm_graph::QuantizedFormat;
use storm_model::{BaseFormat, ModelConfig};

/// The storage of a frozen base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BaseArg {
    /// Not quantized: bf16, or f32 with precision f32.
    Bf16,
    /// The projections of layers in 8 bits with a scale for each 128 values: half the memory and copy traffic of bf16.
    Int8,
    /// The projections of layers in 4 bits (NF4) with a scale for each 64 values: just over a quarter of the memory of
    /// bf16, with some loss of quality. For models that fit no other way.
    Nf4,
}

impl BaseArg {
    /// Parses the value that a run recorded.
    pub(crate) fn of_record(text: Option<&str>) -> Result<BaseArg, UsageError> {
        text.map_or(Ok(BaseArg::Bf16), |text| {
            BaseArg::from_str(text, false)
                .map_err(|_| UsageError(format!("the run's base is `{text}`, which is unknown")))
        })
    }

    /// The config with its base stored in this format.
    pub(crate) fn apply_to(self, config: ModelConfig) -> Result<ModelConfig, UsageError> {
        let base = match self {
            BaseArg::Bf16 => BaseFormat::Computed,
            BaseArg::Int8 => BaseFormat::Quantized(QuantizedFormat::Int8),
            BaseArg::Nf4 => BaseFormat::Quantized(QuantizedFormat::Nf4),
        };
        if base != BaseFormat::Computed && config.adapters.is_none() {
            return Err(UsageError(format!(
                "base = \"{base}\" is for weights that are not trained; give adapters with lora"
            )));
        }
        Ok(ModelConfig { base, ..config })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_model::{Adapters, LoraOptions, preset};

    #[test]
    fn only_frozen_weights_are_quantized() {
        let config = preset("qwen2.5-0.5b").unwrap();
        let error = BaseArg::Int8.apply_to(config.clone()).unwrap_err().to_string();
        assert!(error.contains("give adapters"), "{error}");
        assert_eq!(BaseArg::Bf16.apply_to(config.clone()).unwrap(), config);
        let adapters = Some(Adapters::new(&config, LoraOptions::new(4, 8.0)).unwrap());
        let config = ModelConfig { adapters, ..config };
        for (arg, text) in [(BaseArg::Int8, "int8"), (BaseArg::Nf4, "nf4"), (BaseArg::Bf16, "bf16")]
        {
            assert_eq!(arg.apply_to(config.clone()).unwrap().base, text.parse().unwrap());
        }
    }

    #[test]
    fn records_are_read_back() {
        assert_eq!(BaseArg::of_record(None).unwrap(), BaseArg::Bf16);
        assert_eq!(BaseArg::of_record(Some("int8")).unwrap(), BaseArg::Int8);
        assert!(BaseArg::of_record(Some("int7")).unwrap_err().to_string().contains("`int7`"));
    }
}
