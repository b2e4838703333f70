//! Merges adapters into their base weights, one parameter at a time.

use super::is_adapter;
use crate::hf::{ParameterSource, ParameterSpec};
use crate::{ModelConfig, ModelError};

/// Loads a parameter of the base with its adapters added: `W + scale · B · A` in f32. The caller
/// rounds the result, so it is rounded once. Only this parameter and its adapters are in memory.
///
/// # Errors
/// From the source.
pub fn merge(
    config: &ModelConfig,
    source: &impl ParameterSource,
    spec: &ParameterSpec,
    weight: &mut [f32],
) -> Result<(), ModelError> {
    source.load(spec, weight)?;
    let Some(adapters) = &config.adapters else { return Ok(()) };
    let in_layer = spec.name.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    let Some((layer, name)) = in_layer else { return Ok(()) };
    let index: usize = layer.parse().unwrap_or(usize::MAX);
    let linears = &adapters.layer(index.min(config.layer_count - 1)).linears;
    let wanted = name.strip_suffix(".weight");
    let Some(linear) = linears.iter().find(|linear| Some(linear.name.as_str()) == wanted) else {
        return Ok(());
    };
    let prefix = format!("layers.{index}.{}.", linear.name);
    let own: Vec<ParameterSpec> = adapters
        .own_specs(config)
        .into_iter()
        .filter(|own| own.name.starts_with(&prefix) && is_adapter(&own.name))
        .collect();
    let read = |name: String| -> Result<Vec<f32>, ModelError> {
        let full = format!("layers.{index}.{name}");
        let spec = own.iter().find(|own| own.name == full);
        let spec = spec.unwrap_or_else(|| unreachable!("`{full}` is an adapter of the model"));
        let mut values = vec![0.0; spec.element_count()];
        source.load(spec, &mut values)?;
        Ok(values)
    };
    let a = read(linear.a_name())?; // (Σr, in)
    let inputs = linear.inputs;
    let mut first = 0;
    for slice in &linear.slices {
        let b = read(linear.b_name(slice))?; // (rows, r)
        let a = &a[first * inputs..(first + slice.rank) * inputs];
        first += slice.rank;
        let mut sum = vec![0f32; inputs];
        for (row, b) in slice.rows.clone().zip(b.chunks(slice.rank)) {
            sum.fill(0.0);
            for (b, a) in b.iter().zip(a.chunks(inputs)) {
                for (sum, a) in sum.iter_mut().zip(a) {
                    *sum += b * a;
                }
            }
            for (weight, sum) in weight[row * inputs..(row + 1) * inputs].iter_mut().zip(&sum) {
                *weight += slice.scale * sum;
            }
        }
    }
    Ok(())
}
