//! The inputs a program reads from a micro-batch, and their checks.

use crate::feed::foreign;
use crate::micro_batch::{Entries, MicroBatch};
use crate::optimizer::names;
use crate::{TrainError, TrainOptions};
use std::collections::BTreeSet;
use storm_exec::{SlotId, Slots};
use storm_graph::{DType, IGNORE_INDEX, Op, Program, order_name};
use storm_model::{DROPOUT_INPUT, PHASE_INPUT};

/// The input with the number of targets in the step that count.
pub(crate) const DENOMINATOR: &str = "denominator";

/// The rules for a program's micro-batches.
#[derive(Clone, Debug)]
pub(crate) struct InputRules {
    rules: Vec<Rule>,
}

/// The rule for one input.
#[derive(Clone, Debug)]
struct Rule {
    name: String,
    dtype: DType,
    count: usize,
    /// Upper bound of ids: the number of rows of every table they index.
    below: Option<usize>,
    /// Whether an id may be [`IGNORE_INDEX`].
    may_be_ignored: bool,
}

/// The data that fills an input, once per micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// The micro-batch's entries of that name.
    Entries(String),
    /// Row indices sorted by the ids of that name, for the gradient of a table.
    Order(String),
}

impl InputRules {
    /// The rules of a program that is not differentiated yet.
    pub(crate) fn of_program(program: &Program) -> InputRules {
        let by_trainer = [DENOMINATOR, names::SCALARS, names::RANDOM, DROPOUT_INPUT, PHASE_INPUT];
        let inputs = program.inputs().into_iter();
        let read = inputs.filter(|input| !by_trainer.contains(&input.name.as_str()));
        let mut rules: Vec<Rule> = read
            .map(|input| Rule {
                count: input.shape.elements(),
                dtype: input.dtype,
                name: input.name,
                below: None,
                may_be_ignored: true,
            })
            .collect();
        for graph in program.templates().iter().map(|section| &section.graph) {
            for node in graph.nodes() {
                let (ids, table, may_be_ignored) = match node.op {
                    Op::Embedding { ids, table } => (ids, table, false),
                    Op::HeadLoss { targets, weight, .. } => (targets, weight, true),
                    _ => continue,
                };
                let rows = graph.tensor(table).shape.axes()[0];
                let name = &graph.tensor(ids).name;
                if let Some(rule) = rules.iter_mut().find(|rule| rule.name == *name) {
                    rule.below = Some(rule.below.map_or(rows, |below| below.min(rows)));
                    rule.may_be_ignored &= may_be_ignored;
                }
            }
        }
        InputRules { rules }
    }

    /// The data that fills an input of the program or its derivative; `None` if the trainer or nothing fills it.
    pub(crate) fn reading(&self, input: &str) -> Option<Reading> {
        self.rules.iter().find_map(|Rule { name, .. }| match input {
            _ if input == name => Some(Reading::Entries(name.clone())),
            _ if input == order_name(name) => Some(Reading::Order(name.clone())),
            _ => None,
        })
    }

    /// All readings of a program with these slots, and the slot of each.
    pub(crate) fn slots(&self, slots: &Slots) -> Vec<(Reading, SlotId)> {
        let readings = |Rule { name, .. }: &Rule| {
            [Reading::Entries(name.clone()), Reading::Order(name.clone())]
        };
        let slot = |reading: &Reading| match reading {
            Reading::Entries(name) => slots.find(name),
            Reading::Order(name) => slots.find(&order_name(name)),
        };
        let readings = self.rules.iter().flat_map(readings);
        readings.filter_map(|reading| Some((reading.clone(), slot(&reading)?))).collect()
    }

    /// The inputs from a micro-batch: name, dtype and number of entries.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = (&str, DType, usize)> {
        self.rules.iter().map(|rule| (rule.name.as_str(), rule.dtype, rule.count))
    }

    /// The largest number of entries of any input.
    pub(crate) fn count_max(&self) -> usize {
        self.rules.iter().map(|rule| rule.count).max().unwrap_or(0)
    }

    /// Checks that a plan's input matches the program's.
    pub(crate) fn check_form(
        &self,
        input: &str,
        dtype: DType,
        count: usize,
    ) -> Result<(), TrainError> {
        match self.rules.iter().find(|rule| rule.name == input) {
            Some(rule) if rule.dtype != dtype || rule.count != count => Err(foreign(format!(
                "`{input}` has {count} entries of {dtype} there, not {} of {}",
                rule.count, rule.dtype
            ))),
            _ => Ok(()),
        }
    }

    /// Checks all micro-batches of a step and sums the targets that count.
    ///
    /// # Errors
    /// An entry is invalid, or no target counts. The message says which entry and what is allowed.
    pub(crate) fn check<B: MicroBatch>(
        &self,
        batches: &[B],
        options: &TrainOptions,
    ) -> Result<usize, TrainError> {
        batches.iter().try_for_each(|batch| {
            batch.check(options)?;
            self.check_entries(batch)
        })?;
        match batches.iter().map(B::counted).sum() {
            0 => Err(InputRules::nothing_counts(batches.len())),
            counted => Ok(counted),
        }
    }

    /// The error for a step in which no target counts.
    pub(crate) fn nothing_counts(micro_batches: usize) -> TrainError {
        let problem = match micro_batches {
            0 => "the step has no batches",
            _ => "no target of the step counts: every one is ignored",
        };
        TrainError::Batch { problem: problem.to_owned() }
    }

    /// The inputs of a program, differentiated or not, that micro-batches fill.
    pub(crate) fn data_inputs(&self, program: &Program) -> BTreeSet<String> {
        let names = program.inputs().into_iter().map(|input| input.name);
        names.filter(|name| self.reading(name).is_some()).collect()
    }

    /// Checks one micro-batch against all rules.
    pub(crate) fn check_entries(&self, batch: &impl MicroBatch) -> Result<(), TrainError> {
        self.rules.iter().try_for_each(|rule| rule.check(batch))
    }
}

impl Rule {
    fn check(&self, batch: &impl MicroBatch) -> Result<(), TrainError> {
        let Rule { name, dtype, count, .. } = self;
        let problem = |problem: String| Err(TrainError::Batch { problem });
        let Some(entries) = batch.entries(name) else {
            return problem(format!("has no `{name}`, which the model reads"));
        };
        if entries.dtype() != *dtype {
            return problem(format!("`{name}` is {}; the model reads {dtype}", entries.dtype()));
        }
        if entries.count() != *count {
            return problem(format!("`{name}` has {} entries, not {count}", entries.count()));
        }
        let (Entries::I32(ids), Some(below)) = (entries, self.below) else { return Ok(()) };
        let is_known = |id: i32| {
            usize::try_from(id).is_ok_and(|id| id < below)
                || (self.may_be_ignored && id == IGNORE_INDEX)
        };
        match ids.iter().position(|&id| !is_known(id)) {
            Some(at) => problem(format!(
                "`{name}` has {} at entry {at}; the model knows 0 to {}",
                ids[at],
                below - 1
            )),
            None => Ok(()),
        }
    }
}

impl Reading {
    /// The entries of a micro-batch that was checked. Sorted orders are written to `staging`, which must have room for
    /// one.
    pub(crate) fn entries<'a>(
        &self,
        batch: &'a impl MicroBatch,
        staging: &'a mut [i32],
    ) -> Entries<'a> {
        let of = |name: &str| batch.entries(name).expect("checked");
        match self {
            Reading::Entries(name) => of(name),
            Reading::Order(name) => {
                let Entries::I32(ids) = of(name) else { unreachable!("only ids are sorted by") };
                let order = &mut staging[..ids.len()];
                sort_rows(ids, order);
                Entries::I32(order)
            }
        }
    }
}

/// Writes the rows of `ids` sorted by (id, row) into `order`, without allocating.
pub(crate) fn sort_rows(ids: &[i32], order: &mut [i32]) {
    for (row, order) in order.iter_mut().enumerate() {
        *order = row as i32;
    }
    // Keys are distinct, so an unstable sort gives the stable order.
    order.sort_unstable_by_key(|&row| (ids[row as usize], row));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, NamedInputs, Precision};
    use storm_graph::{SectionBuilder, Stage};

    /// Reads 2 tokens of 10 and says which of 4 follows; a table of 3 positions.
    fn rules() -> InputRules {
        let mut section = SectionBuilder::new("model", 1, 2, DType::F32);
        let tokens = section.embedding("tokens", 10, 8).unwrap();
        let positions = section.embedding("positions", 3, 8).unwrap();
        let a = section.linear("a", tokens, 8).unwrap();
        let hidden = section.linear_onto("b", positions, a).unwrap();
        let section = section.loss(hidden, 4, 16).unwrap();
        let program = Program::new(vec![section], vec![Stage::once("model", 0)]).unwrap();
        InputRules::of_program(&program)
    }

    fn error(batch: &impl MicroBatch) -> String {
        let options = TrainOptions::new(1, 2, Precision::F32);
        let batches = [batch];
        rules().check(&batches, &options).unwrap_err().to_string()
    }

    #[test]
    fn rows_are_sorted_by_id_then_row() {
        let mut order = [0; 6];
        sort_rows(&[3, 1, 3, 0, 1, 3], &mut order);
        assert_eq!(order, [3, 1, 4, 0, 2, 5]);
    }

    #[test]
    fn bad_ids_are_named() {
        let batch = Batch::new(vec![1, 10], vec![1, IGNORE_INDEX], 2);
        assert_eq!(error(&batch), "batch: `tokens` has 10 at entry 1; the model knows 0 to 9");
        let batch = Batch::new(vec![1, IGNORE_INDEX], vec![1, 1], 2);
        assert_eq!(error(&batch), "batch: `tokens` has -100 at entry 1; the model knows 0 to 9");
        let batch = Batch::new(vec![1, 2], vec![-1, 2], 2);
        assert_eq!(error(&batch), "batch: `targets` has -1 at entry 0; the model knows 0 to 3");
        let batch = Batch::new(vec![1, 2, 3], vec![1, 2], 3);
        assert_eq!(error(&batch), "batch: `tokens` has 3 entries, not 2");
        let mut batch = Batch::new(vec![1, 2], vec![1, 2], 2);
        batch.positions[1] = 3;
        assert_eq!(error(&batch), "batch: `positions` has 3 at entry 1; the model knows 0 to 2");
        let batch = Batch::new(vec![1, 2], vec![IGNORE_INDEX; 2], 2);
        assert_eq!(error(&batch), "batch: no target of the step counts: every one is ignored");
    }

    #[test]
    fn inputs_are_checked_by_name_type_and_count() {
        let good = NamedInputs::new(2)
            .with("tokens", vec![1, 2])
            .with("positions", vec![0, 1])
            .with("targets", vec![3, 0]);
        let options = TrainOptions::new(1, 2, Precision::F32);
        assert_eq!(rules().check(&[good.clone(), good.clone()], &options).unwrap(), 4);
        let without = NamedInputs::new(1).with("tokens", vec![1, 2]).with("targets", vec![0, -100]);
        assert_eq!(error(&without), "batch: has no `positions`, which the model reads");
        let other = good.clone().with("positions", vec![0.0f32, 1.0]);
        assert_eq!(error(&other), "batch: `positions` is f32; the model reads i32");
        let longer = good.clone().with("positions", vec![0, 1, 2]);
        assert_eq!(error(&longer), "batch: `positions` has 3 entries, not 2");
        let wrong = good.with("targets", vec![3, IGNORE_INDEX]);
        assert_eq!(error(&wrong), "batch: 1 of `targets` count, not 2 as it says");
    }

    #[test]
    fn readings_are_found_by_name() {
        let rules = rules();
        assert_eq!(rules.reading("tokens"), Some(Reading::Entries("tokens".to_owned())));
        let order = rules.reading(&order_name("tokens")).unwrap();
        assert_eq!(order, Reading::Order("tokens".to_owned()));
        assert_eq!(rules.reading(DENOMINATOR), None);
        let batch = Batch::new(vec![4, 1], vec![1, 1], 2);
        let mut staging = [0; 5];
        assert_eq!(order.entries(&batch, &mut staging), Entries::I32(&[1, 0]));
    }
}
