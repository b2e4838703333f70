//! What differentiation adds to a graph, and what it leaves out.

use std::collections::{BTreeMap, BTreeSet};
use storm_graph::*;

const SIZE: usize = 6;
const HEADS: HeadLayout = HeadLayout { query_heads: 2, key_value_heads: 1, head_dim: 4 };

/// A one-layer language model, and the part of it that the tests speak of.
struct Model {
    graph: Graph,
    loss: TensorId,
    /// Parameters by name.
    parameters: BTreeMap<&'static str, TensorId>,
}

/// Parameters named in `frozen` do not learn. With `tied` the head is the embedding table.
fn model(frozen: &[&str], tied: bool) -> Model {
    let mut graph = Graph::new();
    let mut parameters = BTreeMap::new();
    let mut parameter = |graph: &mut Graph, name: &'static str, shape: &[usize]| {
        let training = if frozen.contains(&name) { Training::Frozen } else { Training::Trainable };
        let id = graph.parameter(name, shape, DType::F32, training);
        parameters.insert(name, id);
        id
    };
    let ids = graph.input("ids", [2, 3], DType::I32);
    let targets = graph.input("targets", [2, 3], DType::I32);
    let denominator = graph.input("denominator", Shape::scalar(), DType::F32);
    let table = parameter(&mut graph, "table", &[9, SIZE]);
    let norm_weight = parameter(&mut graph, "norm", &[SIZE]);
    let qkv_weight = parameter(&mut graph, "qkv", &[HEADS.qkv_width(), SIZE]);
    let qkv_bias = parameter(&mut graph, "qkv_bias", &[HEADS.qkv_width()]);
    let out_weight = parameter(&mut graph, "out", &[SIZE, HEADS.query_width()]);
    let final_weight = parameter(&mut graph, "final_norm", &[SIZE]);
    let head = if tied { table } else { parameter(&mut graph, "head", &[9, SIZE]) };

    let mut apply = |name: &str, op| graph.apply(name, op).expect("the model fits");
    let x = apply("x", Op::Embedding { ids, table })[0];
    let norm = |x, delta, weight| Op::Norm {
        x,
        delta,
        weight,
        bias: None,
        kind: NormKind::Rms,
        epsilon: 1e-5,
    };
    let normed = apply("normed", norm(x, None, norm_weight))[0];
    let bias = Some(qkv_bias);
    let qkv = Op::Linear { x: normed, weight: qkv_weight, bias, addend: None };
    let qkv = apply("qkv_row", qkv)[0];
    let (mask, scale) = (Mask::Causal, 0.5);
    let attended = Op::Attention { qkv, segments: None, heads: HEADS, mask, scale };
    let attended = apply("attended", attended)[0];
    let branch = Op::Linear { x: attended, weight: out_weight, bias: None, addend: None };
    let delta = Some(apply("branch", branch)[0]);
    let hidden = apply("hidden", norm(x, delta, final_weight))[0];
    let row_loss = Op::HeadLoss {
        hidden,
        weight: head,
        targets,
        denominator,
        chunk_rows: 4,
        label_smoothing: 0.0,
        accuracy: storm_graph::Accuracy::Skip,
    };
    let row_loss = apply("row_loss", row_loss)[0];
    let loss = apply("loss", Op::Sum { x: row_loss })[0];
    Model { graph, loss, parameters }
}

impl Model {
    fn differentiate(&mut self, accumulated: &[&str]) -> BTreeMap<TensorId, TensorId> {
        let seed = self.graph.input("seed", Shape::scalar(), DType::F32);
        let mut accumulators = BTreeMap::new();
        for name in accumulated {
            let parameter = self.parameters[name];
            let shape = self.graph.tensor(parameter).shape.clone();
            let so_far = format!("{name}.so_far");
            let so_far = self.graph.source(so_far, shape, DType::F32, TensorClass::Gradient);
            accumulators.insert(parameter, so_far);
        }
        let request = GradientRequest {
            seeds: vec![(self.loss, seed)],
            wanted: Vec::new(),
            accumulators,
            gradient_dtype: DType::F32,
        };
        differentiate(&mut self.graph, &request).expect("the model can be differentiated")
    }

    /// Ops of the backward pass in order.
    fn backward(&self) -> Vec<&'static str> {
        let nodes = self.graph.nodes().iter().filter(|node| node.phase == Phase::Backward);
        nodes.map(|node| node.op.name()).collect()
    }

    fn names(&self, ids: &[TensorId]) -> Vec<&str> {
        ids.iter().map(|&id| self.graph.tensor(id).name.as_str()).collect()
    }
}

#[test]
fn each_trainable_parameter_has_a_gradient_like_itself() {
    let mut model = model(&[], false);
    let gradients = model.differentiate(&[]);
    let parameters: BTreeSet<TensorId> = model.parameters.values().copied().collect();
    assert!(gradients.keys().eq(&parameters));
    for (parameter, gradient) in gradients {
        let (parameter, gradient) = (model.graph.tensor(parameter), model.graph.tensor(gradient));
        assert_eq!(parameter.shape, gradient.shape);
        assert_eq!(gradient.class, TensorClass::Gradient, "{gradient}");
    }
}

#[test]
fn backward_is_the_mirror_of_forward() {
    let mut model = model(&[], false);
    model.differentiate(&[]);
    assert_eq!(
        model.backward(),
        [
            "Broadcast",
            "HeadLossGrad",
            "Sum",
            "NormGrad",
            "LinearWeightGrad",
            "LinearInputGrad",
            "AttentionGrad",
            "LinearWeightGrad",
            "ColumnSum",
            "LinearInputGrad",
            "NormGrad",
            "EmbeddingGrad",
        ]
    );
}

#[test]
fn saved_tensors_are_those_that_backward_reads() {
    let mut model = model(&[], false);
    model.differentiate(&[]);
    assert_eq!(
        model.names(&model.graph.saved()),
        [
            "x",
            "normed",
            "normed.rstd",
            "qkv_row",
            "attended",
            "attended.log_sum_exp",
            "hidden",
            "hidden.rstd",
            "hidden.sum",
        ]
    );
}

#[test]
fn logits_are_made_once() {
    let mut model = model(&[], false);
    model.differentiate(&[]);
    let count = |name| model.graph.nodes().iter().filter(|node| node.op.name() == name).count();
    assert_eq!((count("HeadLoss"), count("HeadLossGrad")), (0, 1));
    // The loss is made of the gradient's row losses, so it comes with the backward pass.
    let made = &model.graph.nodes()[model.graph.producer(model.loss).expect("made")];
    let Op::Sum { x } = made.op else { panic!("the loss is a sum") };
    let row_losses = &model.graph.nodes()[model.graph.producer(x).expect("made")];
    assert_eq!(row_losses.op.name(), "HeadLossGrad");
    assert_eq!(made.phase, Phase::Backward);
}

/// Without a gradient the loss stays in the forward pass.
#[test]
fn a_model_that_does_not_learn_stays_as_it_is() {
    let all = ["table", "norm", "qkv", "qkv_bias", "out", "final_norm", "head"];
    let mut model = model(&all, false);
    let nodes = model.graph.nodes().to_vec();
    assert!(model.differentiate(&[]).is_empty());
    assert_eq!(model.graph.nodes(), nodes);
}

/// Freezing the parameters named leaves exactly the backward ops listed.
fn check_frozen(frozen: &[&str], expected: &[&str]) {
    let mut model = model(frozen, false);
    let gradients = model.differentiate(&[]);
    let trained = model.parameters.iter().filter(|(name, _)| !frozen.contains(name));
    assert!(trained.map(|(_, id)| *id).all(|id| gradients.contains_key(&id)));
    assert_eq!(gradients.len(), model.parameters.len() - frozen.len());
    let relevant: Vec<&str> =
        model.backward().into_iter().filter(|op| !["Broadcast", "Sum"].contains(op)).collect();
    assert_eq!(relevant, expected, "without {frozen:?}");
}

#[test]
fn nothing_is_computed_for_frozen_parameters() {
    let last = ["HeadLossGrad"];
    check_frozen(&["table", "norm", "qkv", "qkv_bias", "out", "final_norm"], &last);
    check_frozen(
        &["table", "norm", "qkv", "qkv_bias", "final_norm", "head"],
        &["HeadLossGrad", "NormGrad", "LinearWeightGrad"],
    );
    check_frozen(
        &["table", "norm", "qkv", "out", "final_norm", "head"],
        &["HeadLossGrad", "NormGrad", "LinearInputGrad", "AttentionGrad", "ColumnSum"],
    );
    check_frozen(
        &["norm", "qkv", "qkv_bias", "out", "final_norm", "head"],
        &[
            "HeadLossGrad",
            "NormGrad",
            "LinearInputGrad",
            "AttentionGrad",
            "LinearInputGrad",
            "NormGrad",
            "EmbeddingGrad",
        ],
    );
}

/// No op computes a gradient that was not requested.
#[test]
fn frozen_parameters_are_skipped_inside_of_ops() {
    let mut model = model(&["norm", "head"], false);
    model.differentiate(&[]);
    for node in model.graph.nodes() {
        match node.op {
            Op::HeadLossGrad { weight_gradient, .. } => {
                assert_eq!(weight_gradient, ParameterGradients::Skip);
                assert_eq!(node.outputs.len(), 3);
            }
            Op::NormGrad { weight, parameters, .. } => {
                let frozen = weight == model.parameters["norm"];
                assert_eq!(parameters == ParameterGradients::Skip, frozen);
                assert_eq!(node.outputs.len(), if frozen { 1 } else { 3 });
            }
            _ => {}
        }
    }
}

/// The head's part of a tied table comes first, and the embedding is added to it in place.
#[test]
fn tied_weights_accumulate_in_backward_order() {
    for accumulated in [&[][..], &["table"]] {
        let mut model = model(&[], true);
        let gradients = model.differentiate(accumulated);
        let find = |name| {
            let mut nodes = model.graph.nodes().iter();
            nodes.find(|node| node.op.name() == name).expect("there")
        };
        let (head, embedding) = (find("HeadLossGrad"), find("EmbeddingGrad"));
        let Op::HeadLossGrad { accumulator: first, .. } = head.op else { unreachable!() };
        let Op::EmbeddingGrad { accumulator: second, .. } = embedding.op else { unreachable!() };
        let start = first.map(|id| model.graph.tensor(id).name.as_str());
        assert_eq!(start, accumulated.first().map(|_| "table.so_far"));
        assert_eq!(second, Some(head.outputs[3]));
        assert_eq!(gradients[&model.parameters["table"]], embedding.outputs[0]);
        assert_eq!(embedding.op.in_place(), [(head.outputs[3], 0)]);
    }
}

/// Every parameter's gradient is added to its accumulator by the op that makes it.
#[test]
fn accumulators_are_overwritten_in_place() {
    let all = ["table", "norm", "qkv", "qkv_bias", "out", "final_norm", "head"];
    let mut model = model(&[], false);
    let gradients = model.differentiate(&all);
    for (name, parameter) in &model.parameters {
        let gradient = gradients[parameter];
        let node = &model.graph.nodes()[model.graph.producer(gradient).expect("made")];
        let in_place = node.op.in_place();
        let (over, _) = in_place
            .iter()
            .find(|&&(_, output)| node.outputs[output] == gradient)
            .expect("over its accumulator");
        assert_eq!(model.graph.tensor(*over).name, format!("{name}.so_far"));
    }
}

/// The loader provides the sorted order of ids, once for all tables that they index.
#[test]
fn one_order_serves_all_tables() {
    let mut graph = Graph::new();
    let ids = graph.input("ids", [5], DType::I32);
    let mut results = Vec::new();
    for name in ["first", "second"] {
        let table = graph.parameter(name, [7, 4], DType::F32, Training::Trainable);
        results.push(graph.apply_one(name, Op::Embedding { ids, table }).expect("fits"));
    }
    let y = Op::Mul { a: results[0], b: results[1] };
    let y = graph.apply_one("y", y).expect("fits");
    let seed = graph.input("seed", [5, 4], DType::F32);
    let request = GradientRequest {
        seeds: vec![(y, seed)],
        wanted: Vec::new(),
        accumulators: BTreeMap::new(),
        gradient_dtype: DType::F32,
    };
    differentiate(&mut graph, &request).expect("differentiable");
    let orders = graph.tensors().iter().filter(|t| t.name == order_name("ids")).count();
    assert_eq!(orders, 1);
}
