//! Typed access to config.json that tracks the fields read, so that unknown fields can be rejected.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::error::clip;
use crate::{Family, ModelError};

/// Fields that do not change the forward pass of any supported family: token IDs, generation
/// settings, labels, bookkeeping. They include dropout, because STORM trains without it.
#[rustfmt::skip]
const HARMLESS: &[&str] = &[
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
    "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "attn_pdrop",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "embd_pdrop", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "id2label", "is_decoder", "label2id",
    "length_penalty", "max_length", "min_length", "model_max_length", "model_type", "n_ctx",
    "name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate",
    "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_last_hidden_states", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers_version", "typical_p", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
];

/// Fields found in published files that no supported family reads: leftovers of earlier versions of
/// `transformers`, other programs or other models. They are ignored with a warning.
#[rustfmt::skip]
const LEFT_BEHIND: &[&str] = &[
    "_diffusers_version", "_from_model_config", "_num_labels", "_remove_final_layer_norm",
    "activation_dropout", "attention_probs_dropout_prob", "bos_token", "classifier_dropout", "dropout",
    "embedding_dropout", "eos_token", "hidden_dropout", "hidden_dropout_prob", "is_llama_config",
    "keys_to_ignore_at_inference", "language", "layerdrop", "license", "max_new_tokens", "model_name",
    "n_special", "num_special_tokens", "output_past", "pad_token", "predict_special_tokens",
    "residual_dropout", "tokenizer_name", "transformers.js_config", "unk_token_id",
];

/// Dropout fields of the supported families.
const DROPOUT: &[&str] = &["attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"];

/// The fields of [`LEFT_BEHIND`] that are present and not null.
pub(super) fn left_behind(map: &Map<String, Value>) -> Vec<&str> {
    let says = |(key, value): (&'static &'static str, &Value)| (!value.is_null()).then_some(*key);
    LEFT_BEHIND.iter().filter_map(|key| says((key, map.get(*key)?))).collect()
}

/// The dropout fields that are not zero, with their rates.
pub(super) fn dropout(map: &Map<String, Value>) -> Vec<(&'static str, f64)> {
    let share = |key: &&'static str| Some((*key, map.get(*key)?.as_f64()?));
    DROPOUT.iter().filter_map(share).filter(|(_, share)| *share != 0.0).collect()
}

/// The fields of one JSON object.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Prefix of field names in messages: empty, or for example `rope_scaling.`.
    prefix: &'static str,
    model_type: &'static str,
    known: RefCell<BTreeSet<&'static str>>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>, prefix: &'static str, family: Family) -> Self {
        Self { map, prefix, model_type: family.model_type(), known: RefCell::default() }
    }

    /// The value, or `None` if absent.
    pub(super) fn raw(&self, field: &'static str) -> Option<&'a Value> {
        self.known.borrow_mut().insert(field);
        self.map.get(field)
    }

    /// The value, or `None` if absent or null.
    pub(super) fn get(&self, field: &'static str) -> Option<&'a Value> {
        self.raw(field).filter(|value| !value.is_null())
    }

    pub(super) fn size(&self, field: &'static str) -> Result<Option<usize>, ModelError> {
        self.get(field)
            .map(|value| {
                let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
                size.ok_or_else(|| {
                    self.refuse(field, value, "it must be a whole number, not negative")
                })
            })
            .transpose()
    }

    pub(super) fn needed_size(&self, field: &'static str) -> Result<usize, ModelError> {
        self.size(field)?.ok_or(ModelError::MissingField { field, model_type: self.model_type })
    }

    pub(super) fn number(&self, field: &'static str) -> Result<Option<f64>, ModelError> {
        self.get(field)
            .map(|value| {
                value.as_f64().ok_or_else(|| self.refuse(field, value, "it must be a number"))
            })
            .transpose()
    }

    pub(super) fn needed_number(&self, field: &'static str) -> Result<f64, ModelError> {
        self.number(field)?.ok_or(ModelError::MissingField { field, model_type: self.model_type })
    }

    pub(super) fn needed_numbers(&self, field: &'static str) -> Result<Vec<f64>, ModelError> {
        let missing = ModelError::MissingField { field, model_type: self.model_type };
        let value = self.get(field).ok_or(missing)?;
        let numbers = value.as_array().and_then(|items| items.iter().map(Value::as_f64).collect());
        numbers.ok_or_else(|| self.refuse(field, value, "it must be a list of numbers"))
    }

    pub(super) fn flag(&self, field: &'static str, default: bool) -> Result<bool, ModelError> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.refuse(field, value, "it must be true or false")),
        }
    }

    pub(super) fn text(&self, field: &'static str) -> Result<Option<&'a str>, ModelError> {
        self.get(field)
            .map(|value| {
                value.as_str().ok_or_else(|| self.refuse(field, value, "it must be a text"))
            })
            .transpose()
    }

    /// Rejects a flag with an unsupported value.
    pub(super) fn must_be(&self, field: &'static str, wanted: bool) -> Result<(), ModelError> {
        if self.flag(field, wanted)? == wanted {
            return Ok(());
        }
        let advice = format!("STORM supports only {wanted} for {} models", self.model_type);
        Err(self.refuse(field, &Value::Bool(!wanted), &advice))
    }

    /// The value in `known` that the field names. The first one if the field is absent.
    pub(super) fn one_of<T: Copy>(
        &self,
        field: &'static str,
        known: &[(&str, T)],
    ) -> Result<T, ModelError> {
        let Some(text) = self.text(field)? else { return Ok(known[0].1) };
        let found = known.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        found.ok_or_else(|| {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            let advice =
                format!("STORM supports {} for {} models", names.join(", "), self.model_type);
            self.refuse(field, &Value::from(text), &advice)
        })
    }

    pub(super) fn refuse(&self, field: &str, value: &Value, advice: &str) -> ModelError {
        ModelError::UnsupportedField {
            field: format!("{}{field}", self.prefix),
            value: show(value),
            advice: advice.to_owned(),
        }
    }

    /// Returns an error if the object has a field that was not read and is not harmless. Null
    /// values are allowed.
    pub(super) fn refuse_unknown(&self) -> Result<(), ModelError> {
        let known = self.known.borrow();
        let harmless: &[&str] = if self.prefix.is_empty() { HARMLESS } else { &[] };
        let is_left_behind = |key: &str| self.prefix.is_empty() && LEFT_BEHIND.contains(&key);
        let is_known =
            |key: &str| known.contains(key) || harmless.contains(&key) || is_left_behind(key);
        let unknown: Vec<String> = self
            .map
            .iter()
            .filter(|(key, value)| !value.is_null() && !is_known(key))
            .map(|(key, _)| format!("`{}{}`", self.prefix, clip(key)))
            .take(20)
            .collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let mut supported: Vec<&str> = known.iter().chain(harmless).copied().collect();
        supported.sort_unstable();
        supported.dedup();
        Err(ModelError::UnknownFields {
            fields: unknown.join(", "),
            model_type: self.model_type,
            supported: supported.join(", "),
        })
    }
}

/// Formats a JSON value for a message. Containers are not printed, because they may be large.
pub(super) fn show(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) => format!("\"{}\"", clip(text)),
        scalar => scalar.to_string(),
    }
}
