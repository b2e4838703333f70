//! Sliding windows over images, and how a convolution divides its images into chunks.

use crate::{DType, Shape};
use std::ops::Range;

/// A window that slides over an image: height first, then width. Padding counts as zeros in
/// convolutions and averages, and is never the maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Extents of the window.
    pub kernel: [usize; 2],
    /// Steps from one window position to the next.
    pub stride: [usize; 2],
    /// How far the first position starts before the edge, and the last may end after it.
    pub padding: [usize; 2],
}

impl Window {
    /// Maximum extent of an image or a window, so that sums of a few extents fit in 32 bits.
    pub const EXTENT_MAX: usize = 1 << 28;

    /// A square window.
    pub fn square(kernel: usize, stride: usize, padding: usize) -> Window {
        Window { kernel: [kernel; 2], stride: [stride; 2], padding: [padding; 2] }
    }

    /// A window that covers a whole image, for global pooling.
    pub fn whole(height: usize, width: usize) -> Window {
        Window { kernel: [height, width], stride: [1, 1], padding: [0, 0] }
    }

    /// Number of pixels that it covers.
    pub fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Whether positions next to each other can cover the same pixel.
    pub fn overlaps(&self) -> bool {
        (0..2).any(|axis| self.kernel[axis] > self.stride[axis])
    }

    /// Whether a convolution with it is a separate product for each pixel.
    pub fn is_pointwise(&self) -> bool {
        *self == Window::square(1, 1, 0)
    }

    /// The number of window positions along each axis of an image.
    ///
    /// # Errors
    /// A message: an extent is zero or beyond [`Window::EXTENT_MAX`], a window could lie completely
    /// in the padding, or the window is larger than the padded image.
    pub fn positions(&self, plane: [usize; 2]) -> Result<[usize; 2], String> {
        let mut positions = [0; 2];
        for axis in 0..2 {
            let (extent, kernel) = (plane[axis], self.kernel[axis]);
            let (stride, padding) = (self.stride[axis], self.padding[axis]);
            if extent == 0 || kernel == 0 || stride == 0 {
                return Err(format!("a plane of {plane:?} and {self:?} have an extent of zero"));
            }
            if [extent, kernel, stride, padding].into_iter().any(|e| e > Self::EXTENT_MAX) {
                let most = Self::EXTENT_MAX;
                return Err(format!("a plane of {plane:?} and {self:?} exceed {most}"));
            }
            if padding >= kernel {
                return Err(format!("{self:?} has a position with nothing but padding"));
            }
            let Some(room) = (extent + 2 * padding).checked_sub(kernel) else {
                return Err(format!("{self:?} is larger than a plane of {plane:?}"));
            };
            positions[axis] = room / stride + 1;
        }
        Ok(positions)
    }

    /// How many cells an axis has. A cell goes from the start of a window to that of the next, without
    /// padding; the last may have no window. Without overlaps, a window is inside its cell.
    pub fn cells(&self, axis: usize, extent: usize) -> usize {
        (extent + self.padding[axis]).div_ceil(self.stride[axis])
    }

    /// The rows or columns of a cell.
    pub fn cell(&self, axis: usize, cell: usize, extent: usize) -> Range<usize> {
        let (start, padding) = (cell * self.stride[axis], self.padding[axis]);
        let end = (start + self.stride[axis]).saturating_sub(padding).min(extent);
        start.saturating_sub(padding)..end
    }

    /// The rows (axis 0) or columns (axis 1) of the window at `position` that are inside an image
    /// of this extent.
    pub fn inside(&self, axis: usize, position: usize, extent: usize) -> Range<usize> {
        let start = position * self.stride[axis];
        let padding = self.padding[axis];
        let first = padding.saturating_sub(start);
        first..self.kernel[axis].min((extent + padding).saturating_sub(start)).max(first)
    }

    /// The window positions, out of `positions`, that cover row or column `at` of the image.
    pub fn covering(&self, axis: usize, at: usize, positions: usize) -> Range<usize> {
        let (at, stride) = (at + self.padding[axis], self.stride[axis]);
        let first = (at + 1).saturating_sub(self.kernel[axis]).div_ceil(stride);
        let end = (at / stride + 1).min(positions);
        first.min(end)..end
    }
}

/// A batch of images and a window: the sizes that convolution and pooling kernels use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planes {
    /// B: number of images.
    pub images: usize,
    /// (H, W): size of an image.
    pub input: [usize; 2],
    /// (OH, OW): number of window positions.
    pub output: [usize; 2],
    /// C: number of input channels.
    pub channels: usize,
    /// The window.
    pub window: Window,
}

impl Planes {
    /// The sizes for an input (B, H, W, C).
    ///
    /// # Errors
    /// A message: the rank is wrong, the window does not fit, or the columns are too large for any
    /// memory.
    pub fn new(input: &Shape, window: Window) -> Result<Planes, String> {
        let &[images, height, width, channels] = input.axes() else {
            return Err(format!("images must have the axes (B, H, W, C), not {input}"));
        };
        if channels == 0 {
            return Err("images have no channels".to_owned());
        }
        let (plane, output) = ([height, width], window.positions([height, width])?);
        let planes = Planes { images, input: plane, output, channels, window };
        let covered = window.taps().checked_mul(channels).and_then(|n| n.checked_add(PACK));
        let columns = covered.and_then(|n| Shape::checked(&[images, output[0], output[1], n]));
        columns
            .map(|_| planes)
            .ok_or_else(|| format!("columns of {input} with {window:?} are too many"))
    }

    /// Shape of the output with this many channels.
    ///
    /// # Errors
    /// A message: it has too many elements.
    pub fn output_shape(&self, channels: usize) -> Result<Shape, String> {
        let axes = [self.images, self.output[0], self.output[1], channels];
        Shape::checked(&axes).ok_or_else(|| format!("a tensor of {axes:?} has too many elements"))
    }

    /// Number of window positions in an image.
    pub fn positions(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// Number of pixels in an image.
    pub fn pixels(&self) -> usize {
        self.input[0] * self.input[1]
    }

    /// Elements that a window covers: KH·KW·C, the width of a convolution's weight.
    pub fn covered(&self) -> usize {
        self.window.taps() * self.channels
    }

    /// Elements from one row of columns to the next. A row contains the elements that a window
    /// covers, in the order (kh, kw, channel), and zeros up to a multiple of 8, because tensor
    /// cores read whole packs.
    pub fn column_stride(&self) -> usize {
        self.covered().next_multiple_of(PACK)
    }

    /// Whether tensor-core kernels, which need no columns, support this. They sum over this many
    /// channels, count all positions and the elements that a window spans in 32 bits, and have one
    /// bit per tap.
    pub fn suit_tensor_cores(&self, dtype: DType, channels: usize) -> bool {
        let most = self.positions().max(self.pixels()).checked_mul(self.images);
        let row = self.input[1].max(self.output[1]).checked_mul(channels.max(self.channels));
        let rows = row.and_then(|row| row.checked_mul(self.window.kernel[0]));
        let is_small = |extent: Option<usize>| extent.is_some_and(|extent| extent < 1 << 30);
        let fits = is_small(most) && is_small(rows) && is_small(Some(self.covered()));
        dtype == DType::BF16 && channels.is_multiple_of(PACK) && self.window.taps() <= 31 && fits
    }

    /// Number of images whose columns are in memory at a time, limited to `chunk_bytes` with
    /// elements of `element_bytes`. There are as many chunks as needed, with nearly equal numbers
    /// of images, at least one. Chunks of eight or more images have a multiple of eight, so that
    /// chunks of every tensor are aligned to 16 bytes.
    pub fn images_per_chunk(&self, element_bytes: usize, chunk_bytes: usize) -> usize {
        let image_bytes =
            self.positions().saturating_mul(self.column_stride()).saturating_mul(element_bytes);
        let whole = |images: usize| if images < PACK { images } else { images / PACK * PACK };
        let most = whole(chunk_bytes / image_bytes.max(1)).max(1);
        if self.images <= most {
            return self.images;
        }
        let equal = self.images.div_ceil(self.images.div_ceil(most));
        if most < PACK { equal } else { equal.next_multiple_of(PACK) }
    }
}

/// Elements that kernels load and store at once.
pub const PACK: usize = 8;

/// The parts of all positions over which a weight's gradient is summed, each by its own blocks.
/// They depend only on the shape, because the order of the sum must not depend on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientParts {
    /// Number of parts.
    pub count: usize,
    /// Positions of each part but the last, a multiple of [`GradientParts::SLAB`].
    pub positions: usize,
}

impl GradientParts {
    /// Positions that a block processes at a time.
    pub const SLAB: usize = 64;
    /// Columns of a block's tile.
    const TILE_COLUMNS: usize = 128;
    /// Blocks that a large GPU runs at a time, with tiles of 64 and of 128 outputs.
    const BLOCKS: [usize; 2] = [396, 264];
    /// Overhead of starting and ending a block, in slabs.
    const OVERHEAD: usize = 3;
    /// Maximum bytes of all parts.
    const BYTES_MAX: usize = 32 << 20;

    /// Whether the gradient is summed in parts: by tensor cores, directly from the images.
    pub fn apply(dtype: DType, planes: &Planes, outputs: usize) -> bool {
        let is_whole = outputs.is_multiple_of(PACK) && planes.images > 0;
        is_whole && planes.suit_tensor_cores(dtype, planes.channels)
    }

    /// The parts for a weight with this many outputs.
    pub fn new(planes: &Planes, outputs: usize) -> GradientParts {
        let [across, down] = Self::tiles(planes, outputs);
        let slabs = (planes.images * planes.positions()).div_ceil(Self::SLAB).max(1);
        let bytes = outputs * planes.covered() * size_of::<f32>();
        let most = (Self::BYTES_MAX / bytes.max(1)).min(slabs.div_ceil(4)).clamp(1, 512);
        let blocks = Self::BLOCKS[usize::from(Self::tile_outputs(outputs) > 64)];
        // Waves of blocks, each as long as a part.
        let time = |count: &usize| {
            (across * down * count).div_ceil(blocks) * (slabs.div_ceil(*count) + Self::OVERHEAD)
        };
        let count = (1..=most).min_by_key(time).unwrap_or(1);
        let each = slabs.div_ceil(count);
        GradientParts { count: slabs.div_ceil(each), positions: each * Self::SLAB }
    }

    /// Tiles of the weight: across the elements that a window covers, and down its outputs.
    pub fn tiles(planes: &Planes, outputs: usize) -> [usize; 2] {
        let down = outputs.div_ceil(Self::tile_outputs(outputs));
        [planes.covered().div_ceil(Self::TILE_COLUMNS), down]
    }

    /// Outputs of a tile.
    pub fn tile_outputs(outputs: usize) -> usize {
        if outputs > 64 { 128 } else { 64 }
    }
}

/// Maximum bytes of a chunk of columns. Half of the L2 cache that a large GPU has for one half of
/// its multiprocessors, so that columns are always read from the cache.
pub const COLUMN_CHUNK_BYTES: usize = 16 << 20;
