//! Image classifiers by name, for 32×32 images.

use super::{ImageConfig, ImageNetwork};

const NAMES: [&str; 3] = ["small-cnn", "resnet-9", "resnet-18"];

/// The names that [`image_preset`] accepts.
pub fn image_preset_names() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter()
}

/// The image classifier with this name, for 32×32 RGB images and ten classes. `None` if there is
/// none. Case is ignored.
pub fn image_preset(name: &str) -> Option<ImageConfig> {
    let network = match NAMES.into_iter().find(|known| known.eq_ignore_ascii_case(name))? {
        "small-cnn" => {
            ImageNetwork::SmallCnn { widths: vec![32, 64, 128], hidden: 256, dropout: 0.5 }
        }
        "resnet-9" => ImageNetwork::Resnet9 { widths: [64, 128, 256, 512], logit_scale: 0.125 },
        _ => ImageNetwork::Resnet { widths: vec![64, 128, 256, 512], blocks: 2 },
    };
    Some(ImageConfig::new([32, 32], 10, network))
}
