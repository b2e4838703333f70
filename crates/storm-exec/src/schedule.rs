//! A program, unrolled: every node of every layer in execution order, over values that are either
//! slots or places in the work area.

use crate::{ExecError, SlotId, Slots};
use std::collections::BTreeMap;
use std::sync::Arc;
use storm_graph::{Graph, Phase, Program, Section, Tensor, TensorClass, TensorId};

/// Which of a [`Resident`](crate::Resident)'s schedules to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleId(pub(crate) usize);

/// One tensor of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ValueId(pub(crate) usize);

#[derive(Clone, Debug)]
pub(crate) enum Home {
    Slot(SlotId),
    /// In the work area, from the step that makes it to the last that reads it.
    Work {
        size_bytes: usize,
        made: usize,
        last_read: usize,
    },
}

/// One node of one layer.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) graph: Arc<Graph>,
    pub(crate) node: usize,
    pub(crate) layer: u16,
    /// The value of each tensor of the graph, as far as the step needs it.
    pub(crate) values: Arc<Vec<Option<ValueId>>>,
}

/// Steps in order, ready to be laid out in memory.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    pub(crate) values: Vec<Home>,
    pub(crate) steps: Vec<Step>,
    results: BTreeMap<String, (ValueId, Tensor)>,
    slot_values: BTreeMap<SlotId, ValueId>,
}

/// The name of a parameter or cache in a slot: `layers.3.attention.qkv.weight`, or as it is.
pub(crate) fn layer_name(name: &str, layer: Option<usize>) -> String {
    match layer {
        Some(layer) => format!("layers.{layer}.{name}"),
        None => name.to_owned(),
    }
}

impl Schedule {
    /// Forward pass, and backward pass if the program was differentiated. Parameters, caches, inputs and
    /// gradients (`NAME.grad`) are slots; results stay readable until the schedule runs again.
    ///
    /// # Errors
    /// An outside tensor has no slot.
    pub fn of_program(program: &Program, slots: &Slots) -> Result<Schedule, ExecError> {
        Unrolling { program, slots, schedule: Schedule::default(), exports: BTreeMap::new() }
            .unroll()
    }

    /// Appends a graph by itself. `slot_of` binds tensors to slots: all from outside, and whatever
    /// the graph makes that is to last. In-place results stay with what they overwrite.
    ///
    /// # Errors
    /// A tensor from outside has no slot.
    pub fn add_graph(
        &mut self,
        graph: Graph,
        layer: u16,
        slot_of: impl Fn(&Tensor) -> Option<SlotId>,
    ) -> Result<(), ExecError> {
        let graph = Arc::new(graph);
        let mut values = vec![None; graph.tensors().len()];
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            match slot_of(tensor) {
                Some(slot) if overwritten_by(&graph, id).is_none() => {
                    values[id.index()] = Some(self.slot_value(slot));
                }
                None if graph.producer(id).is_none() => {
                    let tensor = tensor.name.clone();
                    return Err(ExecError::NoSlot { section: "graph".to_owned(), tensor });
                }
                _ => {}
            }
        }
        self.add_nodes(&graph, None, layer, &mut values);
        Ok(())
    }

    /// Where a result lies: value and description.
    pub(crate) fn result(&self, name: &str) -> Option<&(ValueId, Tensor)> {
        self.results.get(name)
    }

    fn slot_value(&mut self, slot: SlotId) -> ValueId {
        let values = &mut self.values;
        *self.slot_values.entry(slot).or_insert_with(|| {
            values.push(Home::Slot(slot));
            ValueId(values.len() - 1)
        })
    }

    /// Appends the nodes of a phase (or all), giving each new tensor a value.
    fn add_nodes(
        &mut self,
        graph: &Arc<Graph>,
        phase: Option<Phase>,
        layer: u16,
        values: &mut [Option<ValueId>],
    ) {
        let first = self.steps.len();
        for (index, node) in graph.nodes().iter().enumerate() {
            if phase.is_some_and(|phase| phase != node.phase) {
                continue;
            }
            let step = self.steps.len();
            for (_, operand) in node.op.operands() {
                let value =
                    values[operand.index()].expect("operands are made before they are read");
                if let Home::Work { last_read, .. } = &mut self.values[value.0] {
                    *last_read = step;
                }
            }
            let in_place = node.op.in_place();
            for (place, &output) in node.outputs.iter().enumerate() {
                if values[output.index()].is_some() {
                    continue; // a gradient whose slot is known
                }
                let over = in_place.iter().find(|&&(_, index)| index == place);
                values[output.index()] = Some(match over {
                    Some(&(operand, _)) => values[operand.index()].expect("read above"),
                    None => {
                        let size_bytes = graph.tensor(output).size_bytes();
                        self.values.push(Home::Work { size_bytes, made: step, last_read: step });
                        ValueId(self.values.len() - 1)
                    }
                });
            }
            self.steps.push(Step {
                graph: Arc::clone(graph),
                node: index,
                layer,
                values: Arc::default(),
            });
        }
        let values = Arc::new(values.to_vec());
        for step in &mut self.steps[first..] {
            step.values = Arc::clone(&values);
        }
    }
}

struct Unrolling<'a> {
    program: &'a Program,
    slots: &'a Slots,
    schedule: Schedule,
    exports: BTreeMap<String, ValueId>,
}

/// A section in one place of the model, with the values of its tensors.
struct Instance<'a> {
    section: &'a Section,
    graph: Arc<Graph>,
    layer: Option<usize>,
    values: Vec<Option<ValueId>>,
}

impl<'a> Unrolling<'a> {
    fn unroll(mut self) -> Result<Schedule, ExecError> {
        let program = self.program;
        let graphs = program.sections().map(|section| Arc::new(section.graph.clone()));
        let [prologue, layer, epilogue] = &graphs;
        let mut instances = vec![self.instance(&program.prologue, prologue, None)?];
        for index in 0..program.layer_count {
            instances.push(self.instance(&program.layer, layer, Some(index))?);
        }
        instances.push(self.instance(&program.epilogue, epilogue, None)?);

        let mut carried: Vec<ValueId> = Vec::new();
        for instance in &mut instances {
            for (&id, &value) in instance.section.carried_in.iter().zip(&carried) {
                instance.values[id.index()] = Some(value);
            }
            self.bind_exports(instance)?;
            self.run_phase(instance, Phase::Forward);
            carried = instance.known(&instance.section.carried_out);
            for (name, id) in &instance.section.exports {
                let value = instance.known(&[*id])[0];
                self.exports.insert(name.clone(), value);
            }
        }

        let mut gradients: Vec<ValueId> = Vec::new();
        for instance in instances.iter_mut().rev() {
            let Some(backward) = &instance.section.backward else { break };
            for (&id, &value) in backward.carried_out_gradients.iter().zip(&gradients) {
                instance.values[id.index()] = Some(value);
            }
            self.bind_gradients(instance)?;
            self.run_phase(instance, Phase::Backward);
            gradients = instance.known(&backward.carried_in_gradients);
        }

        // Results outlive the schedule.
        let end = self.schedule.steps.len();
        for instance in &instances {
            for (name, id) in &instance.section.results {
                let value = instance.known(&[*id])[0];
                if let Home::Work { last_read, .. } = &mut self.schedule.values[value.0] {
                    *last_read = end;
                }
                let tensor = instance.graph.tensor(*id).clone();
                self.schedule.results.insert(name.clone(), (value, tensor));
            }
        }
        Ok(self.schedule)
    }

    /// Binds parameters, caches and inputs to their slots.
    fn instance(
        &mut self,
        section: &'a Section,
        graph: &Arc<Graph>,
        layer: Option<usize>,
    ) -> Result<Instance<'a>, ExecError> {
        let mut values = vec![None; graph.tensors().len()];
        for id in section.outside_tensors() {
            let Tensor { name, class, .. } = graph.tensor(id);
            let slot = match class {
                TensorClass::Parameter(_) | TensorClass::Cache => {
                    Some(self.slot(section, &layer_name(name, layer))?)
                }
                _ => self.slots.find(name),
            };
            values[id.index()] = slot.map(|slot| self.schedule.slot_value(slot));
        }
        Ok(Instance { section, graph: Arc::clone(graph), layer, values })
    }

    /// Binds what the sections before it export; whatever is still unknown has no slot.
    fn bind_exports(&self, instance: &mut Instance<'_>) -> Result<(), ExecError> {
        for id in instance.section.outside_tensors() {
            let name = &instance.graph.tensor(id).name;
            if let Some(&value) = self.exports.get(name) {
                instance.values[id.index()] = Some(value);
            } else if instance.values[id.index()].is_none() {
                return Err(no_slot(instance.section, name));
            }
        }
        Ok(())
    }

    /// Binds each parameter's gradient, and every tensor that it is accumulated through in place,
    /// to the gradient's slot.
    fn bind_gradients(&mut self, instance: &mut Instance<'_>) -> Result<(), ExecError> {
        let graph = Arc::clone(&instance.graph);
        let backward = instance.section.backward.as_ref().expect("checked by the caller");
        for gradient in &backward.parameters {
            let name = layer_name(&graph.tensor(gradient.parameter).name, instance.layer);
            let slot = self.slot(instance.section, &format!("{name}.grad"))?;
            let value = self.schedule.slot_value(slot);
            let mut link = Some(gradient.gradient);
            while let Some(id) = link {
                instance.values[id.index()] = Some(value);
                link = overwritten_by(&graph, id);
            }
        }
        Ok(())
    }

    fn run_phase(&mut self, instance: &mut Instance<'_>, phase: Phase) {
        let layer = instance.layer.unwrap_or(0) as u16;
        self.schedule.add_nodes(&instance.graph, Some(phase), layer, &mut instance.values);
    }

    fn slot(&self, section: &Section, name: &str) -> Result<SlotId, ExecError> {
        self.slots.find(name).ok_or_else(|| no_slot(section, name))
    }
}

impl Instance<'_> {
    fn known(&self, ids: &[TensorId]) -> Vec<ValueId> {
        ids.iter().map(|id| self.values[id.index()].expect("made by the section")).collect()
    }
}

fn no_slot(section: &Section, tensor: &str) -> ExecError {
    ExecError::NoSlot { section: section.name.to_owned(), tensor: tensor.to_owned() }
}

/// The tensor whose memory `id` takes over, if it is made in place.
fn overwritten_by(graph: &Graph, id: TensorId) -> Option<TensorId> {
    let node = &graph.nodes()[graph.producer(id)?];
    let place = node.outputs.iter().position(|&output| output == id)?;
    node.op.in_place().into_iter().find(|&(_, index)| index == place).map(|(operand, _)| operand)
}
