//! Storage format of activations until the backward pass.

use crate::UsageError;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use storm_graph::ActivationCodec;
use storm_model::AnyModel;

/// The storage of activations between the passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CodecArg {
    /// As computed.
    None,
    /// Inputs of gated units in 8 bits with a scale for each 128 values. The loss of a step does not change; gradients
    /// change slightly.
    Int8,
}

impl CodecArg {
    /// Refuses a codec for a model without any activations it applies to.
    pub(crate) fn check(self, model: impl Into<AnyModel>) -> Result<(), UsageError> {
        let model = model.into();
        if self == CodecArg::None || model.has_gated_units() {
            return Ok(());
        }
        Err(UsageError(format!(
            "activation-codec = \"int8\" compresses the inputs of gated units, and a model of the family {} has none; \
             leave it out",
            model.type_name()
        )))
    }
}

impl From<ActivationCodec> for CodecArg {
    fn from(codec: ActivationCodec) -> CodecArg {
        match codec {
            ActivationCodec::None => CodecArg::None,
            ActivationCodec::Int8 => CodecArg::Int8,
        }
    }
}

impl From<CodecArg> for ActivationCodec {
    fn from(codec: CodecArg) -> ActivationCodec {
        match codec {
            CodecArg::None => ActivationCodec::None,
            CodecArg::Int8 => ActivationCodec::Int8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_model::preset;

    #[test]
    fn models_without_gated_units_are_refused() {
        let gpt2 = preset("gpt2").unwrap();
        let error = CodecArg::Int8.check(&gpt2).unwrap_err().to_string();
        assert!(error.contains("gated units") && error.contains("gpt2"), "{error}");
        assert!(CodecArg::None.check(&gpt2).is_ok());
        assert!(CodecArg::Int8.check(preset("qwen2.5-0.5b").unwrap()).is_ok());
    }
}
