//! Finds the quantized weights of other libraries among the tensors of a directory, and dequantizes
//! them.
//!
//! Values are computed in f64 and rounded once to the destination type. Codes and scales are read
//! in pieces, so memory use does not grow with the tensor.

use super::dtype::{Dtype, Element};
use super::quantization::Quantization;
use super::safetensors_file::{SafetensorsFile, TensorEntry};
use super::strict_json::parse;
use crate::ModelError;
use crate::error::clip;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Elements read at a time.
const ELEMENTS: usize = 1 << 20;

/// A `quant_state` is a small JSON object.
const STATE_BYTES_MAX: usize = 1 << 16;

/// Maximum number of values that share a scale.
const BLOCK_MAX: usize = 1 << 20;

/// A quantized weight.
#[derive(Debug)]
pub(super) struct Packed {
    /// (out, in).
    pub(super) shape: Vec<usize>,
    /// The other tensors that it consists of, with their names.
    pub(super) parts: Vec<(String, TensorEntry)>,
    form: Form,
}

#[derive(Debug)]
enum Form {
    /// 8-bit codes. Each `block` shares a scale, which is divided by `divisor`.
    Int8 { scales: TensorEntry, block: Blocks, divisor: f64 },
    /// 4-bit codes, the first one of a byte in its upper half. Each `block` of elements shares a
    /// magnitude.
    Nf4 { points: Vec<f64>, block: usize, magnitudes: Magnitudes },
}

/// The codes that share a scale.
#[derive(Debug, Clone, Copy)]
enum Blocks {
    All,
    /// This many codes of a row.
    OfRow(usize),
}

#[derive(Debug)]
enum Magnitudes {
    Plain(TensorEntry),
    /// 8-bit codes: `points[code] · scale + offset`, with one scale for each `block` of codes.
    Nested {
        codes: TensorEntry,
        points: Vec<f64>,
        scales: TensorEntry,
        block: usize,
        offset: f64,
    },
}

/// The state that bitsandbytes stores with a 4-bit weight.
#[derive(Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

/// Finds the quantized weights of a directory. Removes their parts from `tensors`, and sets the
/// shapes of their entries there to those of the weights.
pub(super) fn find(
    path: &Path,
    quantization: Quantization,
    files: &[SafetensorsFile],
    tensors: &mut BTreeMap<String, TensorEntry>,
) -> Result<BTreeMap<String, Packed>, ModelError> {
    let wanted = match quantization {
        Quantization::CompressedInt8 | Quantization::BitsAndBytes8 => Dtype::I8,
        Quantization::BitsAndBytesNf4 => Dtype::U8,
    };
    let is_weight =
        |name: &str, entry: &TensorEntry| entry.dtype == wanted && name.ends_with(".weight");
    let names: Vec<String> = tensors
        .iter()
        .filter(|(name, entry)| is_weight(name, entry))
        .map(|(name, _)| name.clone())
        .collect();
    let mut found = BTreeMap::new();
    for name in names {
        let mut finder = Finder { path, files, tensors, name: &name, parts: Vec::new() };
        let (shape, form) = match quantization {
            Quantization::CompressedInt8 => finder.compressed()?,
            Quantization::BitsAndBytes8 => finder.bits_and_bytes_8()?,
            Quantization::BitsAndBytesNf4 => finder.bits_and_bytes_nf4()?,
        };
        let parts = finder.parts;
        if let Some(entry) = tensors.get_mut(&name) {
            entry.shape.clone_from(&shape);
        }
        found.insert(name, Packed { shape, parts, form });
    }
    Ok(found)
}

struct Finder<'a> {
    path: &'a Path,
    files: &'a [SafetensorsFile],
    tensors: &'a mut BTreeMap<String, TensorEntry>,
    /// The name of the weight.
    name: &'a str,
    parts: Vec<(String, TensorEntry)>,
}

impl Finder<'_> {
    fn compressed(&mut self) -> Result<(Vec<usize>, Form), ModelError> {
        let (shape, [rows, columns]) = self.matrix()?;
        let scales = self.take(&format!("{}_scale", self.name))?;
        // Some versions write it even for symmetric quantization. It must be zero then.
        if let Some(zeros) = self.take_if_there(&format!("{}_zero_point", self.name)) {
            self.must_be_zero(&zeros)?;
        }
        let count = scales.element_count();
        let block = match count {
            1 => Blocks::All,
            _ if count.is_multiple_of(rows) && columns.is_multiple_of(count / rows) => {
                Blocks::OfRow(columns / (count / rows))
            }
            _ => return self.refuse(format!("it has {count} scales for {rows} × {columns} codes")),
        };
        self.must_be_float(&scales)?;
        Ok((shape, Form::Int8 { scales, block, divisor: 1.0 }))
    }

    fn bits_and_bytes_8(&mut self) -> Result<(Vec<usize>, Form), ModelError> {
        let (shape, [rows, columns]) = self.matrix()?;
        let module = self.name.strip_suffix("weight").unwrap_or(self.name).to_owned();
        let scales = self.take(&format!("{module}SCB"))?;
        if scales.element_count() != rows {
            let count = scales.element_count();
            return self.refuse(format!("it has {count} scales for {rows} rows"));
        }
        self.must_be_float(&scales)?;
        // Format 0 has rows in order. The others are for kernels of old GPUs.
        if let Some(format) = self.take_if_there(&format!("{module}weight_format")) {
            self.must_be_zero(&format)?;
        }
        Ok((shape, Form::Int8 { scales, block: Blocks::OfRow(columns), divisor: 127.0 }))
    }

    fn bits_and_bytes_nf4(&mut self) -> Result<(Vec<usize>, Form), ModelError> {
        let name = self.name;
        let state_entry = self.take(&format!("{name}.quant_state.bitsandbytes__nf4"))?;
        let bytes = self.bytes(&state_entry, STATE_BYTES_MAX)?;
        let state: State = parse(self.path, &bytes)?;
        if state.quant_type != "nf4" {
            return self.refuse(format!("its quant_type is {}", clip(&state.quant_type)));
        }
        let elements = match *state.shape.as_slice() {
            [rows, columns] => rows.checked_mul(columns).filter(|&elements| elements > 0),
            _ => None,
        };
        let Some(elements) = elements else {
            return self.refuse(format!("its shape is {:?}, not that of a matrix", state.shape));
        };
        let codes = &self.tensors[name];
        if codes.element_count() != elements.div_ceil(2) {
            let count = codes.element_count();
            return self.refuse(format!("it has {count} bytes for {elements} codes"));
        }
        let block = self.block("blocksize", state.blocksize)?;
        let points = self.points(&format!("{name}.quant_map"), 16)?;
        let absmax = self.take(&format!("{name}.absmax"))?;
        let blocks = elements.div_ceil(block);
        if absmax.element_count() != blocks {
            let count = absmax.element_count();
            return self.refuse(format!("it has {count} magnitudes for {blocks} blocks"));
        }
        let magnitudes = match absmax.dtype {
            Dtype::U8 => {
                let points = self.points(&format!("{name}.nested_quant_map"), 256)?;
                let scales = self.take(&format!("{name}.nested_absmax"))?;
                self.must_be_float(&scales)?;
                let block = self.block("nested_blocksize", state.nested_blocksize.unwrap_or(0))?;
                if scales.element_count() != blocks.div_ceil(block) {
                    let count = scales.element_count();
                    return self.refuse(format!("it has {count} nested magnitudes for {blocks}"));
                }
                let offset = state.nested_offset.filter(|offset| offset.is_finite());
                let Some(offset) = offset else {
                    return self.refuse("its nested_offset is not a number".to_owned());
                };
                Magnitudes::Nested { codes: absmax, points, scales, block, offset }
            }
            _ => {
                self.must_be_float(&absmax)?;
                Magnitudes::Plain(absmax)
            }
        };
        Ok((state.shape, Form::Nf4 { points, block, magnitudes }))
    }

    /// The shape of the codes, which must be a matrix.
    fn matrix(&self) -> Result<(Vec<usize>, [usize; 2]), ModelError> {
        let shape = self.tensors[self.name].shape.clone();
        match *shape.as_slice() {
            [rows, columns] if rows > 0 && columns > 0 => Ok((shape, [rows, columns])),
            _ => self.refuse(format!("its codes are {shape:?}, not a matrix")),
        }
    }

    fn take_if_there(&mut self, part: &str) -> Option<TensorEntry> {
        let entry = self.tensors.remove(part)?;
        self.parts.push((part.to_owned(), entry.clone()));
        Some(entry)
    }

    fn take(&mut self, part: &str) -> Result<TensorEntry, ModelError> {
        match self.take_if_there(part) {
            Some(entry) => Ok(entry),
            None => self.refuse(format!("there is no {}", clip(part))),
        }
    }

    fn block(&self, what: &str, block: usize) -> Result<usize, ModelError> {
        match block {
            1..=BLOCK_MAX => Ok(block),
            _ => self.refuse(format!("its {what} is {block}")),
        }
    }

    /// The values that codes map to.
    fn points(&mut self, part: &str, count: usize) -> Result<Vec<f64>, ModelError> {
        let entry = self.take(part)?;
        if entry.element_count() != count {
            return self.refuse(format!("{} has not {count} entries", clip(part)));
        }
        let mut values = vec![0f32; count];
        self.file(&entry)?.read_elements(part, &entry, 0, &mut values)?;
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(values.into_iter().map(f64::from).collect()),
            false => self.refuse(format!("{} has entries that are no numbers", clip(part))),
        }
    }

    fn must_be_float(&self, entry: &TensorEntry) -> Result<(), ModelError> {
        match entry.dtype.is_weight() {
            true => Ok(()),
            false => self.refuse(format!("its scales are {}", entry.dtype.name())),
        }
    }

    fn must_be_zero(&self, entry: &TensorEntry) -> Result<(), ModelError> {
        let bytes = self.bytes(entry, ELEMENTS)?;
        match bytes.iter().all(|&byte| byte == 0) {
            true => Ok(()),
            false => self.refuse("it is stored in a form that STORM does not read".to_owned()),
        }
    }

    fn bytes(&self, entry: &TensorEntry, limit: usize) -> Result<Vec<u8>, ModelError> {
        let length = entry.range.end - entry.range.start;
        if length > limit as u64 {
            return self.refuse(format!("a part of it has {length} bytes"));
        }
        let mut bytes = vec![0; length as usize];
        self.file(entry)?.read_bytes(entry, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn file(&self, entry: &TensorEntry) -> Result<&SafetensorsFile, ModelError> {
        match self.files.get(entry.file) {
            Some(file) => Ok(file),
            None => self.refuse("a part of it is in no file".to_owned()),
        }
    }

    fn refuse<T>(&self, problem: String) -> Result<T, ModelError> {
        refuse(self.path, self.name, problem)
    }
}

fn refuse<T>(path: &Path, name: &str, problem: String) -> Result<T, ModelError> {
    Err(ModelError::BadQuantized { path: path.to_owned(), name: clip(name), problem })
}

/// The location of a packed weight's bytes.
pub(super) struct Reading<'a> {
    /// The directory.
    pub(super) path: &'a Path,
    pub(super) files: &'a [SafetensorsFile],
    pub(super) name: &'a str,
    /// The entry of the codes.
    pub(super) entry: &'a TensorEntry,
}

impl Packed {
    /// Reads elements, starting at `first`.
    pub(super) fn read<E: Element>(
        &self,
        reading: &Reading<'_>,
        first: usize,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        let mut start = first;
        for dest in dest.chunks_mut(ELEMENTS) {
            match &self.form {
                Form::Int8 { scales, block, divisor } => {
                    self.read_int8(reading, start, dest, scales, *block, *divisor)?;
                }
                Form::Nf4 { points, block, magnitudes } => {
                    let upper = (start + dest.len()).div_ceil(2);
                    let codes = reading.bytes(reading.entry, start / 2, upper - start / 2)?;
                    let blocks = start / block..(start + dest.len()).div_ceil(*block);
                    let first_block = blocks.start;
                    let magnitudes = magnitudes.read(reading, blocks)?;
                    for (at, dest) in (start..).zip(dest.iter_mut()) {
                        let byte = codes[at / 2 - start / 2];
                        let code = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
                        let magnitude = magnitudes[at / block - first_block];
                        *dest = E::from_f64(points[usize::from(code)] * magnitude);
                    }
                }
            }
            start += dest.len();
        }
        Ok(())
    }

    fn read_int8<E: Element>(
        &self,
        reading: &Reading<'_>,
        start: usize,
        dest: &mut [E],
        scales: &TensorEntry,
        block: Blocks,
        divisor: f64,
    ) -> Result<(), ModelError> {
        let columns = self.shape[1];
        let place = |at: usize| match block {
            Blocks::All => 0,
            Blocks::OfRow(block) => at / columns * (columns / block) + at % columns / block,
        };
        let codes = reading.bytes(reading.entry, start, dest.len())?;
        let first = place(start);
        let scales = reading.numbers(scales, first..place(start + dest.len() - 1) + 1)?;
        for ((at, code), dest) in (start..).zip(codes).zip(dest.iter_mut()) {
            let code = f64::from(code.cast_signed());
            *dest = E::from_f64(code * scales[place(at) - first] / divisor);
        }
        Ok(())
    }
}

impl Magnitudes {
    fn read(
        &self,
        reading: &Reading<'_>,
        blocks: std::ops::Range<usize>,
    ) -> Result<Vec<f64>, ModelError> {
        match self {
            Magnitudes::Plain(entry) => reading.numbers(entry, blocks),
            Magnitudes::Nested { codes, points, scales, block, offset } => {
                let first = blocks.start / block;
                let scales = reading.numbers(scales, first..blocks.end.div_ceil(*block))?;
                let codes = reading.bytes(codes, blocks.start, blocks.len())?;
                let value = |(at, code): (usize, u8)| {
                    points[usize::from(code)] * scales[at / block - first] + offset
                };
                Ok(blocks.zip(codes).map(value).collect())
            }
        }
    }
}

impl Reading<'_> {
    fn file(&self, entry: &TensorEntry) -> Result<&SafetensorsFile, ModelError> {
        self.files.get(entry.file).ok_or_else(|| ModelError::NoSuchTensor {
            path: self.path.to_owned(),
            name: clip(self.name),
        })
    }

    fn bytes(
        &self,
        entry: &TensorEntry,
        first: usize,
        count: usize,
    ) -> Result<Vec<u8>, ModelError> {
        let mut bytes = vec![0; count];
        self.file(entry)?.read_bytes(entry, first as u64, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads scales and checks that they are finite.
    fn numbers(
        &self,
        entry: &TensorEntry,
        range: std::ops::Range<usize>,
    ) -> Result<Vec<f64>, ModelError> {
        let mut values = vec![0f32; range.len()];
        self.file(entry)?.read_elements(self.name, entry, range.start, &mut values)?;
        match values.iter().find(|value| !value.is_finite()) {
            Some(value) => refuse(self.path, self.name, format!("one of its scales is {value}")),
            None => Ok(values.into_iter().map(f64::from).collect()),
        }
    }
}
