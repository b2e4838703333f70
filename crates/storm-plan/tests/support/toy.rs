//! A small network that learns: layers of products, whose weights, gradients and activations are
//! each kept on the device or streamed through rings, at random.

use super::random::Random;
use super::slabs::{Builder, Home, Placed, Purpose};
use super::waits::add_waits;
use storm_graph::{DType, Graph, Op, Rounding, Shape, StepScalars, Tensor, TensorClass, Training};
use storm_plan::{
    ALIGNMENT, Input, Lasting, Place, Plan, PlanResult, Run, SegmentId, Tier, ValueId,
};

const WEIGHT: TensorClass = TensorClass::Parameter(Training::Trainable);

/// Positions of the nodes in the graph.
mod node {
    pub(super) const FORWARD: u32 = 0;
    pub(super) const LOSS: u32 = 1;
    pub(super) const LOSS_GRADIENT: u32 = 2;
    pub(super) const WEIGHT_GRADIENT: [u32; 2] = [3, 4];
    pub(super) const BIAS_GRADIENT: [u32; 2] = [5, 6];
    pub(super) const INPUT_GRADIENT: u32 = 7;
    pub(super) const UPDATE_WEIGHT: u32 = 8;
    pub(super) const UPDATE_BIAS: u32 = 9;
}

/// Nodes by what they compute; their tensors stand for those of any layer.
fn graph(rows: usize, width: usize) -> Graph {
    let mut graph = Graph::new();
    let mut source = |name: &str, shape: &[usize]| {
        graph.source(name, shape, DType::F32, TensorClass::Activation)
    };
    let (x, dy) = (source("x", &[rows, width]), source("dy", &[rows, width]));
    let (weight, bias) = (source("weight", &[width, width]), source("bias", &[width]));
    let accumulators = [source("weight.sum", &[width, width]), source("bias.sum", &[width])];
    let parameters = [source("weight.now", &[width, width]), source("bias.now", &[width])];
    let gradients = [source("weight.grad", &[width, width]), source("bias.grad", &[width])];
    let scalars = source("scalars", &[StepScalars::LEN]);
    let dtype = DType::F32;
    let update = |parameter, gradient| Op::Sgd {
        parameter,
        gradient,
        momentum: None,
        master: None,
        scalars,
        clip: None,
        random: None,
        hyper: storm_graph::SgdParameters::plain(0.0),
        rounding: Rounding::Nearest,
        moment_rounding: Rounding::Nearest,
        stream: 0,
        first_element: 0,
    };
    let nodes = [
        ("forward", Op::Linear { x, weight, bias: Some(bias), addend: None }),
        ("loss", Op::Sum { x }),
        ("loss.grad", Op::Scale { x, factor: 0.5 }),
        ("weight.first", Op::LinearWeightGrad { dy, x, accumulator: None, dtype }),
        ("weight.add", Op::LinearWeightGrad { dy, x, accumulator: Some(accumulators[0]), dtype }),
        ("bias.first", Op::ColumnSum { x: dy, accumulator: None, dtype }),
        ("bias.add", Op::ColumnSum { x: dy, accumulator: Some(accumulators[1]), dtype }),
        ("x.grad", Op::LinearInputGrad { dy, weight, addend: None }),
        ("weight.update", update(parameters[0], gradients[0])),
        ("bias.update", update(parameters[1], gradients[1])),
    ];
    for (name, op) in nodes {
        graph.apply(name, op).expect("shapes agree");
    }
    graph
}

/// A correct plan, the same for the same seed.
pub(crate) fn toy_plan(seed: u64) -> Plan {
    let mut random = Random(seed);
    let layers = 1 + random.below(3);
    let times = random.pick(&[0, 1, 2, 3, 5, 9, 40]);
    toy_plan_of(layers, times, random)
}

/// A toy of some layers, whose middle micro-batch is repeated.
pub(crate) fn toy_plan_of(layers: usize, times: usize, mut random: Random) -> Plan {
    let (rows, width) = (random.pick(&[2, 4, 16]), random.pick(&[6, 8, 12]));
    let deferred = random.chance(40);
    let talks = random.chance(50);
    let mut toy = Toy::new(layers, rows, width, deferred, talks, random);
    toy.fetches = talks && toy.builder.random.chance(60);
    let first = toy.micro_batch(true);
    let mut step = vec![Run { segment: first, times: 1 }];
    if times > 0 {
        let segment = toy.micro_batch(false);
        step.push(Run { segment, times });
    }
    let segment = toy.update();
    let update = Run { segment, times: 1 };
    if deferred {
        step.insert(0, update);
        toy.builder.plan.flush = Some(segment);
    } else {
        step.push(update);
    }
    let mut plan = toy.builder.plan;
    plan.step = step;
    add_waits(&mut plan, &mut toy.builder.random);
    plan
}

struct Toy {
    builder: Builder,
    layers: usize,
    /// Slabs of weight and bias, and of their gradients.
    weights: Vec<usize>,
    gradients: Vec<usize>,
    /// What each layer reads, and at last what the loss reads.
    activations: Vec<usize>,
    /// Host memory that holds a copy of weights that live on the device.
    mirrors: Vec<Option<usize>>,
    scalars: usize,
    loss: usize,
    /// Whether the input of a micro-batch is fetched.
    fetches: bool,
    /// Gradients of the activations of even and odd layers.
    deltas: [(ValueId, usize); 2],
    /// Scratch of the sums over rows and over everything.
    partials: [(ValueId, usize); 2],
}

impl Toy {
    /// One that talks has a new input and a result for every micro-batch, for which the host waits.
    /// Another runs through the step at once.
    fn new(
        layers: usize,
        rows: usize,
        width: usize,
        deferred: bool,
        talks: bool,
        random: Random,
    ) -> Toy {
        let mut builder = Builder::new(graph(rows, width), random);
        let b = &mut builder;
        let (rows_bytes, weight_bytes, bias_bytes) =
            (rows * width * 4, width * width * 4, width * 4);
        let slab_bytes = weight_bytes.next_multiple_of(ALIGNMENT) + bias_bytes;
        let (weight_slots, gradient_slots) = (1 + b.random.below(3), 1 + b.random.below(2));
        let weight_ring = b.ring(weight_slots, slab_bytes);
        let gradient_ring = b.ring(gradient_slots, slab_bytes);
        // A layer reads one and writes the next.
        let activation_slots = 2 + b.random.below(2);
        let activation_ring = b.ring(activation_slots, rows_bytes);
        let scalar_ring = b.ring(1, StepScalars::LEN * 4);

        let (mut weights, mut gradients, mut mirrors) = (Vec::new(), Vec::new(), Vec::new());
        for layer in 0..layers {
            let names = [format!("w{layer}"), format!("b{layer}")];
            let parts = [(&names[0][..], weight_bytes, WEIGHT), (&names[1], bias_bytes, WEIGHT)];
            let ring = b.random.chance(60).then_some((weight_ring, layer));
            weights.push(b.slab(&parts, ring));
            let is_mirrored = ring.is_none() && b.random.chance(30);
            mirrors.push(is_mirrored.then(|| b.take_host(slab_bytes)));
            let names = names.map(|name| format!("{name}.grad"));
            let class = TensorClass::Gradient;
            let parts = [(&names[0][..], weight_bytes, class), (&names[1], bias_bytes, class)];
            let ring = b.random.chance(60).then_some((gradient_ring, layer));
            gradients.push(b.slab(&parts, ring));
        }
        let mut activations = Vec::new();
        for layer in 0..=layers {
            let is_input = layer == 0;
            let class = if is_input { TensorClass::Input } else { TensorClass::Activation };
            let streams = is_input || (layer < layers && b.random.chance(60));
            let ring = streams.then_some((activation_ring, layer));
            activations.push(b.slab(&[(&format!("y{layer}"), rows_bytes, class)], ring));
        }
        let scalar_bytes = StepScalars::LEN * 4;
        let scalars =
            b.slab(&[("scalars", scalar_bytes, TensorClass::Input)], Some((scalar_ring, 0)));
        let loss = b.slab(&[("loss", 4, TensorClass::Activation)], None);
        let mut work = |name: &str, bytes: usize, class: TensorClass| {
            (b.value(name, bytes, class), b.take_device(bytes))
        };
        let deltas =
            ["delta.even", "delta.odd"].map(|name| work(name, rows_bytes, TensorClass::Activation));
        let partials = [("partials", bias_bytes), ("sum.partials", 4)]
            .map(|(name, bytes)| work(name, bytes, TensorClass::Scratch));
        let mut toy = Toy {
            builder,
            layers,
            weights,
            gradients,
            activations,
            mirrors,
            scalars,
            loss,
            fetches: false,
            deltas,
            partials,
        };
        toy.add_lasting(width, deferred);
        toy.add_inputs(rows, width, talks);
        if talks {
            toy.add_result();
        }
        toy
    }

    fn add_lasting(&mut self, width: usize, deferred: bool) {
        for layer in 0..self.layers {
            self.rests(self.weights[layer], self.mirrors[layer], width, WEIGHT);
            if deferred {
                self.rests(self.gradients[layer], None, width, TensorClass::Gradient);
            }
        }
    }

    fn rests(&mut self, slab: usize, mirror: Option<usize>, width: usize, class: TensorClass) {
        let plan = &mut self.builder.plan;
        let slab = &self.builder.slabs[slab];
        let home = match slab.home {
            Home::Device(offset) => Place { tier: Tier::DEVICE, offset },
            Home::Host { offset, .. } => Place { tier: Tier::HOST, offset },
        };
        let mirror = mirror.map(|offset| Place { tier: Tier::HOST, offset });
        for (part, shape) in slab.tensors.iter().zip([vec![width, width], vec![width]]) {
            let name = plan.value(part.pieces[0]).name.clone();
            let tensor = tensor(&name, &shape, class);
            let places = [Some(home), mirror].into_iter().flatten();
            let places = places.map(|p| Place { offset: p.offset + part.offset, ..p }).collect();
            plan.lasting.push(Lasting {
                tensor,
                pieces: part.pieces.clone(),
                places,
                parts: Vec::new(),
                shard: None,
            });
        }
    }

    fn add_inputs(&mut self, rows: usize, width: usize, talks: bool) {
        let inputs = [
            ("x", vec![rows, width], self.activations[0], talks.then_some(0)),
            ("scalars", vec![StepScalars::LEN], self.scalars, None),
        ];
        for (name, shape, slab, micro_batch) in inputs {
            let slab = &self.builder.slabs[slab];
            let Home::Host { offset: host, .. } = slab.home else { unreachable!("an input") };
            self.builder.plan.inputs.push(Input {
                tensor: tensor(name, &shape, TensorClass::Input),
                value: slab.tensors[0].pieces[0],
                micro_batch,
                place: Place { tier: Tier::HOST, offset: host },
                copies: Vec::new(),
                fetches: Vec::new(),
            });
        }
    }

    fn add_result(&mut self) {
        let host = self.builder.take_host(4);
        let value = self.builder.slabs[self.loss].tensors[0].pieces[0];
        self.builder.plan.results.push(PlanResult {
            tensor: tensor("loss", &[], TensorClass::Activation),
            value,
            micro_batch: Some(0),
            place: Place { tier: Tier::HOST, offset: host },
            copies: Vec::new(),
        });
    }

    /// Forward and backward of one micro-batch, which writes gradients or adds to them.
    fn micro_batch(&mut self, is_first: bool) -> SegmentId {
        if self.fetches {
            self.builder.take_data(0);
        }
        for layer in 0..self.layers {
            let x = self.bring(self.activations[layer]);
            let weight = self.bring(self.weights[layer]);
            let y = self.builder.room(self.activations[layer + 1]);
            let (x, y) =
                (self.at(self.activations[layer], x), self.at(self.activations[layer + 1], y));
            let weight = self.at(self.weights[layer], weight);
            let operands = [&x[0], &weight[0], &weight[1]];
            self.builder.compute(node::FORWARD, &operands, &[&y[0]]);
            self.builder.send_home(self.activations[layer + 1]);
        }
        let [partials, sum_partials] = self.partials.map(|(value, place)| (vec![value], place));
        let deltas = self.deltas.map(|(value, place)| (vec![value], place));
        let y = self.bring(self.activations[self.layers]);
        let y = self.at(self.activations[self.layers], y);
        let loss = self.builder.room(self.loss);
        let loss = self.at(self.loss, loss);
        self.builder.compute(node::LOSS, &[&y[0]], &[&loss[0], &sum_partials]);
        if let Some(host) = self.builder.plan.results.first().map(|result| result.place.offset) {
            self.builder.send_to(self.loss, host, Some(Purpose::Result(0)));
        }
        self.builder.compute(node::LOSS_GRADIENT, &[&y[0]], &[&deltas[self.layers % 2]]);
        for layer in (0..self.layers).rev() {
            let (dy, dx) = (&deltas[(layer + 1) % 2], &deltas[layer % 2]);
            let x = self.bring(self.activations[layer]);
            let x = self.at(self.activations[layer], x);
            let slab = self.gradients[layer];
            let sums = if is_first { self.builder.room(slab) } else { self.bring(slab) };
            let sums = self.at(slab, sums);
            let (mut for_weight, mut for_bias) = (vec![dy, &x[0]], vec![dy]);
            if !is_first {
                for_weight.push(&sums[0]);
                for_bias.push(&sums[1]);
            }
            let kind = usize::from(!is_first);
            self.builder.compute(node::WEIGHT_GRADIENT[kind], &for_weight, &[&sums[0]]);
            self.builder.compute(node::BIAS_GRADIENT[kind], &for_bias, &[&sums[1], &partials]);
            self.builder.send_home(slab);
            if layer > 0 {
                let weight = self.bring(self.weights[layer]);
                let weight = self.at(self.weights[layer], weight);
                self.builder.compute(node::INPUT_GRADIENT, &[dy, &weight[0]], &[dx]);
            }
        }
        self.builder.end_segment(if is_first { "first" } else { "middle" })
    }

    fn update(&mut self) -> SegmentId {
        let scalars = self.bring(self.scalars);
        let scalars = self.at(self.scalars, scalars);
        for layer in 0..self.layers {
            let (weights, gradients) = (self.weights[layer], self.gradients[layer]);
            let (weight, gradient) = (self.bring(weights), self.bring(gradients));
            let (weight, gradient) = (self.at(weights, weight), self.at(gradients, gradient));
            for (part, node) in [node::UPDATE_WEIGHT, node::UPDATE_BIAS].into_iter().enumerate() {
                let operands = [&weight[part], &gradient[part], &scalars[0]];
                self.builder.compute(node, &operands, &[&weight[part]]);
            }
            self.builder.send_home(weights);
            if let Some(host) = self.mirrors[layer] {
                self.builder.send_to(weights, host, None);
            }
        }
        self.builder.end_segment("update")
    }

    fn bring(&mut self, slab: usize) -> usize {
        let purpose = [self.activations[0], self.scalars].iter().position(|&input| input == slab);
        self.builder.bring(slab, purpose.map(Purpose::Input))
    }

    /// The tensors of a slab that lies at an offset.
    fn at(&self, slab: usize, offset: usize) -> Vec<Placed> {
        let tensors = self.builder.slabs[slab].tensors.iter();
        tensors.map(|tensor| (tensor.pieces.clone(), offset + tensor.offset)).collect()
    }
}

fn tensor(name: &str, shape: &[usize], class: TensorClass) -> Tensor {
    Tensor { name: name.to_owned(), shape: Shape::from(shape), dtype: DType::F32, class }
}
