//! An unrolled program: every node of every layer in execution order. Its values are slots or buffers in the work area.

use crate::{ExecError, SlotId, Slots};
use std::collections::BTreeMap;
use std::sync::Arc;
use storm_graph::{Block, Graph, Phase, Program, Section, Tensor, TensorClass, TensorId};

/// The index of one of a [`Resident`](crate::Resident)'s schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleId(pub(crate) usize);

/// One tensor of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ValueId(pub(crate) usize);

#[derive(Clone, Debug)]
pub(crate) enum Home {
    Slot(SlotId),
    /// In the work area, from the step that computes it to the last that reads it.
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
    /// The value of each tensor of the graph that the step needs.
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

/// The part of a graph that runs in one pass over the model.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
}

impl Pass {
    fn of(phase: Phase) -> Pass {
        match phase {
            Phase::Forward => Pass::Forward,
            Phase::Backward | Phase::Recompute => Pass::Backward,
        }
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

    /// Appends a single graph. `slot_of` binds tensors to slots: all sources, and those computed by the
    /// graph that persist. In-place results share the value that they overwrite.
    ///
    /// # Errors
    /// A source has no slot.
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

    /// The value and tensor of a result.
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

    /// Appends the nodes of a pass (or all nodes), giving each new tensor a value.
    fn add_nodes(
        &mut self,
        graph: &Arc<Graph>,
        pass: Option<Pass>,
        layer: u16,
        values: &mut [Option<ValueId>],
    ) {
        let first = self.steps.len();
        for (index, node) in graph.nodes().iter().enumerate() {
            if pass.is_some_and(|pass| pass != Pass::of(node.phase)) {
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

/// A block of the program, with the values of its tensors.
struct Instance<'a> {
    section: &'a Section,
    graph: Arc<Graph>,
    block: Block,
    values: Vec<Option<ValueId>>,
}

impl<'a> Unrolling<'a> {
    fn unroll(mut self) -> Result<Schedule, ExecError> {
        let program = self.program;
        let graphs: Vec<Arc<Graph>> =
            program.templates().iter().map(|section| Arc::new(section.graph.clone())).collect();
        let mut instances = Vec::new();
        for block in program.blocks() {
            let graph = &graphs[program.stages()[block.stage].template];
            instances.push(self.instance(block, graph)?);
        }
        let origins = program.origins()?;
        for number in 0..instances.len() {
            for (input, origin) in origins[number].iter().enumerate() {
                let maker = &instances[origin.block];
                let value = maker.known(maker.section.carried_out[origin.output].tensor);
                let taker = &mut instances[number];
                let id = taker.section.carried_in[input].tensor;
                taker.values[id.index()] = Some(value);
            }
            let instance = &mut instances[number];
            self.bind_exports(instance)?;
            self.run(instance, Pass::Forward);
            for (name, id) in &instance.section.exports {
                self.exports.insert(name.clone(), instance.known(*id));
            }
        }
        for number in (0..instances.len()).rev() {
            let instance = &mut instances[number];
            let Some(backward) = &instance.section.backward else { continue };
            if !program.is_reached(instance.block.stage) {
                continue;
            }
            self.bind_gradients(instance)?;
            self.run(instance, Pass::Backward);
            for (input, origin) in origins[number].iter().enumerate() {
                let Some(gradient) = backward.carried_in_gradients[input] else { continue };
                let value = instances[number].known(gradient);
                let maker = &mut instances[origin.block];
                // A block that no gradient reaches does not need the gradient of its outputs.
                if let Some(backward) = &maker.section.backward {
                    let id = backward.carried_out_gradients[origin.output];
                    maker.values[id.index()] = Some(value);
                }
            }
        }

        // Results outlive the schedule.
        let end = self.schedule.steps.len();
        for instance in &instances {
            for (name, id) in &instance.section.results {
                let value = instance.known(*id);
                if let Home::Work { last_read, .. } = &mut self.schedule.values[value.0] {
                    *last_read = end;
                }
                let tensor = instance.graph.tensor(*id).clone();
                let name = self.full_name(instance.block, name);
                self.schedule.results.insert(name, (value, tensor));
            }
        }
        Ok(self.schedule)
    }

    /// Binds parameters, caches and inputs to their slots.
    fn instance(&mut self, block: Block, graph: &Arc<Graph>) -> Result<Instance<'a>, ExecError> {
        let section = self.program.section(block.stage);
        let mut values = vec![None; graph.tensors().len()];
        for id in section.outside_tensors() {
            let Tensor { name, class, .. } = graph.tensor(id);
            let slot = match class {
                TensorClass::Parameter(_) | TensorClass::Cache => {
                    Some(self.slot(section, &self.full_name(block, name))?)
                }
                _ => self.slots.find(name),
            };
            values[id.index()] = slot.map(|slot| self.schedule.slot_value(slot));
        }
        Ok(Instance { section, graph: Arc::clone(graph), block, values })
    }

    /// Binds what the blocks before it export; a source that is still unbound has no slot.
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
            let parameter = &graph.tensor(gradient.parameter).name;
            let name = self.program.gradient_name(instance.block, parameter);
            let slot = self.slot(instance.section, &name)?;
            let value = self.schedule.slot_value(slot);
            let mut link = Some(gradient.gradient);
            while let Some(id) = link {
                instance.values[id.index()] = Some(value);
                link = overwritten_by(&graph, id);
            }
        }
        Ok(())
    }

    fn run(&mut self, instance: &mut Instance<'_>, pass: Pass) {
        let Block { stage, index } = instance.block;
        let number = self.program.stages()[stage].number(index) as u16;
        self.schedule.add_nodes(&instance.graph, Some(pass), number, &mut instance.values);
    }

    fn full_name(&self, block: Block, name: &str) -> String {
        self.program.stages()[block.stage].full_name(block.index, name)
    }

    fn slot(&self, section: &Section, name: &str) -> Result<SlotId, ExecError> {
        self.slots.find(name).ok_or_else(|| no_slot(section, name))
    }
}

impl Instance<'_> {
    fn known(&self, id: TensorId) -> ValueId {
        self.values[id.index()].expect("made by the section")
    }
}

fn no_slot(section: &Section, tensor: &str) -> ExecError {
    ExecError::NoSlot { section: section.name.clone(), tensor: tensor.to_owned() }
}

/// The tensor whose memory `id` reuses, if it is computed in place.
fn overwritten_by(graph: &Graph, id: TensorId) -> Option<TensorId> {
    let node = &graph.nodes()[graph.producer(id)?];
    let place = node.outputs.iter().position(|&output| output == id)?;
    node.op.in_place().into_iter().find(|&(_, index)| index == place).map(|(operand, _)| operand)
}
