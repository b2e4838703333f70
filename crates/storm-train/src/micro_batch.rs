//! A micro-batch as the trainer sees it: entries for the inputs of a program, by name.

use crate::{TrainError, TrainOptions};
use half::bf16;
use std::collections::BTreeMap;
use storm_device::bytes_of;
use storm_graph::{DType, IGNORE_INDEX};

/// The entries of one input, row by row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Entries<'a> {
    /// Numbers.
    F32(&'a [f32]),
    /// Numbers in 16 bits.
    Bf16(&'a [bf16]),
    /// Ids, positions, labels.
    I32(&'a [i32]),
    /// Bytes: the values of pixels.
    U8(&'a [u8]),
}

impl<'a> Entries<'a> {
    /// Their type.
    pub fn dtype(self) -> DType {
        match self {
            Entries::F32(_) => DType::F32,
            Entries::Bf16(_) => DType::BF16,
            Entries::I32(_) => DType::I32,
            Entries::U8(_) => DType::U8,
        }
    }

    /// The number of entries.
    pub fn count(self) -> usize {
        self.bytes().len() / self.dtype().size_bytes()
    }

    /// The entries as raw bytes.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Entries::F32(entries) => bytes_of(entries),
            Entries::Bf16(entries) => bytes_of(entries),
            Entries::I32(entries) => bytes_of(entries),
            Entries::U8(entries) => entries,
        }
    }
}

/// A micro-batch. [`Batch`](crate::Batch) holds tokens, [`NamedInputs`] anything.
///
/// A program defines its own inputs. Two names have a meaning to the trainer: it fills the scalar input `denominator`
/// with the sum of [`MicroBatch::counted`] over the step, and it minimizes the program's result `loss`.
pub trait MicroBatch {
    /// The entries of an input; `None` if there is no such input.
    fn entries(&self, input: &str) -> Option<Entries<'_>>;

    /// Number of targets that count. The loss of a step is normalized by their sum.
    fn counted(&self) -> usize;

    /// Units for throughput: tokens of sequences, otherwise samples.
    fn units(&self) -> usize {
        self.counted()
    }

    /// Checks the batch against the options, in addition to the checks for every micro-batch: types and numbers of
    /// entries, and the range of ids.
    ///
    /// # Errors
    /// The batch does not fit.
    fn check(&self, _: &TrainOptions) -> Result<(), TrainError> {
        Ok(())
    }
}

impl<B: MicroBatch> MicroBatch for &B {
    fn entries(&self, input: &str) -> Option<Entries<'_>> {
        (**self).entries(input)
    }

    fn counted(&self) -> usize {
        (**self).counted()
    }

    fn units(&self) -> usize {
        (**self).units()
    }

    fn check(&self, options: &TrainOptions) -> Result<(), TrainError> {
        (**self).check(options)
    }
}

/// A micro-batch of named inputs.
///
/// ```
/// use storm_train::{Entries, MicroBatch, NamedInputs};
///
/// let inputs = NamedInputs::new(2)
///     .with("features", vec![0.5f32, -1.0, 2.0, 0.25]) // (2, 2)
///     .with("targets", vec![1i32, 0]);
/// assert_eq!(inputs.entries("targets"), Some(Entries::I32(&[1, 0])));
/// assert_eq!(inputs.counted(), 2);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamedInputs {
    inputs: BTreeMap<String, Values>,
    counted: usize,
}

/// Owned entries.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// See [`Entries::F32`].
    F32(Vec<f32>),
    /// See [`Entries::Bf16`].
    Bf16(Vec<bf16>),
    /// See [`Entries::I32`].
    I32(Vec<i32>),
    /// See [`Entries::U8`].
    U8(Vec<u8>),
}

macro_rules! values {
    ($($variant:ident: $ty:ty),*) => {
        $(impl From<Vec<$ty>> for Values {
            fn from(values: Vec<$ty>) -> Values {
                Values::$variant(values)
            }
        })*
    };
}

values!(F32: f32, Bf16: bf16, I32: i32, U8: u8);

impl NamedInputs {
    /// A batch without inputs. `counted` is its contribution to the step's denominator: the number of its samples, or
    /// of its targets that count.
    pub fn new(counted: usize) -> NamedInputs {
        NamedInputs { inputs: BTreeMap::new(), counted }
    }

    /// Adds an input, or replaces the one of the same name.
    pub fn with(mut self, name: impl Into<String>, values: impl Into<Values>) -> NamedInputs {
        self.inputs.insert(name.into(), values.into());
        self
    }

    /// Sets the number of targets that count.
    pub(crate) fn set_counted(&mut self, counted: usize) {
        self.counted = counted;
    }

    /// The bytes of an input, to be refilled; an input of another type is replaced.
    pub(crate) fn bytes_mut(&mut self, name: &str) -> &mut Vec<u8> {
        let values = self.values_mut(name, || Values::U8(Vec::new()));
        if !matches!(values, Values::U8(_)) {
            *values = Values::U8(Vec::new());
        }
        match values {
            Values::U8(bytes) => bytes,
            _ => unreachable!("it was just made so"),
        }
    }

    /// The ids of an input, to be refilled; an input of another type is replaced.
    pub(crate) fn ids_mut(&mut self, name: &str) -> &mut Vec<i32> {
        let values = self.values_mut(name, || Values::I32(Vec::new()));
        if !matches!(values, Values::I32(_)) {
            *values = Values::I32(Vec::new());
        }
        match values {
            Values::I32(ids) => ids,
            _ => unreachable!("it was just made so"),
        }
    }

    /// Returns an input, adding it if necessary. Allocates its name only the first time.
    fn values_mut(&mut self, name: &str, start: impl FnOnce() -> Values) -> &mut Values {
        if !self.inputs.contains_key(name) {
            self.inputs.insert(name.to_owned(), start());
        }
        self.inputs.get_mut(name).unwrap_or_else(|| unreachable!("it was just put there"))
    }
}

impl MicroBatch for NamedInputs {
    fn entries(&self, input: &str) -> Option<Entries<'_>> {
        Some(match self.inputs.get(input)? {
            Values::F32(values) => Entries::F32(values),
            Values::Bf16(values) => Entries::Bf16(values),
            Values::I32(values) => Entries::I32(values),
            Values::U8(values) => Entries::U8(values),
        })
    }

    fn counted(&self) -> usize {
        self.counted
    }

    /// Checks the count against the targets: a wrong count would scale the loss and its gradients.
    fn check(&self, _: &TrainOptions) -> Result<(), TrainError> {
        let Some(Values::I32(targets)) = self.inputs.get("targets") else { return Ok(()) };
        let counted = targets.iter().filter(|&&target| target != IGNORE_INDEX).count();
        if counted != self.counted {
            let problem = format!("{counted} of `targets` count, not {} as it says", self.counted);
            return Err(TrainError::Batch { problem });
        }
        Ok(())
    }
}
