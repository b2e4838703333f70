//! STORM's own products of bf16 matrices on Hopper, an algorithm beside those of the library.

use super::{Addresses, GemmShape, UnitKind};
use crate::DeviceError;
use crate::cuda::CudaError;
use crate::cuda::compile::KernelSource;
use crate::cuda::context::{Argument, Card, Kernel, Launch};
use crate::cuda::modules::Kernels;
use crate::cuda::plan::KernelChoice;
use cudarc::driver::sys;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::ffi::c_void;
use storm_graph::DType;

const SOURCE: KernelSource = KernelSource {
    name: "product_hopper.cu",
    text: include_str!("../kernels/product_hopper.cu"),
    only_for: Some("sm_90a"),
};

/// `-D` definitions of a kernel.
type Definitions = Vec<(&'static str, String)>;

/// Rows and columns that the two blocks of a cluster compute at a time.
const TILE: usize = 256;
/// A tile is written in this many parts behind as many slots of the sum, of [`INNER`] each.
const PARTS: usize = 16;
const INNER: usize = 64;
const THREADS: u32 = 384;
const SHARED_BYTES: usize = 197_760;

/// Elements in 16 bytes, the unit of memory access.
const UNIT: usize = 8;
/// Columns of a box that the copy engine loads: 128 bytes, the width of its swizzle.
const BOX_COLUMNS: u32 = 64;

/// A kernel for products of one form.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Hopper {
    kernel: Kernel,
    multiprocessors: usize,
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Default)]
struct Form {
    a_turned: bool,
    b_turned: bool,
    bias: bool,
    addend: bool,
    unit: Option<UnitKind>,
}

impl Form {
    fn of(shape: &GemmShape) -> Form {
        Form {
            a_turned: shape.a.1,
            b_turned: shape.b.1,
            bias: shape.has_bias,
            addend: shape.has_addend,
            unit: shape.unit,
        }
    }
}

/// The kernels of all forms.
pub(in crate::cuda) fn kernels() -> Vec<(KernelSource, Definitions)> {
    let flags = [false, true];
    let stored = flags
        .into_iter()
        .flat_map(|a_turned| flags.map(|b_turned| Form { a_turned, b_turned, ..Form::default() }));
    let all =
        stored.flat_map(|form| [form, Form { bias: true, ..form }, Form { addend: true, ..form }]);
    let unit = |b_turned, kind| Form { b_turned, unit: Some(kind), ..Form::default() };
    let units = [
        unit(true, UnitKind::Forward),
        unit(false, UnitKind::Gradient),
        unit(false, UnitKind::GradientAndOutput),
    ];
    all.chain(units).map(|form| (SOURCE, definitions(form))).collect()
}

fn definitions(form: Form) -> Definitions {
    let Form { a_turned, b_turned, bias, addend, unit } = form;
    let flags =
        [("A_TURNED", a_turned), ("B_TURNED", b_turned), ("BIAS", bias), ("ADDEND", addend)];
    let flags = flags.map(|(name, value)| (name, i32::from(value)));
    let unit = match unit {
        None => 0,
        Some(UnitKind::Forward) => 1,
        Some(UnitKind::Gradient) => 2,
        Some(UnitKind::GradientAndOutput) => 3,
    };
    let all = flags.into_iter().chain([("UNIT", unit)]);
    all.map(|(name, value)| (name, value.to_string())).collect()
}

/// Whether the kernel computes products of this shape.
pub(super) fn suits(shape: &GemmShape, card: &Card) -> bool {
    let (m, n, k) = shape.sizes;
    // Columns of the matrices as they are stored.
    let columns = [if shape.a.1 { m } else { k }, if shape.b.1 { k } else { n }, n];
    let unit_fits = match shape.unit {
        None => true,
        Some(UnitKind::Forward) => shape.b.1 && n.is_multiple_of(2 * UNIT),
        Some(UnitKind::Gradient | UnitKind::GradientAndOutput) => !shape.b.1,
    };
    card.capability == (9, 0)
        && unit_fits
        && (shape.unit.is_none() || !(shape.a.1 || shape.has_bias || shape.has_addend))
        && shape.a.0 == DType::BF16
        && shape.b.0 == DType::BF16
        && shape.out == DType::BF16
        && !(shape.has_bias && shape.has_addend)
        && k > (PARTS - 1) * INNER
        && columns.iter().all(|columns| columns.is_multiple_of(UNIT))
        && shape.alignments.iter().all(|&bytes| bytes == super::ALIGNMENT_MAX as u32)
        && [m, n, k].iter().all(|&extent| i32::try_from(extent).is_ok())
}

impl Hopper {
    /// Identifies the kernel among the algorithms that are stored as the fastest. Change it with the kernel: what was
    /// measured then no longer counts.
    pub(super) const VERSION: &'static [u8] = b"storm hopper 2";

    /// The kernel for a shape, on the card of `kernels`. `None` if there is none.
    pub(super) fn for_shape(
        shape: &GemmShape,
        kernels: &Kernels,
    ) -> Result<Option<Hopper>, CudaError> {
        let card = kernels.card();
        if !suits(shape, card) {
            return Ok(None);
        }
        let kernel = kernels.get(&KernelChoice {
            source: SOURCE,
            name: "product_hopper",
            definitions: definitions(Form::of(shape)),
            shared_bytes: SHARED_BYTES,
        })?;
        Ok(Some(Hopper { kernel, multiprocessors: card.multiprocessors }))
    }

    /// Compiles the kernels for these shapes on all cores. [`Hopper::for_shape`] would compile one after the other, each
    /// for seconds.
    pub(super) fn compile<'a>(
        shapes: impl Iterator<Item = &'a GemmShape>,
        kernels: &Kernels,
    ) -> Result<(), CudaError> {
        let suited = shapes.filter(|shape| suits(shape, kernels.card()));
        let forms: BTreeSet<_> = suited.map(|shape| definitions(Form::of(shape))).collect();
        let forms: Vec<_> = forms.into_iter().collect();
        forms.par_iter().try_for_each(|definitions| kernels.compile(SOURCE, definitions))
    }

    /// The launch that computes a product.
    pub(super) fn launch(
        &self,
        shape: &GemmShape,
        at: &Addresses<'_>,
    ) -> Result<Launch, DeviceError> {
        let (m, n, k) = shape.sizes;
        let columns = match shape.unit {
            // A tile has as many gates as ups.
            Some(UnitKind::Forward) => (n / 2).div_ceil(TILE / 2),
            _ => n.div_ceil(TILE),
        };
        let tiles = m.div_ceil(TILE) * columns;
        let clusters = (self.multiprocessors / 2).clamp(1, tiles);
        let (a_rows, a_columns) = if shape.a.1 { (k, m) } else { (m, k) };
        let (b_rows, b_columns) = if shape.b.1 { (n, k) } else { (k, n) };
        let extent = |extent: usize| Argument::I32(extent as i32);
        let arguments = vec![
            map(at.a, a_rows, a_columns, !shape.a.1)?,
            map(at.b, b_rows, b_columns, shape.b.1)?,
            Argument::Pointer(at.bias.unwrap_or(0)),
            Argument::Pointer(at.addend.unwrap_or(0)),
            Argument::Pointer(at.out),
            Argument::Pointer(at.unit.map_or(0, |unit| unit.address)),
            extent(m),
            extent(n),
            extent(k),
        ];
        Ok(Launch {
            kernel: self.kernel,
            grid: (2 * clusters as u32, 1, 1),
            block: THREADS,
            shared_bytes: SHARED_BYTES as u32,
            arguments,
            begins_early: false,
            joint: None,
        })
    }
}

/// A matrix in memory (rows × columns) as the copy engine needs it. Boxes have 128 rows if the columns are those that
/// the product sums over, and 64 otherwise.
fn map(
    address: u64,
    rows: usize,
    columns: usize,
    sums_over_columns: bool,
) -> Result<Argument, CudaError> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let extents = [columns as u64, rows as u64];
    let strides = [(columns * DType::BF16.size_bytes()) as u64];
    let sides = [BOX_COLUMNS, if sums_over_columns { 128 } else { 64 }];
    // SAFETY: the arrays have two elements, and one for the strides.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address as *mut c_void,
            extents.as_ptr(),
            strides.as_ptr(),
            sides.as_ptr(),
            [1u32, 1].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(CudaError::driver("describing a matrix for the copy engine"))?;
    Ok(Argument::Struct(map.opaque.to_vec().into()))
}

#[cfg(test)]
mod tests {
    use super::super::{ALIGNMENT_MAX, GemmRole};
    use super::*;

    fn fits(shape: &GemmShape) -> bool {
        suits(shape, &card((9, 0)))
    }

    fn card(capability: (i32, i32)) -> Card {
        Card { name: String::new(), capability, multiprocessors: 132, memory_bytes: 0 }
    }

    fn shape(sizes: (usize, usize, usize), a_turned: bool, b_turned: bool) -> GemmShape {
        GemmShape {
            sizes,
            a: (DType::BF16, a_turned),
            b: (DType::BF16, b_turned),
            out: DType::BF16,
            has_bias: false,
            has_addend: false,
            unit: None,
            role: GemmRole::Activation,
            alignments: [ALIGNMENT_MAX as u32; 4],
        }
    }

    #[test]
    fn rows_that_the_copy_engine_reads_are_whole_units() {
        // Any number of rows, but what lies in a row must be a multiple of 16 bytes.
        assert!(fits(&shape((1001, 1288, 1096), false, true)));
        assert!(!fits(&shape((1001, 1288, 1095), false, true)));
        assert!(!fits(&shape((1001, 1287, 1096), false, true)), "rows of the result");
        // Stored (k, n), k may be anything; stored (k, m), m may not.
        assert!(!fits(&shape((1000, 1288, 1095), false, false)), "rows of A");
        assert!(fits(&shape((1000, 1288, 1095), true, false)));
        assert!(!fits(&shape((1001, 1288, 1095), true, false)));
    }

    #[test]
    fn sums_are_long_enough_to_write_a_tile_behind_them() {
        assert!(fits(&shape((256, 256, 961), true, false)));
        assert!(!fits(&shape((256, 256, 960), true, false)));
    }

    #[test]
    fn other_forms_are_left_to_the_library() {
        let plain = shape((256, 256, 1024), false, true);
        assert!(fits(&GemmShape { has_bias: true, ..plain }));
        assert!(fits(&GemmShape { has_addend: true, ..plain }));
        assert!(!fits(&GemmShape { has_bias: true, has_addend: true, ..plain }));
        assert!(!fits(&GemmShape { out: DType::F32, ..plain }));
        assert!(!fits(&GemmShape { a: (DType::U8, false), ..plain }));
        assert!(!fits(&GemmShape { alignments: [16, 16, 16, 8], ..plain }));
        assert!(!suits(&plain, &card((10, 0))) && !suits(&plain, &card((8, 9))));
    }

    #[test]
    fn a_unit_follows_a_plain_projection() {
        let unit = |kind, shape| GemmShape { unit: Some(kind), ..shape };
        let gradients = [UnitKind::Gradient, UnitKind::GradientAndOutput];
        for kind in [UnitKind::Forward].into_iter().chain(gradients) {
            let plain = shape((256, 272, 1024), false, kind == UnitKind::Forward);
            assert!(fits(&unit(kind, plain)), "{kind:?}");
            assert!(!fits(&unit(kind, GemmShape { has_bias: true, ..plain })), "{kind:?}");
            assert!(!fits(&unit(kind, GemmShape { has_addend: true, ..plain })), "{kind:?}");
            let other = GemmShape { b: (plain.b.0, !plain.b.1), ..plain };
            assert!(!fits(&unit(kind, other)), "{kind:?}");
            assert!(!fits(&unit(kind, GemmShape { a: (plain.a.0, true), ..plain })), "{kind:?}");
        }
        // Ups begin in the middle of a row.
        assert!(!fits(&unit(UnitKind::Forward, shape((256, 264, 1024), false, true))));
        assert!(fits(&unit(UnitKind::Gradient, shape((256, 264, 1024), false, false))));
    }

    #[test]
    fn every_form_has_its_kernel() {
        let kernels = kernels();
        assert_eq!(kernels.len(), 15);
        let form = |shape| definitions(Form::of(&shape));
        let addend = GemmShape { has_addend: true, ..shape((256, 256, 1024), true, false) };
        let unit = shape((256, 256, 1024), false, true);
        let unit = GemmShape { unit: Some(UnitKind::Forward), ..unit };
        for wanted in [form(addend), form(unit)] {
            assert!(kernels.iter().any(|(_, definitions)| *definitions == wanted));
        }
    }
}
