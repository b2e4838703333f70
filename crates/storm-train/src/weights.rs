//! Parameters between files and device memory.

use crate::TrainError;
use half::bf16;
use std::ops::Range;
use std::path::Path;
use storm_device::{Device, Scalar};
use storm_exec::{Resident, SlotId};
use storm_graph::DType;
use storm_model::{
    Element, HfDirectory, ModelConfig, ParameterSpec, SaveOptions, load_parameter, parameters,
};

/// The slot of a parameter's f32 master, where there is one.
fn master<D: Device>(resident: &Resident<D>, name: &str) -> Option<SlotId> {
    resident.slots().find(&format!("{name}.master"))
}

/// Loads every parameter into the slot of its name, and into its master in full precision.
pub(crate) fn load<D: Device>(
    resident: &mut Resident<D>,
    config: &ModelConfig,
    directory: &HfDirectory,
) -> Result<(), TrainError> {
    for spec in parameters(config) {
        let slot = resident.slots().get(&spec.name)?;
        if let Some(master) = master(resident, &spec.name) {
            load_as::<f32, D>(resident, master, directory, &spec)?;
        }
        match resident.slots().tensor(slot).dtype {
            DType::BF16 => load_as::<bf16, D>(resident, slot, directory, &spec)?,
            _ => load_as::<f32, D>(resident, slot, directory, &spec)?,
        }
    }
    Ok(())
}

fn load_as<E: Element + Scalar, D: Device>(
    resident: &mut Resident<D>,
    slot: SlotId,
    directory: &HfDirectory,
    spec: &ParameterSpec,
) -> Result<(), TrainError> {
    let mut values = vec![E::default(); spec.element_count()];
    load_parameter(directory, spec, &mut values)?;
    Ok(resident.write(slot, &values)?)
}

/// Saves every parameter: from its master, where it has one, and else from its own slot.
pub(crate) fn save<D: Device>(
    resident: &Resident<D>,
    config: &ModelConfig,
    output: &Path,
    options: &SaveOptions<'_>,
) -> Result<(), TrainError> {
    let mut narrow: Vec<bf16> = Vec::new();
    let provide = |spec: &ParameterSpec, range: Range<usize>, dest: &mut [f32]| {
        let slot = match master(resident, &spec.name) {
            Some(master) => master,
            None => resident.slots().get(&spec.name)?,
        };
        match resident.slots().tensor(slot).dtype {
            DType::BF16 => {
                narrow.resize(dest.len(), bf16::ZERO);
                resident.read_part(slot, range.start, &mut narrow)?;
                for (dest, value) in dest.iter_mut().zip(&narrow) {
                    *dest = value.to_f32();
                }
            }
            _ => resident.read_part(slot, range.start, dest)?,
        }
        Ok(())
    };
    Ok(storm_model::save(output, config, options, provide)?)
}

/// A slot's values, widened to f32.
pub(crate) fn read<D: Device>(resident: &Resident<D>, name: &str) -> Result<Vec<f32>, TrainError> {
    let slot: SlotId = resident.slots().get(name)?;
    let tensor = resident.slots().tensor(slot);
    let elements = tensor.shape.elements();
    Ok(match tensor.dtype {
        DType::BF16 => {
            let mut values = vec![bf16::ZERO; elements];
            resident.read(slot, &mut values)?;
            values.into_iter().map(bf16::to_f32).collect()
        }
        _ => {
            let mut values = vec![0.0; elements];
            resident.read(slot, &mut values)?;
            values
        }
    })
}

/// Sets a slot from f32 values, and a parameter's master with it.
pub(crate) fn write<D: Device>(
    resident: &mut Resident<D>,
    name: &str,
    values: &[f32],
) -> Result<(), TrainError> {
    let slot: SlotId = resident.slots().get(name)?;
    if let Some(master) = master(resident, name) {
        resident.write(master, values)?;
    }
    match resident.slots().tensor(slot).dtype {
        DType::BF16 => {
            let values: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
            resident.write(slot, &values)?;
        }
        _ => resident.write(slot, values)?,
    }
    Ok(())
}
