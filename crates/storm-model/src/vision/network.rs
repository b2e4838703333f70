//! stub
use super::ImageConfig;
use super::parameters::Stored;
use storm_graph::Stage;

pub(super) struct Outline {
    pub(super) templates: Vec<Vec<Stored>>,
    pub(super) stages: Vec<Stage>,
}
pub(super) fn outline(_: &ImageConfig) -> Outline {
    unimplemented!()
}
