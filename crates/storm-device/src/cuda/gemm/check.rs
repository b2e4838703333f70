//! Compares STORM's own products with those of the library, bit by bit.

use super::choices::Algorithm;
use super::hopper::Hopper;
use super::trial::Operands;
use super::{ALIGNMENT_MAX, Gemm, GemmPlan, GemmRole, GemmShape, UnitKind};
use crate::DeviceError;
use crate::cuda::CudaError;
use crate::cuda::modules::Kernels;
use half::bf16;
use storm_graph::DType;

/// A product that STORM's own kernel has computed, and the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnProduct {
    /// `x · weightᵀ + bias`.
    pub name: &'static str,
    /// Rows, columns, and terms of a sum.
    pub sizes: (usize, usize, usize),
    /// Elements that differ.
    pub differing: usize,
}

/// How the operands of a product are stored.
#[derive(Clone, Copy)]
struct Form {
    names: [&'static str; 3],
    a_transposed: bool,
    b_transposed: bool,
}

/// A projection and the gradients of its input and weight: plain, with a bias, and with an addend.
const FORMS: [Form; 3] = [
    Form {
        names: ["x · weightᵀ", "x · weightᵀ + bias", "x · weightᵀ + addend"],
        a_transposed: false,
        b_transposed: true,
    },
    Form {
        names: ["dy · weight", "dy · weight + bias", "dy · weight + addend"],
        a_transposed: false,
        b_transposed: false,
    },
    Form {
        names: ["dyᵀ · x", "dyᵀ · x + bias", "dyᵀ · x + addend"],
        a_transposed: true,
        b_transposed: false,
    },
];

/// What follows the product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Plain,
    Bias,
    Addend,
    Unit(UnitKind),
}

/// Whole tiles, and tiles of which parts are outside of the matrices, also along the sum.
const SIZES: [(usize, usize, usize); 2] = [(512, 768, 1024), (296, 520, 2056)];

impl Gemm {
    /// Computes products of every form with both. Empty on cards without such kernels.
    pub(in crate::cuda) fn check_own(
        &self,
        kernels: &Kernels,
    ) -> Result<Vec<OwnProduct>, DeviceError> {
        let shapes: Vec<_> =
            all().flat_map(|(form, _, end)| SIZES.map(|sizes| form.shape(sizes, end))).collect();
        Hopper::compile(shapes.iter(), kernels)?;
        let mut products = Vec::new();
        for (form, name, end) in all() {
            for sizes in SIZES {
                let shape = form.shape(sizes, end);
                let Some(own) = Hopper::for_shape(&shape, kernels)? else { continue };
                let found = self.trial(&shape, &Algorithm::Hopper(own), kernels)?;
                let expected = self.by_library(&shape, kernels)?;
                let pairs = found.chunks_exact(2).zip(expected.chunks_exact(2));
                let differing = pairs.filter(|(found, expected)| found != expected).count();
                products.push(OwnProduct { name, sizes, differing });
            }
        }
        Ok(products)
    }

    /// The library's product. An addend is added to it here: some of the library's algorithms round before that, some
    /// do not.
    fn by_library(&self, shape: &GemmShape, kernels: &Kernels) -> Result<Vec<u8>, DeviceError> {
        let plain = GemmShape { has_addend: false, ..*shape };
        let plan = GemmPlan::describe_shape(&plain).map_err(CudaError::blas("a check"))?;
        let choice = plan.first_choice(self.handle, &plain, plain.sizes.0);
        let choice = choice.map_err(CudaError::blas("a check"))?;
        let product = self.trial(&plain, &choice, kernels)?;
        if !shape.has_addend {
            return Ok(product);
        }
        let addend = Operands::new(shape).addend;
        let value = |bytes: &[u8]| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let pairs = product.chunks_exact(2).zip(addend.chunks_exact(2));
        let sums = pairs.map(|(a, b)| bf16::from_f32(value(a) + value(b)));
        Ok(sums.flat_map(bf16::to_le_bytes).collect())
    }
}

/// Every form with every end that STORM has a kernel for.
fn all() -> impl Iterator<Item = (Form, &'static str, End)> {
    let ends = [End::Plain, End::Bias, End::Addend];
    let plain = FORMS.into_iter().flat_map(move |form| {
        form.names.into_iter().zip(ends).map(move |(name, end)| (form, name, end))
    });
    let units = [
        (FORMS[0], "SwiGLU(x · weightᵀ)", End::Unit(UnitKind::Forward)),
        (FORMS[1], "its gradient", End::Unit(UnitKind::Gradient)),
        (FORMS[1], "gradient and SwiGLU", End::Unit(UnitKind::GradientAndOutput)),
    ];
    plain.chain(units)
}

impl Form {
    fn shape(&self, sizes: (usize, usize, usize), end: End) -> GemmShape {
        GemmShape {
            sizes,
            a: (DType::BF16, self.a_transposed),
            b: (DType::BF16, self.b_transposed),
            out: DType::BF16,
            has_bias: end == End::Bias,
            has_addend: end == End::Addend,
            unit: match end {
                End::Unit(kind) => Some(kind),
                _ => None,
            },
            role: GemmRole::Activation,
            alignments: [ALIGNMENT_MAX as u32; 4],
        }
    }
}
