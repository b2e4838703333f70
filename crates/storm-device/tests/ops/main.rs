//! What ops compute: forward against an f64 reference, backward against finite differences, and
//! that neither threads nor recomputation change a bit.
//!
//! | file | what belongs there |
//! |---|---|
//! | `../reference/` | the ops in plain f64 loops |
//! | `../support/` | random cases, the machine that runs them, comparisons, [`support::check`] |
//! | `linear`, `convolution`, `pool`, `elementwise`, `norm`, `batch_norm`, `attention`, `recurrent`, `categorical`, `loss`, `row_loss`, `shapes` | random cases of one op family |
//! | `optimizer`, `optimizer_int8`, `random_normal`, `augment` | ops without gradients |
//! | `codec` | gated units whose operand waits in 8 bits |
//! | `fp8` | products of 8-bit floats |
//! | `transformer` | whole small models: sharing, frozen parameters |
//! | `exactness` | thread counts and recomputation, to the bit |
//!
//! A failure names the family, the seed and the graph; the seed alone makes it again.

#[path = "../reference/mod.rs"]
mod reference;
#[path = "../support/mod.rs"]
mod support;

mod attention;
mod augment;
mod batch_norm;
mod categorical;
mod codec;
mod convolution;
mod dropout;
mod elementwise;
mod exactness;
mod facts;
mod fp8;
mod linear;
mod loss;
mod norm;
mod observed;
mod optimizer;
mod optimizer_int8;
mod pool;
mod random_normal;
mod recurrent;
mod row_loss;
mod shapes;
mod transformer;
