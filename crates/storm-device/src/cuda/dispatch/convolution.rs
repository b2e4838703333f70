//! Convolutions: directly on tensor cores where those support the images, otherwise as products
//! with the columns of a chunk of images.

use super::linear::{gemm, operand};
use super::pool::{each_image, geometry, planes};
use super::{
    Definitions, PACK, all_types, convolution_tiles, kernel, layout, linear, types, unsupported,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::gemm::{GemmCall, GemmRole, Operand};
use crate::cuda::plan::Planner;
use crate::placed::View;
use storm_graph::{
    BlockPlace, COLUMN_CHUNK_BYTES, DType, GradientParts, Op, Planes, Shape, Window,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    name: "convolution.cu",
    text: include_str!("../kernels/convolution.cu"),
    only_for: None,
};

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let outputs = &planner.node.outputs;
    match &planner.node.op {
        Op::Conv2d { window, .. }
        | Op::Conv2dInputGrad { window, .. }
        | Op::Conv2dWeightGrad { window, .. }
            if window.is_pointwise() =>
        {
            linear::plan(planner)
        }
        Op::Conv2d { x, weight, bias, window } => {
            let images = Images::new(&x.shape, *window, x.dtype, &outputs[1]);
            if images.planes.suit_tensor_cores(x.dtype, images.planes.channels) {
                let y = &outputs[0];
                return convolution_tiles::forward(planner, &images.planes, x, weight, bias, y);
            }
            let weight = images.padded(planner, weight, outputs.get(2))?;
            for chunk in images.chunks() {
                images.fill_columns(planner, x, chunk)?;
                let out = images.row_address(planner, &outputs[0], chunk);
                let sizes = (images.rows(chunk), outputs[0].shape.width(), images.stride());
                let a = images.columns(planner);
                let b = Operand { transposed: true, ..weight };
                let mut call = GemmCall::new(sizes, a, b, out, x.dtype, GemmRole::Activation);
                call.bias = bias.as_ref().map(|bias| planner.address(bias));
                gemm(planner, call)?;
            }
            Ok(())
        }
        Op::Conv2dInputGrad { dy, weight, addend, accumulator, window, input } => {
            let addend = addend.as_ref().or(accumulator.as_ref());
            let images = Images::new(input, *window, dy.dtype, &outputs[1]);
            if images.planes.suit_tensor_cores(dy.dtype, dy.shape.width()) {
                let (dx, turned) = (&outputs[0], &outputs[2]);
                let planes = &images.planes;
                return convolution_tiles::input_grad(
                    planner, planes, dy, weight, turned, addend, dx,
                );
            }
            let weight = images.padded(planner, weight, outputs.get(2))?;
            for chunk in images.chunks() {
                let address = images.row_address(planner, dy, chunk);
                let a = Operand { address, dtype: dy.dtype, transposed: false };
                let sizes = (images.rows(chunk), images.stride(), dy.shape.width());
                let out = planner.address(images.memory);
                gemm(
                    planner,
                    GemmCall::new(sizes, a, weight, out, dy.dtype, GemmRole::Activation),
                )?;
                images.gather_columns(planner, addend, &outputs[0], chunk)?;
            }
            Ok(())
        }
        Op::Conv2dWeightGrad { dy, x, accumulator, window, .. } => {
            let images = Images::new(&x.shape, *window, x.dtype, &outputs[1]);
            let (out, sum) = (&outputs[0], &outputs[2]);
            if images.planes.images == 0 {
                // A sum over no images.
                return match accumulator {
                    Some(_) => Ok(()),
                    None => layout::fill(planner, out, 0.0),
                };
            }
            if GradientParts::apply(x.dtype, &images.planes, dy.shape.width()) {
                let accumulate = accumulator.is_some();
                let planes = &images.planes;
                return convolution_tiles::weight_grad(
                    planner, planes, dy, x, sum, accumulate, out,
                );
            }
            for chunk in images.chunks() {
                images.fill_columns(planner, x, chunk)?;
                let address = images.row_address(planner, dy, chunk);
                let a = Operand { address, dtype: dy.dtype, transposed: true };
                let sizes = (dy.shape.width(), images.stride(), images.rows(chunk));
                let (b, to) = (images.columns(planner), planner.address(sum));
                let role = GemmRole::Whole;
                let mut call = GemmCall::new(sizes, a, b, to, DType::F32, role);
                call.accumulate = chunk.0 > 0;
                gemm(planner, call)?;
            }
            layout::block_grad(planner, sum, WHOLE, accumulator.is_some(), out)
        }
        _ => unreachable!("not a convolution"),
    }
}

/// The place of a matrix in the upper left corner of another.
const WHOLE: BlockPlace = BlockPlace { row: 0, column: 0, factor: 1.0 };

/// First image and number of images.
type Chunk = (usize, usize);

/// The images of a convolution, and memory for the columns of some of them.
struct Images<'a> {
    planes: Planes,
    dtype: DType,
    memory: &'a View,
}

impl<'a> Images<'a> {
    fn new(input: &Shape, window: Window, dtype: DType, memory: &'a View) -> Images<'a> {
        Images { planes: planes(input, window), dtype, memory }
    }

    /// Width of columns.
    fn stride(&self) -> usize {
        self.planes.column_stride()
    }

    fn rows(&self, (_, images): Chunk) -> usize {
        images * self.planes.positions()
    }

    fn chunks(&self) -> impl Iterator<Item = Chunk> + use<> {
        let all = self.planes.images;
        let most = self.planes.images_per_chunk(self.dtype.size_bytes(), COLUMN_CHUNK_BYTES);
        (0..all).step_by(most.max(1)).map(move |first| (first, most.min(all - first)))
    }

    fn columns(&self, planner: &Planner<'_>) -> Operand {
        operand(planner, self.memory)
    }

    /// The address of the chunk's first row in a tensor (B, OH, OW, O).
    fn row_address(&self, planner: &Planner<'_>, view: &View, (first, _): Chunk) -> u64 {
        let elements = first * self.planes.positions() * view.shape.width();
        planner.address(view) + (elements * view.dtype.size_bytes()) as u64
    }

    /// The weight, padded to the width of columns if necessary.
    fn padded(
        &self,
        planner: &mut Planner<'_>,
        weight: &View,
        memory: Option<&View>,
    ) -> Result<Operand, DeviceError> {
        let Some(memory) = memory.filter(|_| self.stride() != self.planes.covered()) else {
            return Ok(operand(planner, weight));
        };
        layout::place_block(planner, weight, WHOLE, memory, 0..memory.shape.rows())?;
        Ok(operand(planner, memory))
    }

    fn is_packed(&self) -> bool {
        self.planes.channels.is_multiple_of(PACK)
    }

    fn fill_columns(
        &self,
        planner: &mut Planner<'_>,
        x: &View,
        (first, images): Chunk,
    ) -> Result<(), DeviceError> {
        let Planes { channels, .. } = self.planes;
        // A thread copies a pack of channels in all rows and columns of a window, or a pack of a
        // row of columns.
        let (name, per_position) = match self.is_packed() {
            true => ("fill_columns", channels / PACK),
            false => ("fill_columns_any", self.stride() / PACK),
        };
        let start = first * self.planes.pixels() * channels;
        let arguments = vec![planner.pointer_to(x, start), planner.pointer(self.memory)];
        self.launch(planner, name, images, self.planes.positions() * per_position, arguments)
    }

    fn gather_columns(
        &self,
        planner: &mut Planner<'_>,
        addend: Option<&View>,
        out: &View,
        (first, images): Chunk,
    ) -> Result<(), DeviceError> {
        let Planes { channels, .. } = self.planes;
        let (name, per_pixel) = match self.is_packed() {
            true => ("gather_columns", channels / PACK),
            false => ("gather_columns_any", channels),
        };
        let start = first * self.planes.pixels() * channels;
        let addend = match addend {
            Some(addend) => planner.pointer_to(addend, start),
            None => Argument::Pointer(0),
        };
        let arguments = vec![planner.pointer(self.memory), addend, planner.pointer_to(out, start)];
        self.launch(planner, name, images, self.planes.pixels() * per_pixel, arguments)
    }

    /// Launches `per_image` threads for each image.
    fn launch(
        &self,
        planner: &mut Planner<'_>,
        name: &str,
        images: usize,
        per_image: usize,
        mut arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        if self.stride() > i32::MAX as usize {
            let reason = format!("a window covers {} elements", self.planes.covered());
            return Err(unsupported(planner, reason));
        }
        let planes = Planes { images, ..self.planes };
        arguments.extend(geometry(&planes));
        let choice = kernel(SOURCE, name, types([("E", self.dtype)]));
        each_image(planner, choice, images, per_image, arguments)
    }
}
