//! Update statistics per group of parameters: the cosine with the previous update, and the size
//! relative to the weights. The update kernels compute the sums in the same pass.

use crate::optimizer::names;
use crate::{TrainError, Trainer};
use rayon::prelude::*;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::ops::Range;
use storm_device::PlanDevice;
use storm_graph::{MomentFormat, OBSERVED_SUMS, ParameterInstance, ParameterRows, Training};

/// Parameters whose updates are observed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterGroup {
    /// Embeddings and heads.
    Tables,
    /// Other matrices with `attention` in their name.
    Attention,
    /// Other matrices with `mlp` in their name.
    Mlp,
    /// Biases and norm weights.
    Vectors,
    /// All others, such as convolutions.
    Other,
}

impl ParameterGroup {
    /// All groups.
    pub const ALL: [ParameterGroup; 5] = [
        ParameterGroup::Tables,
        ParameterGroup::Attention,
        ParameterGroup::Mlp,
        ParameterGroup::Vectors,
        ParameterGroup::Other,
    ];

    /// Its name in logs.
    pub fn name(self) -> &'static str {
        match self {
            ParameterGroup::Tables => "tables",
            ParameterGroup::Attention => "attention",
            ParameterGroup::Mlp => "mlp",
            ParameterGroup::Vectors => "vectors",
            ParameterGroup::Other => "other",
        }
    }

    fn of(ParameterInstance { name, parameter, .. }: &ParameterInstance) -> ParameterGroup {
        match parameter.rows {
            _ if parameter.shape.rank() < 2 => ParameterGroup::Vectors,
            ParameterRows::Other if name.contains("attention") => ParameterGroup::Attention,
            ParameterRows::Other if name.contains("mlp") => ParameterGroup::Mlp,
            ParameterRows::Other => ParameterGroup::Other,
            _ => ParameterGroup::Tables,
        }
    }
}

/// Update statistics of a group of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct UpdateSeen {
    /// Cosine of the angle to the previous update. 0 if either is zero.
    pub cosine: f32,
    /// Norm of the update, without weight decay, divided by the norm of the weights. 0 if the
    /// weights are zero.
    pub ratio: f32,
}

/// Update statistics in the order of [`ParameterGroup::ALL`]. `None` for groups without parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UpdatesSeen(pub [Option<UpdateSeen>; ParameterGroup::ALL.len()]);

/// A map by group name.
impl Serialize for UpdatesSeen {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let named = ParameterGroup::ALL.iter().map(|group| group.name()).zip(&self.0);
        to.collect_map(named.filter_map(|(name, seen)| Some((name, seen.as_ref()?))))
    }
}

impl<'de> Deserialize<'de> for UpdatesSeen {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<UpdatesSeen, D::Error> {
        let named: BTreeMap<String, UpdateSeen> = Deserialize::deserialize(from)?;
        Ok(UpdatesSeen(ParameterGroup::ALL.map(|group| named.get(group.name()).copied())))
    }
}

/// Copies of the update statistics in host memory: where the device writes them, and where they are added up.
pub(super) const STATISTICS_COPIES: usize = 2;

/// Fewer bytes are added up faster than other threads wake up.
const PARALLEL_MIN_BYTES: usize = 1 << 18;

/// Sums over all updates of a step.
type Sums = [f64; OBSERVED_SUMS];

fn seen([squares, products, earlier, weights]: Sums) -> UpdateSeen {
    // A non-finite step is undone or ends the run.
    let quotient = |a: f64, b: f64| if a.is_finite() && b > 0.0 { (a / b) as f32 } else { 0.0 };
    UpdateSeen {
        cosine: quotient(products, (squares * earlier).sqrt()),
        ratio: quotient(squares.sqrt(), weights.sqrt()),
    }
}

/// Location of a parameter's sums in the buffer.
struct Source {
    tensor: String,
    group: usize,
    bytes: Range<usize>,
}

/// Statistics of the last applied update, unless the plan has one pending.
enum Applied {
    Read(UpdatesSeen),
    /// The device reads them beside the next step.
    Begun,
}

/// Reads the update statistics of a run.
///
/// Some plans apply the update of a step during the next step. To be independent of the plan, this
/// always shows the update of the step before the last.
pub(super) struct UpdateWatch {
    sources: Vec<Source>,
    buffer: Vec<u8>,
    applied: Applied,
    shown: UpdatesSeen,
}

impl UpdateWatch {
    /// `None` if the optimizer does not record update statistics.
    pub(super) fn new<D: PlanDevice>(trainer: &Trainer<D>) -> Option<UpdateWatch> {
        let options = trainer.options();
        let (mut sources, mut end) = (Vec::new(), 0);
        for instance in trainer.instances() {
            let parameter = &instance.parameter;
            if parameter.training != Training::Trainable {
                continue;
            }
            let state = options.optimizer.state(options.precision, parameter);
            if state.iter().all(|(suffix, _)| *suffix != names::OBSERVED) {
                continue;
            }
            let bytes = MomentFormat::Observed.size_bytes(parameter.shape.elements());
            let group = ParameterGroup::of(instance);
            sources.push(Source {
                tensor: format!("{}.{}", instance.name, names::OBSERVED),
                group: ParameterGroup::ALL.iter().position(|known| *known == group).unwrap_or(0),
                bytes: end..end + bytes,
            });
            end += bytes;
        }
        // No updates yet.
        let mut none = UpdatesSeen::default();
        for source in &sources {
            none.0[source.group] = Some(seen([0.0; OBSERVED_SUMS]));
        }
        let watch = UpdateWatch {
            sources,
            buffer: vec![0; end],
            applied: Applied::Read(none),
            shown: none,
        };
        (!watch.sources.is_empty()).then_some(watch)
    }

    /// Host memory it needs.
    pub(super) fn size_bytes(&self) -> u64 {
        (STATISTICS_COPIES * self.buffer.len()) as u64
    }

    /// Statistics of the update of the step before the last.
    pub(super) fn shown(&self) -> UpdatesSeen {
        self.shown
    }

    /// Reads the statistics after a step, before anything else is done with the trainer.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn after_step<D: PlanDevice>(
        &mut self,
        trainer: &mut Trainer<D>,
    ) -> Result<(), TrainError> {
        if trainer.has_pending_update() {
            self.shown = self.read(trainer)?;
            return Ok(());
        }
        self.shown = match self.applied {
            Applied::Read(read) => read,
            Applied::Begun if trainer.finish_read_applied(&mut self.buffer)? => self.sum(),
            Applied::Begun => unreachable!("it was begun after the step before"),
        };
        let names = self.sources.iter().map(|source| source.tensor.as_str());
        self.applied = match trainer.begin_read_applied(names)? {
            true => Applied::Begun,
            false => Applied::Read(self.read(trainer)?),
        };
        Ok(())
    }

    /// Reads the statistics of a trainer whose state was just restored.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn restart<D: PlanDevice>(
        &mut self,
        trainer: &mut Trainer<D>,
    ) -> Result<(), TrainError> {
        self.applied = Applied::Read(self.read(trainer)?);
        Ok(())
    }

    fn read<D: PlanDevice>(&mut self, trainer: &mut Trainer<D>) -> Result<UpdatesSeen, TrainError> {
        let mut rest = self.buffer.as_mut_slice();
        let mut reads = Vec::with_capacity(self.sources.len());
        for source in &self.sources {
            let (bytes, after) = rest.split_at_mut(source.bytes.len());
            reads.push((source.tensor.as_str(), bytes));
            rest = after;
        }
        trainer.read_applied(reads)?;
        Ok(self.sum())
    }

    /// The statistics in the buffer.
    fn sum(&self) -> UpdatesSeen {
        let buffer = &self.buffer;
        // Summed in order within a parameter, then parameter by parameter.
        let of_source = |source: &Source| {
            let mut sums = [0.0; OBSERVED_SUMS];
            for block in buffer[source.bytes.clone()].chunks_exact(4 * OBSERVED_SUMS) {
                for (sum, word) in sums.iter_mut().zip(block.chunks_exact(4)) {
                    let word = [word[0], word[1], word[2], word[3]];
                    *sum += f64::from(f32::from_ne_bytes(word));
                }
            }
            sums
        };
        let sums: Vec<Sums> = match buffer.len() < PARALLEL_MIN_BYTES {
            true => self.sources.iter().map(of_source).collect(),
            false => self.sources.par_iter().map(of_source).collect(),
        };
        let mut groups: [Option<Sums>; ParameterGroup::ALL.len()] = Default::default();
        for (source, sums) in self.sources.iter().zip(sums) {
            let group = groups[source.group].get_or_insert([0.0; OBSERVED_SUMS]);
            group.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
        }
        UpdatesSeen(groups.map(|sums| sums.map(seen)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_become_cosines_and_ratios() {
        let UpdateSeen { cosine, ratio } = seen([4.0, -3.0, 9.0, 1600.0]);
        assert_eq!((cosine, ratio), (-0.5, 0.05));
        for sums in [[0.0; 4], [f64::NAN; 4], [f64::INFINITY; 4], [1.0, 0.0, 0.0, 0.0]] {
            assert_eq!(seen(sums), UpdateSeen { cosine: 0.0, ratio: 0.0 }, "{sums:?}");
        }
    }
}
