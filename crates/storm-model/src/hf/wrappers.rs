//! Names of tensors without what wrappers put into them.

use super::remarks::Remark;

/// What `torch.compile` puts before the parts of a module that it wraps, at any depth.
const COMPILED: &str = "_orig_mod";
/// What PEFT puts before everything.
const PEFT: &str = "base_model.model.";

/// Parts of names that only adapters have. Their tensors change the weights beside them.
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

/// Counts of what was left out.
#[derive(Default)]
pub(super) struct Unwrapped {
    compiled: usize,
    peft: usize,
}

impl Unwrapped {
    /// The name that the model itself gives a tensor.
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
