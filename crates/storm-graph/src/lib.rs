//! Tensors, ops, shape rules, automatic differentiation and recomputation.
//!
//! This crate is pure: no I/O, no devices, no clock. A [`Graph`] is a list of typed operations in
//! single-assignment form. A [`Program`] is a model: several graphs, each repeated any number of
//! times. Differentiation and recomputation transform one graph into another.
//!
//! ```
//! use storm_graph::{DType, Graph, Op, Shape, TensorClass, Training};
//!
//! let mut graph = Graph::new();
//! let x = graph.input("x", [4, 8], DType::F32);
//! let weight = graph.parameter("weight", [3, 8], DType::F32, Training::Trainable);
//! let y = graph.apply_one("y", Op::Linear { x, weight, bias: None, addend: None })?;
//! assert_eq!(graph.tensor(y).shape, Shape::from([4, 3]));
//!
//! let wrong = graph.parameter("wrong", [3, 7], DType::F32, Training::Trainable);
//! let error = graph.apply("y", Op::Linear { x, weight: wrong, bias: None, addend: None });
//! assert!(error.unwrap_err().to_string().contains("`x` is 8 wide, but `weight` takes 7"));
//! # Ok::<(), storm_graph::GraphError>(())
//! ```

mod attention_sums;
mod attributes;
mod augment;
mod autodiff;
mod codec;
mod cost;
mod dtype;
mod error;
mod fp8;
mod fp8_forms;
mod fuse;
mod graph;
mod moments;
mod op;
mod ops;
mod overwrite;
mod program;
mod quantized;
pub mod random;
mod recompute;
mod section;
mod section_builder;
mod shape;
mod tensor;
mod window;
pub mod work;

pub use attention_sums::AttentionSums;
pub use attributes::{
    Accuracy, ActivationCodec, ActivationFunction, AdamWParameters, BlockPlace, CacheParts,
    HeadLayout, IGNORE_INDEX, KlBalance, Mask, MomentumDirection, NormActivation, NormKind,
    ParameterGradients, RotaryDirection, RotaryFrequencies, Rounding, SgdParameters, StepScalars,
    UnitOutput,
};
pub use augment::{AugmentSettings, Border, Change as ImageChange, Flip, SAMPLE_WORDS};
pub use autodiff::{GradientRequest, differentiate, order_name, parameter_gradient_dtype};
pub use codec::encode_units;
pub use cost::ADAMW_INT8;
pub use dtype::DType;
pub use error::{GraphError, OperandList};
pub use fp8::{
    E4M3_VALUES, FP8_MULTIPLE, Fp8Form, encode_e4m3, fp8_factor, fp8_scale, fp8_shape, fp8_suits,
};
pub use graph::{Graph, Node, Phase};
pub use moments::{
    FIRST_MOMENT_LEVELS, MOMENT_GROUP, MOMENT_GROUP_BYTES, MomentFormat, OBSERVED_BLOCK,
    OBSERVED_PIECE_ALIGNMENT, OBSERVED_RUN, OBSERVED_SHARE, OBSERVED_SUMS, SECOND_MOMENT_LEVELS,
    decode_first_moment, decode_second_moment, encode_first_moment, encode_second_moment,
    is_observed, moment_scale,
};
pub use op::{Cost, Family, Op};
pub use ops::{
    FP8_PARTIALS, PIECE_ALIGNMENT, ROWS_PER_PARTIAL, STATISTICS_GROUP, STATISTICS_GROUPS,
    STATISTICS_LANES, STATISTICS_ROWS, SUM_BLOCK, norm_rows_per_partial,
};
pub use program::{
    Accumulation, Block, Numbering, Origin, ParameterInstance, ParameterRows, Program,
    ProgramParameter, Stage, TiedUse,
};
pub use quantized::{GROUP as QUANTIZED_GROUP, NF4, QuantizedFormat, QuantizedRow};
pub use recompute::recompute;
pub use section::{Carried, ParameterGradient, Section, SectionBackward};
pub use section_builder::{BatchNormOptions, SectionBuilder};
pub use shape::Shape;
pub use tensor::{Tensor, TensorClass, TensorId, Training};
pub use window::{COLUMN_CHUNK_BYTES, GradientParts, PACK, Planes, Window};
