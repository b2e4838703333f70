//! Runs a graph on the CPU device and watches its memory.

use crate::reference::Value;
use half::bf16;
use std::collections::BTreeMap;
use storm_device::Device;
use storm_device::cpu::CpuDevice;
use storm_graph::{DType, Graph, Node, Phase, TensorId};

/// Fills whatever holds no value: NaN in f32 and bf16, so that a read of it shows.
const POISON: u8 = 0xff;
/// Untouched bytes behind each tensor.
const GAP_BYTES: usize = 128;
const ALIGNMENT_BYTES: usize = 64;

/// All tensors of a graph in a device's memory, with a gap after each.
pub(crate) struct Machine<'g> {
    graph: &'g Graph,
    device: CpuDevice,
    offsets: Vec<usize>,
    size_bytes: usize,
}

impl<'g> Machine<'g> {
    /// Everything but `values` is poison.
    pub(crate) fn new(graph: &'g Graph, values: &BTreeMap<TensorId, Value>) -> Machine<'g> {
        let (offsets, size_bytes) = place(graph);
        let mut device = CpuDevice::new(size_bytes).expect("memory for a test");
        device.write(0, &vec![POISON; size_bytes]).expect("inside");
        let mut machine = Machine { graph, device, offsets, size_bytes };
        for (&id, value) in values {
            machine.set(id, value);
        }
        machine
    }

    pub(crate) fn run(&mut self) {
        for node in self.graph.nodes() {
            self.run_node(node);
        }
        self.check_gaps();
    }

    /// Runs the forward pass, poisons what it made and `is_kept` does not hold, and runs the
    /// backward pass.
    pub(crate) fn run_dropping(&mut self, is_kept: impl Fn(TensorId) -> bool) {
        let nodes = self.graph.nodes();
        let forward = nodes.iter().take_while(|node| node.phase == Phase::Forward).count();
        assert!(nodes[forward..].iter().all(|node| node.phase != Phase::Forward));
        for node in &nodes[..forward] {
            self.run_node(node);
        }
        let made = nodes[..forward].iter().flat_map(|node| &node.outputs);
        for &id in made.filter(|&&id| !is_kept(id)) {
            let bytes = vec![POISON; self.graph.tensor(id).size_bytes()];
            self.device.write(self.offsets[id.index()], &bytes).expect("inside");
        }
        for node in &nodes[forward..] {
            self.run_node(node);
        }
        self.check_gaps();
    }

    fn run_node(&mut self, node: &Node) {
        let place = |id: TensorId| self.offsets[id.index()];
        let prepared = self.device.prepare(self.graph, node, place, 0);
        let ran = prepared.and_then(|instruction| self.device.run(&instruction));
        if let Err(error) = ran {
            panic!("{}: {error}", node.name);
        }
    }

    pub(crate) fn set(&mut self, id: TensorId, value: &Value) {
        let tensor = self.graph.tensor(id);
        assert_eq!(tensor.shape, value.shape, "{}", tensor.name);
        let (at, data) = (self.offsets[id.index()], value.data.iter());
        let written = match tensor.dtype {
            DType::F32 => self.device.write(at, &data.map(|&x| x as f32).collect::<Vec<f32>>()),
            DType::BF16 => {
                let rounded: Vec<bf16> = data.map(|&x| bf16::from_f32(x as f32)).collect();
                self.device.write(at, &rounded)
            }
            DType::I32 => self.device.write(at, &data.map(|&x| x as i32).collect::<Vec<i32>>()),
            DType::U8 => self.device.write(at, &data.map(|&x| x as u8).collect::<Vec<u8>>()),
            DType::I8 => panic!("no test has i8"),
        };
        written.expect("inside");
    }

    pub(crate) fn get(&self, id: TensorId) -> Value {
        let tensor = self.graph.tensor(id);
        let bytes = self.bytes(id);
        let data = match tensor.dtype {
            DType::F32 => words(&bytes).map(|word| f64::from(f32::from_le_bytes(word))).collect(),
            DType::I32 => words(&bytes).map(|word| f64::from(i32::from_le_bytes(word))).collect(),
            DType::BF16 => {
                words(&bytes).map(|word| f64::from(bf16::from_le_bytes(word).to_f32())).collect()
            }
            DType::U8 => bytes.iter().copied().map(f64::from).collect(),
            DType::I8 => panic!("no test has i8"),
        };
        Value::new(tensor.shape.clone(), data)
    }

    /// The memory of a tensor, for comparisons to the bit.
    pub(crate) fn bytes(&self, id: TensorId) -> Vec<u8> {
        let mut bytes = vec![0; self.graph.tensor(id).size_bytes()];
        self.device.read(self.offsets[id.index()], &mut bytes).expect("inside");
        bytes
    }

    /// Nothing wrote beyond the end of a tensor.
    fn check_gaps(&self) {
        let mut memory = vec![0; self.size_bytes];
        self.device.read(0, &mut memory).expect("inside");
        for id in self.graph.ids() {
            let tensor = self.graph.tensor(id);
            let end = self.offsets[id.index()] + tensor.size_bytes();
            let intact = memory[end..end + GAP_BYTES].iter().all(|&byte| byte == POISON);
            assert!(intact, "somebody wrote behind `{tensor}`\n{}", self.graph);
        }
    }
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.chunks_exact(N).map(|chunk| chunk.try_into().expect("a whole word"))
}

/// An offset for each tensor, and where the last one ends. Outputs lie over the operands that they
/// overwrite.
fn place(graph: &Graph) -> (Vec<usize>, usize) {
    let mut over: BTreeMap<TensorId, TensorId> = BTreeMap::new();
    for node in graph.nodes() {
        for (operand, output) in node.op.in_place() {
            over.insert(node.outputs[output], operand);
        }
    }
    let mut offsets: Vec<usize> = Vec::new();
    let mut end = GAP_BYTES;
    for id in graph.ids() {
        offsets.push(end);
        if !over.contains_key(&id) {
            end += graph.tensor(id).size_bytes() + GAP_BYTES;
            end = end.next_multiple_of(ALIGNMENT_BYTES);
        }
    }
    for id in graph.ids() {
        let mut root = id;
        while let Some(&under) = over.get(&root) {
            root = under;
        }
        offsets[id.index()] = offsets[root.index()];
    }
    (offsets, end)
}
