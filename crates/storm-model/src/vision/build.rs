//! stub
use super::ImageConfig;
use crate::{BuildOptions, Initialization, ModelError};
use storm_graph::Program;

/// How pictures of a training step are changed before the network sees them, as a function of seed, epoch and sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Augmentation {
    /// Whether half of the pictures are mirrored.
    pub flip: bool,
    /// Pixels by which a picture is padded before a crop of its own size is taken.
    pub crop: usize,
    /// Side of a square that is blanked; 0 for none.
    pub cutout: usize,
}
pub const PIXEL_VALUES_MAX: usize = 1 << 31;
pub(crate) fn build(_: &ImageConfig, _: &BuildOptions) -> Result<Program, ModelError> {
    unimplemented!()
}
pub(crate) fn initialization(_: &ImageConfig, _: &str) -> Initialization {
    unimplemented!()
}
