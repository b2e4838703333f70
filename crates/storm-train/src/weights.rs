//! Moves parameters between files and device memory.

use crate::TrainError;
use crate::moments::Moment;
use half::bf16;
use std::ops::Range;
use std::path::Path;
use storm_device::cpu::kernels::quantized::quantize;
use storm_device::{Device, PlanDevice, Scalar};
use storm_exec::{Planned, Resident};
use storm_graph::random::{Purpose, Seed, Stream, words};
use storm_graph::{DType, ParameterInstance, QuantizedFormat, QuantizedRow, Tensor, TensorClass};
use storm_model::{
    AnyModel, Element, IfExists, Initialization, ParameterSource, ParameterSpec, SaveOptions,
    save_adapter,
};

/// Looks up persistent tensors by name.
pub(crate) trait Reader {
    fn find(&self, name: &str) -> Option<&Tensor>;

    /// Like [`Reader::find`], with an error that lists what exists.
    fn get(&self, name: &str) -> Result<&Tensor, TrainError>;

    fn read_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &mut [T],
    ) -> Result<(), TrainError>;
}

/// A store that can also be written.
pub(crate) trait Writer: Reader {
    fn write<T: Scalar>(&mut self, name: &str, values: &[T]) -> Result<(), TrainError>;

    fn write_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &[T],
    ) -> Result<(), TrainError>;
}

impl<D: Device> Reader for &Resident<D> {
    fn find(&self, name: &str) -> Option<&Tensor> {
        self.slots().find(name).map(|slot| self.slots().tensor(slot))
    }

    fn get(&self, name: &str) -> Result<&Tensor, TrainError> {
        Ok(self.slots().tensor(self.slots().get(name)?))
    }

    fn read_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &mut [T],
    ) -> Result<(), TrainError> {
        Ok(Resident::read_part(self, self.slots().get(name)?, first, values)?)
    }
}

impl<D: Device> Reader for Resident<D> {
    fn find(&self, name: &str) -> Option<&Tensor> {
        self.slots().find(name).map(|slot| self.slots().tensor(slot))
    }

    fn get(&self, name: &str) -> Result<&Tensor, TrainError> {
        Ok(self.slots().tensor(self.slots().get(name)?))
    }

    fn read_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &mut [T],
    ) -> Result<(), TrainError> {
        Reader::read_part(&mut &*self, name, first, values)
    }
}

impl<D: Device> Writer for Resident<D> {
    fn write<T: Scalar>(&mut self, name: &str, values: &[T]) -> Result<(), TrainError> {
        let slot = self.slots().get(name)?;
        Ok(Resident::write(self, slot, values)?)
    }

    fn write_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &[T],
    ) -> Result<(), TrainError> {
        let slot = self.slots().get(name)?;
        Ok(Resident::write_part(self, slot, first, values)?)
    }
}

impl<D: PlanDevice> Reader for Planned<D> {
    fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensor(name).ok()
    }

    fn get(&self, name: &str) -> Result<&Tensor, TrainError> {
        Ok(self.tensor(name)?)
    }

    fn read_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &mut [T],
    ) -> Result<(), TrainError> {
        Ok(Planned::read_part(self, name, first, values)?)
    }
}

impl<D: PlanDevice> Writer for Planned<D> {
    fn write<T: Scalar>(&mut self, name: &str, values: &[T]) -> Result<(), TrainError> {
        Ok(Planned::write(self, name, values)?)
    }

    fn write_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &[T],
    ) -> Result<(), TrainError> {
        Ok(Planned::write_part(self, name, first, values)?)
    }
}

/// The name of a parameter's f32 master, if it has one.
fn master(store: &impl Reader, name: &str) -> Option<String> {
    let master = format!("{name}.master");
    store.find(&master).is_some().then_some(master)
}

/// Sets a parameter's master to the value of the parameter.
pub(crate) fn widen_master(store: &mut impl Writer, name: &str) -> Result<(), TrainError> {
    let Some(master) = master(store, name) else { return Ok(()) };
    let elements = store.get(name)?.shape.elements();
    let (mut narrow, mut wide) = (Vec::new(), Vec::new());
    for first in (0..elements).step_by(ELEMENTS_AT_A_TIME) {
        wide.resize(ELEMENTS_AT_A_TIME.min(elements - first), 0.0);
        read_widened(store, name, first, &mut wide, &mut narrow)?;
        store.write_part(&master, first, &wide)?;
    }
    Ok(())
}

/// Loads every parameter by name, and its master in full precision. Refuses non-finite values: nothing computed from
/// them would be usable.
pub(crate) fn load(
    store: &mut impl Writer,
    model: &AnyModel,
    source: &impl ParameterSource,
) -> Result<(), TrainError> {
    load_each(store, model, model.parameters(), source)
}

/// The same, but parameters that the source lacks keep their initial values.
pub(crate) fn load_or_start_fresh(
    store: &mut impl Writer,
    model: &AnyModel,
    source: &impl ParameterSource,
) -> Result<(), TrainError> {
    let mut specs = model.parameters();
    specs.retain(|spec| !source.starts_fresh(spec));
    load_each(store, model, specs, source)
}

/// Loads what is trained on top of a frozen base, which is already loaded.
pub(crate) fn load_adapters(
    store: &mut impl Writer,
    model: &AnyModel,
    source: &impl ParameterSource,
) -> Result<(), TrainError> {
    let specs = model.language().zip(model.adapters());
    let specs = specs.map(|(config, adapters)| adapters.specs(config));
    load_each(store, model, specs.unwrap_or_default(), source)
}

/// Initializes the parameters that start with uniform values. Only adapters and image classifiers have those; they are
/// small enough to be generated on the host.
pub(crate) fn draw_uniform(
    store: &mut impl Writer,
    instances: &[ParameterInstance],
    seed: u64,
    start: impl Fn(&str) -> Initialization,
) -> Result<(), TrainError> {
    let seed = Seed { seed, step: 0 };
    for ParameterInstance { name, index, parameter } in instances {
        let bound = match start(&parameter.name) {
            Initialization::Uniform { bound } => bound,
            Initialization::UniformByRow => {
                let columns = parameter.shape.elements() / parameter.shape.axes()[0];
                (1.0 / (columns as f64).sqrt()) as f32
            }
            Initialization::Normal { .. } | Initialization::Constant(_) => continue,
        };
        let stream = Stream { tensor: parameter.number, layer: *index };
        let mut values = vec![0f32; parameter.shape.elements()];
        for (block, values) in values.chunks_mut(4).enumerate() {
            let words = words(seed, Purpose::Initialization, stream, block as u64);
            for (value, word) in values.iter_mut().zip(words) {
                let share = (f64::from(word) + 0.5) / 4_294_967_296.0;
                *value = ((2.0 * share - 1.0) * f64::from(bound)) as f32;
            }
        }
        write(store, name, &values, None)?;
    }
    Ok(())
}

/// Elements read at once, in whole rows, so that memory does not depend on the size of a parameter.
const ELEMENTS_AT_A_TIME: usize = 1 << 20;

fn load_each(
    store: &mut impl Writer,
    model: &AnyModel,
    specs: Vec<ParameterSpec>,
    source: &impl ParameterSource,
) -> Result<(), TrainError> {
    let mut buffers = Buffers::default();
    for spec in &specs {
        let dtype = store.get(&spec.name)?.dtype;
        let master = master(store, &spec.name);
        let row = spec.row_elements().max(1);
        let all = spec.rows();
        for start in all.clone().step_by((ELEMENTS_AT_A_TIME / row).max(1)) {
            let end = all.end.min(start + (ELEMENTS_AT_A_TIME / row).max(1));
            let part = Part { source, spec, rows: start..end };
            if let Some(master) = &master {
                store.write_part(master, start * row, part.read(&mut buffers.wide)?)?;
            }
            match dtype {
                DType::BF16 => {
                    store.write_part(&spec.name, start * row, part.read(&mut buffers.narrow)?)?;
                }
                DType::U8 => {
                    let format = quantized_format(&spec.name, model.quantized())?;
                    let form = QuantizedRow::new(format, row);
                    let values = part.read(&mut buffers.wide)?;
                    buffers.packed.resize(values.len() / row * form.bytes(), 0);
                    quantize(form, values, &mut buffers.packed);
                    store.write_part(&spec.name, start * form.bytes(), &buffers.packed)?;
                }
                _ => store.write_part(&spec.name, start * row, part.read(&mut buffers.wide)?)?,
            }
        }
    }
    Ok(())
}

/// Buffers for loading.
#[derive(Default)]
struct Buffers {
    wide: Vec<f32>,
    narrow: Vec<bf16>,
    packed: Vec<u8>,
}

/// A range of rows of a parameter.
struct Part<'a, S> {
    source: &'a S,
    spec: &'a ParameterSpec,
    rows: Range<usize>,
}

impl<S: ParameterSource> Part<'_, S> {
    /// Reads the rows, and refuses non-finite values.
    fn read<'b, E: Element + Scalar>(&self, buffer: &'b mut Vec<E>) -> Result<&'b [E], TrainError> {
        let Part { source, spec, rows } = self;
        let row = spec.row_elements();
        buffer.resize(rows.len() * row, E::default());
        source.load_rows(spec, rows.clone(), buffer)?;
        if let Some(place) = first_non_finite(buffer) {
            let (parameter, value) = (spec.name.clone(), buffer[place].to_f32());
            let element = rows.start * row + place;
            return Err(TrainError::NonFiniteParameter { parameter, value, element });
        }
        Ok(buffer)
    }
}

/// The format of a parameter stored as bytes. Without a config it is unknown.
fn quantized_format(
    name: &str,
    format: Option<QuantizedFormat>,
) -> Result<QuantizedFormat, TrainError> {
    format.ok_or_else(|| TrainError::Option {
        option: "base",
        problem: format!("does not say how `{name}` is stored: it cannot be set from numbers"),
    })
}

fn first_non_finite<E: Element>(values: &[E]) -> Option<usize> {
    const CHUNK: usize = 1024;
    let is_odd = |value: &E| !value.to_f32().is_finite();
    // Checking a whole chunk vectorizes, and usually finds nothing.
    let has_one = |some: &[E]| some.iter().fold(false, |any, value| any | is_odd(value));
    let first = values.chunks(CHUNK).position(has_one)? * CHUNK;
    values[first..].iter().position(is_odd).map(|place| first + place)
}

/// Copies every parameter to an f32 tensor of the same name: from its master if it has one, else from the parameter.
pub(crate) fn copy_widened(
    from: &mut impl Reader,
    model: &AnyModel,
    to: &mut impl Writer,
) -> Result<(), TrainError> {
    let (mut narrow, mut wide) = (Vec::new(), Vec::new());
    for spec in model.parameters() {
        let name = master(from, &spec.name).unwrap_or_else(|| spec.name.clone());
        let elements = spec.element_count();
        for first in (0..elements).step_by(ELEMENTS_AT_A_TIME) {
            wide.resize(ELEMENTS_AT_A_TIME.min(elements - first), 0.0);
            read_widened(from, &name, first, &mut wide, &mut narrow)?;
            to.write_part(&spec.name, first, &wide)?;
        }
    }
    Ok(())
}

/// Saves every parameter: from its master if it has one, else as it is.
pub(crate) fn save(
    store: &mut impl Reader,
    model: &AnyModel,
    output: &Path,
    options: &SaveOptions<'_>,
) -> Result<(), TrainError> {
    let mut narrow: Vec<bf16> = Vec::new();
    let provide = |spec: &ParameterSpec, range: Range<usize>, dest: &mut [f32]| {
        let name = master(store, &spec.name).unwrap_or_else(|| spec.name.clone());
        read_widened(store, &name, range.start, dest, &mut narrow)
            .map_err(|error| -> Box<dyn std::error::Error + Send + Sync> { Box::new(error) })
    };
    Ok(model.save(output, options, provide)?)
}

/// Saves the adapters in PEFT's format.
pub(crate) fn save_adapters(
    store: &mut impl Reader,
    model: &AnyModel,
    output: &Path,
    base: Option<&str>,
    if_exists: IfExists,
) -> Result<(), TrainError> {
    let mut narrow: Vec<bf16> = Vec::new();
    let provide = |spec: &ParameterSpec, dest: &mut [f32]| {
        let name = master(store, &spec.name).unwrap_or_else(|| spec.name.clone());
        read_widened(store, &name, 0, dest, &mut narrow)
            .map_err(|error| -> Box<dyn std::error::Error + Send + Sync> { Box::new(error) })
    };
    let config = model.language().ok_or_else(no_adapters)?;
    Ok(save_adapter(output, config, base, if_exists, provide)?)
}

fn no_adapters() -> TrainError {
    let problem = "has no adapters: only language models have some".to_owned();
    TrainError::Option { option: "model", problem }
}

/// Reads a tensor's values, widened to f32.
pub(crate) fn read(store: &mut impl Reader, name: &str) -> Result<Vec<f32>, TrainError> {
    if let Some((moment, elements)) = int8_moment(store, name)? {
        let mut bytes = vec![0u8; store.get(name)?.size_bytes()];
        store.read_part(name, 0, &mut bytes)?;
        return Ok(moment.decode(&bytes, elements));
    }
    let mut values = vec![0.0; store.get(name)?.shape.elements()];
    read_widened(store, name, 0, &mut values, &mut Vec::new())?;
    Ok(values)
}

/// If a tensor is an 8-bit moment: which one, and its number of elements.
fn int8_moment(store: &impl Reader, name: &str) -> Result<Option<(Moment, usize)>, TrainError> {
    let Tensor { dtype, class, .. } = store.get(name)?;
    if (*dtype, *class) != (DType::U8, TensorClass::OptimizerState) {
        return Ok(None);
    }
    let Some((moment, parameter)) = Moment::of_name(name) else { return Ok(None) };
    Ok(Some((moment, store.get(parameter)?.shape.elements())))
}

fn read_widened(
    store: &mut impl Reader,
    name: &str,
    first: usize,
    values: &mut [f32],
    narrow: &mut Vec<bf16>,
) -> Result<(), TrainError> {
    if store.get(name)?.dtype != DType::BF16 {
        return store.read_part(name, first, values);
    }
    narrow.resize(values.len(), bf16::ZERO);
    store.read_part(name, first, narrow)?;
    for (value, narrow) in values.iter_mut().zip(narrow) {
        *value = narrow.to_f32();
    }
    Ok(())
}

/// Writes a tensor from f32 values, and a parameter's master with it.
pub(crate) fn write(
    store: &mut impl Writer,
    name: &str,
    values: &[f32],
    format: Option<QuantizedFormat>,
) -> Result<(), TrainError> {
    if let Some((moment, _)) = int8_moment(store, name)? {
        return store.write(name, &moment.encode(values));
    }
    let dtype = store.get(name)?.dtype;
    if let Some(master) = master(store, name) {
        store.write(&master, values)?;
    }
    match dtype {
        DType::BF16 => {
            let values: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
            store.write(name, &values)
        }
        // A wrong number of values gives rows of another size, which the store refuses.
        DType::U8 => {
            let row_count = store.get(name)?.shape.rows();
            let columns = (values.len() / row_count).max(1);
            let form = QuantizedRow::new(quantized_format(name, format)?, columns);
            let mut rows = vec![0; values.len() / columns * form.bytes()];
            quantize(form, values, &mut rows);
            store.write(name, &rows)
        }
        _ => store.write(name, values),
    }
}
