//! Checks that the tensors of a directory match the model, and reports all problems at once.

use std::collections::{BTreeMap, HashSet};

use super::names::{HF_HEAD, HfPiece, ParameterLayout, hf_embedding, is_saved_constant};
use super::packed::Packed;
use super::safetensors_file::TensorEntry;
use crate::ModelConfig;
use crate::error::{TensorReport, clip};

/// Compares tensors, by their names in transformers, with those that the model needs.
pub(super) fn check_tensors(
    config: &ModelConfig,
    tensors: &BTreeMap<String, TensorEntry>,
    packed: &BTreeMap<String, Packed>,
) -> TensorReport {
    let mut report = TensorReport::default();
    let mut needed: HashSet<String> = HashSet::new();
    let has_head = tensors.contains_key(HF_HEAD);
    for spec in ParameterLayout::new(config).iter() {
        for piece in spec.pieces {
            let is_embedding = piece.hf_name == hf_embedding(config.family);
            match tensors.get(&piece.hf_name) {
                Some(entry) => check_entry(&piece, entry, packed, &mut report),
                // A tied model may have been saved with only the head.
                None if is_embedding && config.tied_embeddings && has_head => {}
                // A model without a head can be trained: the head is initialized.
                None if piece.hf_name == HF_HEAD => {}
                None => report.missing.add(|| piece.hf_name.clone()),
            }
            if is_embedding
                && config.tied_embeddings
                && let Some(entry) = tensors.get(HF_HEAD)
            {
                let head = HfPiece { hf_name: HF_HEAD.into(), ..piece.clone() };
                check_entry(&head, entry, packed, &mut report);
                needed.insert(head.hf_name);
            }
            // A tensor that is not in the files cannot be extra. Skipping it keeps a hostile layer
            // count from exhausting memory.
            if tensors.contains_key(&piece.hf_name) {
                needed.insert(piece.hf_name);
            }
        }
    }
    for name in tensors.keys() {
        if !needed.contains(name) && !is_saved_constant(config.family, name) {
            report.extra.add(|| clip(name));
        }
    }
    report
}

fn check_entry(
    piece: &HfPiece,
    entry: &TensorEntry,
    packed: &BTreeMap<String, Packed>,
    report: &mut TensorReport,
) {
    if piece.shape != entry.shape {
        report.wrong_shape.add(|| {
            format!("{}: found {:?}, expected {:?}", piece.hf_name, entry.shape, piece.shape)
        });
    }
    if !entry.dtype.is_weight() && !packed.contains_key(&piece.hf_name) {
        report.wrong_dtype.add(|| format!("{}: {}", piece.hf_name, entry.dtype.name()));
    }
}
