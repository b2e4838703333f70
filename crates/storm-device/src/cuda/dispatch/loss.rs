//! Head projection and cross-entropy, a chunk of rows at a time.

use super::linear::gemm;
use super::{Definitions, all_types, count, grid, kernel, layout, types};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::gemm::{GemmCall, GemmRole, Operand};
use crate::cuda::plan::Planner;
use crate::placed::View;
use storm_graph::{Accuracy, DType, Op, ParameterGradients};

const SOURCE: KernelSource =
    KernelSource { name: "loss.cu", text: include_str!("../kernels/loss.cu"), only_for: None };

/// Threads of a block, which has a row.
const THREADS: u32 = 512;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let outputs = &planner.node.outputs;
    match &planner.node.op {
        Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator,
            chunk_rows,
            label_smoothing,
            accuracy,
        } => {
            let correct = (*accuracy == Accuracy::Compute).then(|| &outputs[1]);
            let head = Head::new(hidden, weight, &outputs[outputs.len() - 1]);
            for start in (0..head.rows).step_by(*chunk_rows) {
                let rows = (*chunk_rows).min(head.rows - start);
                head.project(planner, start, rows)?;
                let arguments = vec![
                    planner.pointer(head.logits),
                    at(planner, targets, start),
                    planner.pointer(denominator),
                    at(planner, &outputs[0], start),
                    maybe_at(planner, correct, start),
                    count(head.vocabulary),
                    Argument::F32(*label_smoothing),
                ];
                head.launch(planner, "head_loss", rows, arguments)?;
            }
            Ok(())
        }
        Op::HeadLossGrad {
            hidden,
            weight,
            targets,
            denominator,
            d_row_loss,
            accumulator,
            chunk_rows,
            label_smoothing,
            accuracy,
            weight_gradient,
            ..
        } => {
            let correct = outputs.last().filter(|_| *accuracy == Accuracy::Compute);
            let head = Head::new(hidden, weight, &outputs[2]);
            let compute = *weight_gradient == ParameterGradients::Compute;
            let d_weight = compute.then(|| &outputs[3]);
            if let (0, Some(d_weight), None) = (head.rows, d_weight, accumulator) {
                layout::fill(planner, d_weight, 0.0)?;
            }
            for start in (0..head.rows).step_by(*chunk_rows) {
                let rows = (*chunk_rows).min(head.rows - start);
                head.project(planner, start, rows)?;
                let arguments = vec![
                    planner.pointer(head.logits),
                    at(planner, targets, start),
                    planner.pointer(denominator),
                    at(planner, d_row_loss, start),
                    at(planner, &outputs[0], start),
                    maybe_at(planner, correct, start),
                    count(head.vocabulary),
                    Argument::F32(*label_smoothing),
                ];
                head.launch(planner, "head_loss_grad", rows, arguments)?;
                head.hidden_gradient(planner, start, rows, &outputs[1])?;
                if let Some(d_weight) = d_weight {
                    let accumulate = start > 0 || accumulator.is_some();
                    head.weight_gradient(planner, start, rows, d_weight, accumulate)?;
                }
            }
            Ok(())
        }
        _ => unreachable!("not a loss op"),
    }
}

/// What both directions read, and the chunk of logits.
struct Head<'a> {
    hidden: &'a View,
    weight: &'a View,
    logits: &'a View,
    dtype: DType,
    rows: usize,
    width: usize,
    vocabulary: usize,
}

impl<'a> Head<'a> {
    fn new(hidden: &'a View, weight: &'a View, logits: &'a View) -> Head<'a> {
        let (rows, width) = (hidden.shape.rows(), hidden.shape.width());
        let vocabulary = weight.shape.rows();
        Head { hidden, weight, logits, dtype: hidden.dtype, rows, width, vocabulary }
    }

    fn matrix(&self, address: u64, transposed: bool) -> Operand {
        Operand { address, dtype: self.dtype, transposed }
    }

    /// Logits of the rows from `start` on.
    fn project(
        &self,
        planner: &mut Planner<'_>,
        start: usize,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let hidden = self.matrix(row_address(planner, self.hidden, start), false);
        let weight = self.matrix(planner.address(self.weight), true);
        let logits = planner.address(self.logits);
        let sizes = (rows, self.vocabulary, self.width);
        let role = GemmRole::Activation;
        gemm(planner, GemmCall::new(sizes, hidden, weight, logits, self.dtype, role))
    }

    /// `d_logits · weight`, where the logits have become their gradient.
    fn hidden_gradient(
        &self,
        planner: &mut Planner<'_>,
        start: usize,
        rows: usize,
        out: &View,
    ) -> Result<(), DeviceError> {
        let d_logits = self.matrix(planner.address(self.logits), false);
        let weight = self.matrix(planner.address(self.weight), false);
        let out = row_address(planner, out, start);
        let sizes = (rows, self.width, self.vocabulary);
        let role = GemmRole::Activation;
        gemm(planner, GemmCall::new(sizes, d_logits, weight, out, self.dtype, role))
    }

    /// `d_logitsᵀ · hidden` of the chunk.
    fn weight_gradient(
        &self,
        planner: &mut Planner<'_>,
        start: usize,
        rows: usize,
        out: &View,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let d_logits = self.matrix(planner.address(self.logits), true);
        let hidden = self.matrix(row_address(planner, self.hidden, start), false);
        let sizes = (self.vocabulary, self.width, rows);
        let (address, role) = (planner.address(out), GemmRole::WeightGradient);
        let mut call = GemmCall::new(sizes, d_logits, hidden, address, out.dtype, role);
        call.accumulate = accumulate;
        gemm(planner, call)
    }

    fn launch(
        &self,
        planner: &mut Planner<'_>,
        name: &str,
        rows: usize,
        arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let grid = grid(planner, rows, 1)?;
        let choice = kernel(SOURCE, name, types([("E", self.dtype)]));
        planner.launch(choice, grid, THREADS, arguments)
    }
}

/// [`at`] of a tensor that may be left out.
fn maybe_at(planner: &Planner<'_>, view: Option<&View>, index: usize) -> Argument {
    view.map_or(Argument::Pointer(0), |view| at(planner, view, index))
}

/// Row `row` of a tensor.
fn row_address(planner: &Planner<'_>, view: &View, row: usize) -> u64 {
    planner.address(view) + (row * view.shape.width() * view.dtype.size_bytes()) as u64
}

/// Element `index` of a tensor that has one per row.
fn at(planner: &Planner<'_>, view: &View, index: usize) -> Argument {
    Argument::Pointer(planner.address(view) + (index * view.dtype.size_bytes()) as u64)
}
