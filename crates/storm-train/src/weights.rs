//! Parameters between files and device memory.

use crate::TrainError;
use half::bf16;
use std::ops::Range;
use std::path::Path;
use storm_exec::{Resident, SlotId};
use storm_graph::DType;
use storm_model::{
    HfDirectory, ModelConfig, ParameterSpec, SaveOptions, load_parameter, parameters,
};

/// Loads every parameter into the slot of its name.
pub(crate) fn load(
    resident: &mut Resident,
    config: &ModelConfig,
    directory: &HfDirectory,
) -> Result<(), TrainError> {
    for spec in parameters(config) {
        let slot = resident.slots().get(&spec.name)?;
        match resident.slots().tensor(slot).dtype {
            DType::BF16 => load_parameter(directory, &spec, resident.view_mut::<bf16>(slot)?)?,
            _ => load_parameter(directory, &spec, resident.view_mut::<f32>(slot)?)?,
        }
    }
    Ok(())
}

/// Saves every parameter from the slot of its name.
pub(crate) fn save(
    resident: &Resident,
    config: &ModelConfig,
    output: &Path,
    options: &SaveOptions<'_>,
) -> Result<(), TrainError> {
    let provide = |spec: &ParameterSpec, range: Range<usize>, dest: &mut [f32]| {
        let slot = resident.slots().get(&spec.name)?;
        match resident.slots().tensor(slot).dtype {
            DType::BF16 => {
                for (dest, value) in dest.iter_mut().zip(&resident.view::<bf16>(slot)?[range]) {
                    *dest = value.to_f32();
                }
            }
            _ => dest.copy_from_slice(&resident.view::<f32>(slot)?[range]),
        }
        Ok(())
    };
    Ok(storm_model::save(output, config, options, provide)?)
}

/// A slot's values, widened to f32.
pub(crate) fn read(resident: &Resident, name: &str) -> Result<Vec<f32>, TrainError> {
    let slot: SlotId = resident.slots().get(name)?;
    Ok(match resident.slots().tensor(slot).dtype {
        DType::BF16 => resident.view::<bf16>(slot)?.iter().map(|value| value.to_f32()).collect(),
        _ => resident.view::<f32>(slot)?.to_vec(),
    })
}

/// Sets a slot from f32 values.
pub(crate) fn write(resident: &mut Resident, name: &str, values: &[f32]) -> Result<(), TrainError> {
    let slot: SlotId = resident.slots().get(name)?;
    match resident.slots().tensor(slot).dtype {
        DType::BF16 => {
            let values: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
            resident.write(slot, &values)?;
        }
        _ => resident.write(slot, values)?,
    }
    Ok(())
}
