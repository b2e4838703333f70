//! The length of a run and its learning-rate schedule.

use super::model::Model;
use super::options::{Given, Settings};
use super::output::Style;
use super::values::{CooldownShapeArg, ScheduleArg, Span};
use crate::UsageError;
use anyhow::Result;
use storm_train::{Decay, Schedule};

/// Default number of steps.
pub(super) const STEPS_DEFAULT: u64 = 1000;

/// Default length of the cooldown.
const COOLDOWN_DEFAULT: Span = Span::Share(0.2);

/// Default peak learning rate for fresh weights.
pub(crate) const FRESH_RATE: f64 = 3e-4;
/// Default peak learning rate for a pretrained language model: a higher one would make it forget
/// what it learned.
pub(crate) const FURTHER_RATE: f64 = 2e-5;
/// Default peak learning rate for adapters, which start at zero.
const ADAPTER_RATE: f64 = 2e-4;

/// Default final learning rate, as a fraction of the peak.
const FINAL_SHARE: f64 = 0.1;

/// The number of steps when epochs are not given.
pub(super) fn steps_given(settings: &Settings) -> u64 {
    settings.steps.map_or(STEPS_DEFAULT, Into::into)
}

/// The number of steps: as given, or as many as the epochs take.
pub(super) fn steps(settings: &Settings, rows_per_epoch: u64, rows_per_step: u64) -> u64 {
    let Some(epochs) = settings.epochs else { return steps_given(settings) };
    // Round to whole rows first: 3 epochs of 5 rows must be 15 rows whatever the floating-point
    // error.
    let rows = (epochs * rows_per_epoch as f64).ceil() as u64;
    rows.div_ceil(rows_per_step.max(1)).max(1)
}

/// Chooses a default peak learning rate if none is given, and prints it.
pub(super) fn choose_rate(given: &mut Given, model: &Model, style: Style) {
    if given.learning_rate.is_some() {
        return;
    }
    let has_weights = model.weights.as_ref().is_some_and(|weights| weights.language().is_some());
    let (rate, why) = match (has_weights, given.lora.is_some()) {
        (true, true) => (ADAPTER_RATE, "the default for adapters"),
        (true, false) => (FURTHER_RATE, "the default to train the weights of a model further"),
        (false, _) => (FRESH_RATE, "the default for fresh weights"),
    };
    given.learning_rate = Some(rate);
    style.say(&format!("learning rate {rate:e}, {why}; --learning-rate sets another"));
}

/// The learning-rate schedule.
pub(super) fn of(settings: &Settings, steps: u64) -> Result<Schedule> {
    let Settings { learning_rate, final_learning_rate, warmup, cooldown, cooldown_shape, .. } =
        settings;
    let highest = learning_rate.unwrap_or(FRESH_RATE);
    let last = final_learning_rate.unwrap_or(FINAL_SHARE * highest);
    let decay = match settings.schedule {
        ScheduleArg::Constant => Decay::Constant,
        ScheduleArg::Linear => Decay::Linear,
        ScheduleArg::Cosine => Decay::Cosine,
        ScheduleArg::Wsd => cooldown_shape.unwrap_or(CooldownShapeArg::OneMinusSqrt).into(),
    };
    let schedule = Schedule::new(highest, last, *warmup, steps, decay)?;
    if settings.schedule == ScheduleArg::Wsd {
        return Ok(schedule.with_cooldown(cooldown.unwrap_or(COOLDOWN_DEFAULT).of(steps))?);
    }
    let useless = [("cooldown", cooldown.is_some()), ("cooldown-shape", cooldown_shape.is_some())];
    match useless.iter().find(|(_, is_given)| *is_given) {
        Some((key, _)) => Err(UsageError(format!(
            "{key} is for schedule = \"wsd\"; set that, or leave {key} out"
        ))
        .into()),
        None => Ok(schedule),
    }
}

/// What is given and changes nothing. Earlier versions accepted it in silence, so that runs exist with it.
pub(super) fn warning(settings: &Settings) -> Option<String> {
    let last = settings.final_learning_rate?;
    (settings.schedule == ScheduleArg::Constant).then(|| {
        format!(
            "warning: final-learning-rate {last:e} has no effect with schedule = \"constant\"; for a rate that falls, \
             set schedule = \"linear\", \"cosine\" or \"wsd\""
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::options::Given;
    use super::*;

    fn settings(given: Given) -> Settings {
        given.resolve()
    }

    #[test]
    fn a_final_rate_without_a_fall_is_told() {
        let told = |schedule, last| {
            let given =
                Given { schedule: Some(schedule), final_learning_rate: last, ..Given::default() };
            warning(&settings(given))
        };
        let warning = told(ScheduleArg::Constant, Some(1e-5)).expect("a warning");
        assert!(warning.contains("final-learning-rate 1e-5 has no effect"), "{warning}");
        assert_eq!(told(ScheduleArg::Constant, None), None);
        assert_eq!(told(ScheduleArg::Cosine, Some(1e-5)), None);
    }

    #[test]
    fn epochs_are_rounded_up_to_whole_steps() {
        let of = |epochs: f64, rows, per_step| {
            steps(&settings(Given { epochs: Some(epochs), ..Given::default() }), rows, per_step)
        };
        assert_eq!([of(1.0, 10, 5), of(1.0, 11, 5), of(3.0, 5, 5), of(0.1, 10, 5)], [2, 3, 3, 1]);
        assert_eq!(of(1e-9, 10, 5), 1);
        assert_eq!(steps(&settings(Given::default()), 10, 5), STEPS_DEFAULT);
    }

    #[test]
    fn a_cooldown_is_a_share_or_a_number_of_steps() {
        let rates = |cooldown: &str| -> Vec<f32> {
            let given = Given {
                learning_rate: Some(1.0),
                final_learning_rate: Some(0.0),
                schedule: Some(ScheduleArg::Wsd),
                cooldown: Some(cooldown.parse().expect("a span")),
                cooldown_shape: Some(CooldownShapeArg::Linear),
                ..Given::default()
            };
            let schedule = of(&settings(given), 10).expect("a schedule");
            (0..10).map(|step| schedule.rate(step)).collect()
        };
        assert_eq!(rates("0.2"), rates("2"));
        assert_eq!(rates("2")[7..], [1.0, 0.5, 0.0]);
        for text in ["-1", "1.5", "nan", "inf", "x", "1e300"] {
            text.parse::<Span>().expect_err("no span");
        }
        let without = Given { cooldown: Some(Span::Steps(3)), ..Given::default() };
        let error = of(&settings(without), 10).expect_err("it would do nothing").to_string();
        assert!(error.contains("wsd"), "{error}");
    }
}
