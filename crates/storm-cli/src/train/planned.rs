//! The run of a config file as `storm plan CONFIG` plans it, before it begins.

use super::checks;
use super::config::{self, BadConfig};
use super::data::{self, DataForm};
use super::device::{Asked, DeviceKind, Machine};
use super::folder::Start;
use super::model;
use super::options::{Given, Settings};
use super::output::Style;
use super::setup::{check_outline, request, train_options};
use super::values::DeviceArg;
use crate::plan::{Request, explained};
use anyhow::Result;
use std::path::Path;
use storm_device::cuda::diagnose;
use storm_model::Packing;

/// The planner's request for a config file, with flags overriding its keys. The data need not exist; a preset then
/// keeps its own vocabulary.
///
/// Disk space without a folder stands for an assumed disk of `drives` drives.
pub(crate) fn request_of_config(path: &Path, flags: Given, drives: u8) -> Result<Request> {
    let given = flags.over(config::read(path)?);
    config::check_values(&given)?;
    request_of(&given, Some(drives))
}

/// Refuses a config whose run could not start: runs every check and the planning that precede packing the data.
pub(crate) fn check_config(text: &str) -> Result<()> {
    let given = config::parse(text).map_err(BadConfig)?;
    let settings = given.clone().resolve();
    checks::settings(&settings)?;
    let folder = settings.runs.join(settings.name.as_deref().unwrap_or_default());
    check_outline(&given, &folder, None, Start::Fresh, Style::Quiet, None)?;
    let request = request_of(&given, None)?;
    match request.launch(None).plan() {
        Ok(_) => Ok(()),
        Err(error) => Err(explained(&request, error, false)),
    }
}

/// The positions of a model with weights; `None` for a preset.
pub(crate) fn positions_of_weights(name: &str) -> Result<Option<usize>> {
    let given = Given { model: Some(name.to_owned()), ..Given::default() };
    let model = model::Outline::new(&given.resolve())?;
    let positions = model.config.language().map(|config| config.max_positions);
    Ok(positions.filter(|_| !model.is_fresh))
}

fn request_of(given: &Given, drives: Option<u8>) -> Result<Request> {
    let settings = &given.clone().resolve();
    let model = model::Outline::new(settings)?;
    let (packing, form, loading) = match &settings.data {
        Some(_) => {
            let run = settings.runs.join(settings.name.as_deref().unwrap_or_default());
            let data = data::Outline::new(given, &run, Start::Resume)?;
            (data.packing(), data.form_when_packed(settings)?, data.loading_bytes(settings))
        }
        None => {
            let form = DataForm::of_model(&model.config);
            let loading = data::loading_bytes_of(&form, settings);
            (Packing::Single, form, loading)
        }
    };
    let config = model.for_data(settings, &form)?;
    let options = train_options(settings, &config, packing);
    let mut asked = Asked::from(settings);
    asked.disk.drives = drives;
    let machine = Machine::of_kind(kind(settings), &asked)?;
    request(settings, &model.name, config, options, machine, loading)
}

/// The device the run would train on. With a named hardware profile, it need not be present.
fn kind(settings: &Settings) -> DeviceKind {
    match settings.device {
        DeviceArg::Cpu => DeviceKind::Cpu,
        DeviceArg::Auto if settings.hardware.is_none() && !diagnose().is_ready() => DeviceKind::Cpu,
        DeviceArg::Auto | DeviceArg::Cuda => DeviceKind::Cuda,
    }
}
