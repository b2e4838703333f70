//! Image augmentation.

use super::rules;
use crate::graph::Output;
use crate::random::PHASE_WORDS;
use crate::{AugmentSettings, Border, DType, Op, SAMPLE_WORDS, Shape, Tensor};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    let Op::Augment { images, samples, phase, settings, dtype } = op else {
        unreachable!("not an image op")
    };
    rules::dtype("images", images, DType::U8)?;
    rules::rank("images", images, 4)?;
    let &[batch, height, width, channels] = images.shape.axes() else { unreachable!("its rank") };
    rules::dtype("samples", samples, DType::I32)?;
    rules::shape("samples", samples, &Shape::from([batch, SAMPLE_WORDS]))?;
    rules::dtype("phase", phase, DType::I32)?;
    rules::shape("phase", phase, &Shape::from([PHASE_WORDS]))?;
    if !dtype.is_float() {
        return Err(format!("images become f32 or bf16, not {dtype}"));
    }
    check_settings(settings, height, width, channels)?;
    Ok(vec![Output::activation("", images.shape.clone(), *dtype)])
}

fn check_settings(
    settings: &AugmentSettings,
    height: usize,
    width: usize,
    channels: usize,
) -> Result<(), String> {
    let AugmentSettings { mean, deviation, border, padding, cutout, .. } = settings;
    let most = AugmentSettings::CHANNELS_MAX;
    if !(1..=most).contains(&channels) {
        return Err(format!("images have 1 to {most} channels, not {channels}"));
    }
    if mean.len() != channels || deviation.len() != channels {
        return Err(format!(
            "the images have {channels} channels, but there are {} means and {} deviations",
            mean.len(),
            deviation.len()
        ));
    }
    let is_deviation = |deviation: &f32| *deviation > 0.0 && deviation.is_finite();
    if !mean.iter().all(|mean| mean.is_finite()) || !deviation.iter().all(is_deviation) {
        return Err("means must be finite and deviations positive".into());
    }
    let side = AugmentSettings::SIDE_MAX;
    if height > side || width > side || *padding > side || *cutout > side {
        return Err(format!("images, padding and cutout are at most {side} pixels wide and high"));
    }
    if *border == Border::Reflect && *padding >= height.min(width).max(1) {
        return Err(format!(
            "a border of {padding} pixels cannot be a reflection of images of {height} by {width}"
        ));
    }
    Ok(())
}
