//! The parameters of an image classifier, and how PyTorch stores them.

use super::ImageConfig;
use super::network::{Network, network};
use crate::{BuildOptions, HfPiece, ParameterSpec, StoredOrder};
use storm_graph::DType;

/// How a parameter of a template is stored.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stored {
    /// Name in the template. In the file, the block's name precedes it.
    pub(super) name: String,
    /// Shape in the program: (O, KH·KW·I) for a convolution.
    pub(super) shape: Vec<usize>,
    /// Shape in the file: (O, I, KH, KW) for a convolution.
    pub(super) file_shape: Vec<usize>,
    pub(super) order: StoredOrder,
}

impl Stored {
    /// A parameter with the same shape in both.
    pub(super) fn plain(name: String, shape: &[usize]) -> Stored {
        let (shape, file_shape) = (shape.to_vec(), shape.to_vec());
        Stored { name, shape, file_shape, order: StoredOrder::Rows }
    }
}

/// Every parameter of a validated config with its full name, including running statistics, in the
/// order of the forward pass. Names are those of PyTorch's modules.
pub(crate) fn parameters(config: &ImageConfig) -> Vec<ParameterSpec> {
    let options = BuildOptions::training(1, 1, DType::F32);
    let Network { stored: templates, stages, .. } = network(config, &options)
        .unwrap_or_else(|error| unreachable!("a validated config can be built: {error}"));
    let mut specs = Vec::new();
    for stage in &stages {
        for block in 0..stage.repeat {
            for stored in &templates[stage.template] {
                let name = stage.full_name(block, &stored.name);
                let piece = HfPiece {
                    hf_name: name.clone(),
                    shape: stored.file_shape.clone(),
                    rows: 0..stored.shape[0],
                    order: stored.order,
                };
                specs.push(ParameterSpec {
                    name,
                    shape: stored.shape.clone(),
                    pieces: vec![piece],
                });
            }
        }
    }
    specs
}
