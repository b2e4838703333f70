//! Removes the parts that wrappers add to tensor names.

use super::remarks::Remark;

/// Added by `torch.compile` to the names of wrapped modules, at any depth.
const COMPILED: &str = "_orig_mod";
/// Prefix added by PEFT.
const PEFT: &str = "base_model.model.";

/// Name parts that only occur in adapters. Their tensors modify the base weights.
const ADAPTER_PARTS: &[&str] = &[
    "base_layer",
    "lora_A",
    "lora_B",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "modules_to_save",
    "original_module",
    "prompt_encoder",
];

/// Number of tensors with removed parts.
#[derive(Default)]
pub(super) struct Unwrapped {
    compiled: usize,
    peft: usize,
}

impl Unwrapped {
    /// The name of a tensor without the parts of wrappers.
    pub(super) fn name(&mut self, stored: String) -> String {
        let mut name = stored;
        if name.split('.').any(|part| part == COMPILED) {
            let parts: Vec<&str> = name.split('.').filter(|part| *part != COMPILED).collect();
            name = parts.join(".");
            self.compiled += 1;
        }
        if let Some(rest) = name.strip_prefix(PEFT) {
            self.peft += 1;
            name = rest.to_owned();
        }
        name
    }

    pub(super) fn remarks(&self) -> impl Iterator<Item = Remark> {
        let wrapped = |part, by, tensors| Remark::WrappedNames { part, by, tensors };
        let compiled = wrapped("_orig_mod.", "torch.compile", self.compiled);
        let peft = wrapped(PEFT, "PEFT", self.peft);
        let is_there = |remark: &Remark| !matches!(remark, Remark::WrappedNames { tensors: 0, .. });
        [compiled, peft].into_iter().filter(is_there)
    }
}

/// Whether a tensor belongs to an adapter.
pub(super) fn is_of_adapter(name: &str) -> bool {
    name.split('.').any(|part| ADAPTER_PARTS.contains(&part))
}
