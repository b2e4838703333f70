//! Head projection and cross-entropy, a chunk of rows at a time.

use super::linear::gemm;
use super::{
    Definitions, PACK, THREADS as FLAT_THREADS, WARP, all_types, count, flag, grid, kernel,
    launch_flat, layout, types,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::gemm::{GemmCall, GemmRole, Operand};
use crate::cuda::plan::{KernelChoice, Planner};
use crate::placed::View;
use storm_graph::{Accuracy, DType, Op, ParameterGradients};

const SOURCE: KernelSource =
    KernelSource { name: "loss.cu", text: include_str!("../kernels/loss.cu"), only_for: None };

const REST: KernelSource = KernelSource {
    name: "head_rest.cu",
    text: include_str!("../kernels/head_rest.cu"),
    only_for: None,
};

/// Threads of a block, which takes one row.
const THREADS: u32 = 512;

/// Columns, and groups of rows, of a block that computes the last rows of the weight's gradient: `SIDE` in the source.
const SIDE: usize = 32;

/// With fewer columns than this, all of them count as the last few.
const EVEN_MIN: usize = 64;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    [all_types(SOURCE, ["E"]), all_types(REST, ["A", "B"])].concat()
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
                    count(head.even),
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
                    count(head.even),
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

/// What the forward and the backward pass read, and the chunk of logits.
///
/// The library's products are several times slower if the rows of a matrix are not whole packs, as
/// with the 50,257 columns of GPT-2. So a chunk is two matrices, one after the other: all columns
/// but the last few, and the last few.
struct Head<'a> {
    hidden: &'a View,
    weight: &'a View,
    logits: &'a View,
    dtype: DType,
    rows: usize,
    width: usize,
    vocabulary: usize,
    /// The number of columns of the first matrix, and of the second.
    even: usize,
    rest: usize,
}

impl<'a> Head<'a> {
    fn new(hidden: &'a View, weight: &'a View, logits: &'a View) -> Head<'a> {
        let (rows, width) = (hidden.shape.rows(), hidden.shape.width());
        let vocabulary = weight.shape.rows();
        let even = if vocabulary < EVEN_MIN { 0 } else { vocabulary / PACK * PACK };
        let (dtype, rest) = (hidden.dtype, vocabulary - even);
        Head { hidden, weight, logits, dtype, rows, width, vocabulary, even, rest }
    }

    fn matrix(&self, address: u64, transposed: bool) -> Operand {
        Operand { address, dtype: self.dtype, transposed }
    }

    /// The last columns of a chunk of logits.
    fn rest_logits(&self, planner: &Planner<'_>, rows: usize) -> Argument {
        at(planner, self.logits, rows * self.even)
    }

    /// The weights of the last columns.
    fn rest_weight(&self, planner: &Planner<'_>) -> Argument {
        Argument::Pointer(row_address(planner, self.weight, self.even))
    }

    /// Logits of the rows from `start` on.
    fn project(
        &self,
        planner: &mut Planner<'_>,
        start: usize,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let hidden = row_address(planner, self.hidden, start);
        if self.rest > 0 {
            let arguments = vec![
                Argument::Pointer(hidden),
                self.rest_weight(planner),
                self.rest_logits(planner, rows),
                count(rows),
                count(self.width),
                count(self.rest),
            ];
            let choice = self.rest_kernel("rest_logits", self.dtype);
            launch_flat(planner, choice, rows * self.rest, FLAT_THREADS / WARP, arguments)?;
        }
        let hidden = self.matrix(hidden, false);
        let weight = self.matrix(planner.address(self.weight), true);
        let logits = planner.address(self.logits);
        let sizes = (rows, self.even, self.width);
        let role = GemmRole::Activation;
        gemm(planner, GemmCall::new(sizes, hidden, weight, logits, self.dtype, role))
    }

    /// `d_logits · weight`, after the gradient has overwritten the logits. The product is added to
    /// the share of the last columns.
    fn hidden_gradient(
        &self,
        planner: &mut Planner<'_>,
        start: usize,
        rows: usize,
        out: &View,
    ) -> Result<(), DeviceError> {
        let out = row_address(planner, out, start);
        if self.rest > 0 {
            let arguments = vec![
                self.rest_logits(planner, rows),
                self.rest_weight(planner),
                Argument::Pointer(out),
                count(rows),
                count(self.width),
                count(self.rest),
            ];
            let choice = self.rest_kernel("rest_hidden_gradient", self.dtype);
            launch_flat(planner, choice, rows * self.width, FLAT_THREADS, arguments)?;
        }
        if self.even == 0 {
            return Ok(());
        }
        let d_logits = self.matrix(planner.address(self.logits), false);
        let weight = self.matrix(planner.address(self.weight), false);
        let sizes = (rows, self.width, self.even);
        let role = GemmRole::Activation;
        let mut call = GemmCall::new(sizes, d_logits, weight, out, self.dtype, role);
        call.accumulate = self.rest > 0;
        gemm(planner, call)
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
        let hidden = row_address(planner, self.hidden, start);
        if self.rest > 0 {
            let arguments = vec![
                self.rest_logits(planner, rows),
                Argument::Pointer(hidden),
                Argument::Pointer(row_address(planner, out, self.even)),
                count(rows),
                count(self.width),
                count(self.rest),
                flag(accumulate),
            ];
            let choice = self.rest_kernel("rest_weight_gradient", out.dtype);
            let grid = grid(planner, self.width.div_ceil(SIDE), self.rest)?;
            planner.launch(choice, grid, (SIDE * SIDE) as u32, arguments)?;
        }
        let d_logits = self.matrix(planner.address(self.logits), true);
        let hidden = self.matrix(hidden, false);
        let sizes = (self.even, self.width, rows);
        let (address, role) = (planner.address(out), GemmRole::Whole);
        let mut call = GemmCall::new(sizes, d_logits, hidden, address, out.dtype, role);
        call.accumulate = accumulate;
        gemm(planner, call)
    }

    fn rest_kernel<'k>(&self, name: &'k str, gradient: DType) -> KernelChoice<'k> {
        kernel(REST, name, types([("A", self.dtype), ("B", gradient)]))
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
