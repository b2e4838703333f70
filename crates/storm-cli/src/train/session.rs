//! Runs the training on a device, from the plan to the report.

use super::data;
use super::device::{DeviceKind, Trains};
use super::folder::{self, Start};
use super::forecast::Forecast;
use super::output::{self, Style, print};
use super::progress::Progress;
use super::sample::{self, SampleOptions};
use super::setup::{Setup, TestRows};
use super::values::OptimizerArg;
use super::{disk_failure, launch, pictures, report, saving, signals, summary};
use crate::loading::Loading;
use crate::predict::PredictArg;
use crate::tuning::NO_TUNING;
use crate::{progress, size};
use anyhow::{Context, Result};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use storm_device::PlanDevice;
use storm_device::cpu::CpuPlanDevice;
use storm_device::cuda::CudaPlanDevice;
use storm_model::{AdapterDirectory, IfExists, SaveOptions, WeightDtype};
use storm_plan::{Idle, Tier};
use storm_train::{
    Event, Finished, Guard, History, Measure, MetricsFile, OnAlarm, Pictures, Precision,
    ProbeDevice, Recorder, Run, Sink, Stop, StopReason, TensorBoardFile, Tested, Trainer,
    prediction_seconds,
};

/// How often the guard checks device memory.
const GUARD_INTERVAL: Duration = Duration::from_millis(500);

pub(super) fn run(mut setup: Setup) -> Result<()> {
    setup.style.say(&setup.shown()?);
    let done = match setup.machine_kind {
        DeviceKind::Cpu => run_on::<CpuPlanDevice>(&mut setup),
        DeviceKind::Cuda => run_on::<CudaPlanDevice>(&mut setup),
    };
    done.map_err(|error| disk_failure::explained(&setup, error))
}

fn run_on<D: Trains>(setup: &mut Setup) -> Result<()> {
    let trainer =
        launch::first::<D>(setup).with_context(|| format!("cannot train {}", setup.model.name))?;
    let forecast = Forecast::new(setup)?;
    if let Some(forecast) = &forecast {
        setup.style.say(&format!("data         {}", forecast.predicted()));
    }
    setup.tell_ranks()?;
    // With several ranks the plan cannot change during the run.
    let on_alarm = if setup.crew.is_some() { OnAlarm::GoOn } else { OnAlarm::Stop };
    let mut run = begin(setup, trainer, on_alarm)?;

    let mut progress = Progress::new(setup);
    let mut measure = Measure::default();
    let mut history = History::new();
    let metrics_path = setup.folder.join("metrics.jsonl");
    if setup.start == Start::Resume {
        let resumed = run.resume(&mut Recorder::new(&mut measure, vec![&mut progress]))?;
        match resumed {
            Some(step) => setup.style.say(&format!("\nresuming after step {step}")),
            None => setup.style.say("\nno checkpoint yet: starting at step 1"),
        }
    }
    setup.write_down()?;
    saving::begin(setup, &mut run)?;
    let step = run.progress().step;
    let mut metrics = MetricsFile::open(&metrics_path, step, &mut history)?;
    let mut events = TensorBoardFile::create(&setup.folder.join("tensorboard"), step)?;
    let stop = Stop::new();
    signals::listen(&stop)?;
    setup.style.say("");
    let finished = loop {
        let sinks: Vec<&mut dyn Sink> =
            vec![&mut history, &mut metrics, &mut events, &mut progress];
        let mut recorder = Recorder::new(&mut measure, sinks);
        let finished = run.train(&stop, &mut recorder)?;
        let StopReason::MemoryShort(alarm) = finished.reason else { break finished };
        let (trainer, on_alarm) = launch::within_less(setup, run.into_trainer(), alarm)?;
        run = begin(setup, trainer, on_alarm)?;
        run.resume(&mut recorder)?.context("the checkpoint that was just saved is gone")?;
        saving::begin(setup, &mut run)?;
        progress.set_device_budget(setup.launch.budget()[Tier::DEVICE]);
    };
    let data: Vec<(&str, String)> = match (&forecast, run.loading()?) {
        (Some(forecast), Some(loading)) => vec![
            ("data predicted", forecast.predicted()),
            ("data measured", forecast.measured(&loading, progress.part())),
        ],
        _ => Vec::new(),
    };
    let host_bytes = run.trainer().memory_taken()[Tier::HOST] as u64;
    let setup = &*setup;
    let settings = &setup.settings;

    if measure.trace().is_none() && finished.reason != StopReason::Requested {
        // An earlier process made all steps but stopped before its report, so trace one rehearsal step for it.
        run.rehearse()?;
        measure.look(run.trainer())?;
    }
    let plan = Arc::clone(run.trainer().plan());
    // Write the report first, so that it exists even if saving the model fails.
    let mut page =
        report::Page { pictures: Pictures::None, plan: &plan, measure: &measure, data: &data };
    let report = page.write(setup, &history, progress.part())?;
    let what = if setup.model.config.adapters().is_some() { "adapter" } else { "model" };
    let model = setup.folder.join(what);
    save_model(setup, &mut run, &model)?;
    // After the model is saved, so that a test that fails does not cost it, and before the weights of the best one
    // replace these.
    let tested = match finished.reason {
        StopReason::Requested => Ok(false),
        _ => {
            let before = history.test();
            let sinks: Vec<&mut dyn Sink> =
                vec![&mut history, &mut metrics, &mut events, &mut progress];
            let mut unused = Measure::default();
            test(setup, &mut run, before, &mut Recorder::new(&mut unused, sinks))
        }
    };
    let tested = tested.context("the run was not tested; its model was saved");
    let tested = tested.and_then(|is_new| match is_new {
        true => page.write(setup, &history, progress.part()).map(drop),
        false => Ok(()),
    });
    let best = setup.folder.join(format!("{what}-best"));
    let best_model = save_best(setup, &mut run, &finished, &best);
    drop(run);
    if setup.style == Style::People {
        print("");
        summary::lines(setup, progress.part(), host_bytes).iter().for_each(|line| print(line));
        data.iter().for_each(|(what, words)| print(&format!("{what}: {words}")));
    }
    if finished.reason != StopReason::Requested
        && let Some(text) = sample(setup, &model)?
    {
        let (step, prompt) = (finished.step, settings.sample_prompt.as_str());
        let sampled = Event::Sampled { step, prompt, text: &text };
        let sinks: [&mut dyn Sink; 3] = [&mut history, &mut metrics, &mut progress];
        sinks.into_iter().try_for_each(|sink| sink.event(&sampled))?;
        page.write(setup, &history, progress.part())?;
    }
    if finished.reason != StopReason::Requested {
        page.pictures = pictures::look(setup, &model, finished.step, &history)?;
        if let Pictures::Shown(_) = page.pictures {
            page.write(setup, &history, progress.part())?;
        }
    }
    if setup.style != Style::Json {
        print(&format!("\n{what:<12} {}", model.display()));
        if let Ok(true) = best_model {
            print(&format!("{:<12} {}", format!("best {what}"), best.display()));
        }
        print(&format!("checkpoint   {}", finished.checkpoint.display()));
        print(&format!("metrics      {}", metrics_path.display()));
        if let Some(report) = report {
            print(&format!("report       {}", report.display()));
        }
        if finished.reason == StopReason::Requested {
            print(&format!("resume       {}", output::resume_command(&setup.folder)));
        }
    }
    let best_model = best_model.map(drop).with_context(|| {
        format!("{} was not written; everything else of the run was", best.display())
    });
    if let (Err(test), Err(_)) = (&tested, &best_model) {
        eprintln!("{test:#}");
    }
    best_model.and(tested)
}

/// Creates the run, from its initial weights.
fn begin<D: Trains>(
    setup: &mut Setup,
    mut trainer: Trainer<D>,
    on_alarm: OnAlarm,
) -> Result<Run<D>> {
    // Connect to the other ranks before loading weights: they load them, too.
    if let Some(crew) = &setup.crew {
        trainer.lead(crew.ranks.clone())?;
    }
    if let Some(weights) = &setup.model.weights {
        let dtype = trainer.options().precision.compute();
        trainer.load(&Loading::new(weights, &setup.model.config, dtype))?;
        progress::show("");
    }
    if let Some(adapter) = &setup.settings.adapter {
        let adapter = AdapterDirectory::open(adapter)?;
        trainer.load_adapters(&adapter)?;
    }
    measure_cost(setup, &mut trainer)?;
    let plan = setup.launch.plan();
    let (train, held_out) = setup.data.sources(&setup.settings, plan.batch)?;
    let options = setup.run_options(trainer.device().identity())?;
    let checkpoints = folder::checkpoints(&setup.folder)?;
    let mut run = Run::new(trainer, train, held_out, checkpoints, options)?;
    if let Some((predict, held_out)) = setup.prediction()? {
        let rows = held_out.len() * plan.batch;
        let direction = predict.direction.name();
        let bytes = run.predict(predict, held_out, probe_device::<D>(setup))?;
        let judged = match rows {
            0 => "every jump stays".to_owned(),
            rows => format!("{rows} held-out rows for jumps and corrections"),
        };
        setup.style.say(&format!(
            "predictions  direction {direction}; {} of host memory; {judged}",
            size::show(bytes)
        ));
        let observes = setup.settings.predict.as_ref().is_some_and(PredictArg::observes_updates);
        if observes && setup.settings.optimizer == OptimizerArg::Sgd {
            setup.style.say("             the controller sees no cosines or ratios of updates with optimizer = \"sgd\"");
        }
    }
    if let Some(viewer) = pictures::viewer(setup)? {
        run.view(viewer);
    }
    let planned_bytes = plan.planned.prediction.peak_bytes[Tier::DEVICE];
    let budget_bytes = setup.launch.budget()[Tier::DEVICE];
    run.watch(Guard::new(planned_bytes, budget_bytes, GUARD_INTERVAL), on_alarm);
    Ok(run)
}

/// Measures the loss on the test rows, if the options ask for it and it is not the last result of a test again. Returns
/// whether it did.
fn test<D: Trains>(
    setup: &Setup,
    run: &mut Run<D>,
    last: Option<Tested>,
    recorder: &mut Recorder<'_>,
) -> Result<bool> {
    let Some(TestRows { mut source, rows }) = setup.test()? else { return Ok(false) };
    let (step, ends) = (run.progress().step, [rows.start, rows.end]);
    if last.is_some_and(|last| (last.step, last.rows) == (step, ends)) {
        return Ok(false);
    }
    run.test(&mut *source, rows, recorder)?;
    Ok(true)
}

/// The device that losses of predictions are measured on, if it is not that of the run.
fn probe_device<D: Trains>(setup: &Setup) -> Option<ProbeDevice<D>> {
    let idle = setup.settings.predict.as_ref()?.releases()?;
    (idle == Idle::WithParameters).then(|| {
        let budget = setup.launch.budget();
        let options = D::options(setup.cpu, budget, None, NO_TUNING, None, None);
        ProbeDevice {
            profile: setup.launch.profile().clone(),
            options: D::probing(options),
            // On the CPU, it takes nothing but its plan.
            budget_bytes: match setup.machine_kind {
                DeviceKind::Cuda => budget[Tier::DEVICE],
                DeviceKind::Cpu => u64::MAX,
            },
        }
    })
}

/// Measures what a prediction costs, if the options ask for it. The config of the run then has the
/// number, so that a resumed run makes the same choices.
fn measure_cost<D: Trains>(setup: &mut Setup, trainer: &mut Trainer<D>) -> Result<()> {
    if !setup.settings.predict.as_ref().is_some_and(PredictArg::measures_cost) {
        return Ok(());
    }
    let Some((predict, held_out)) = setup.prediction()? else { return Ok(()) };
    let device = probe_device::<D>(setup);
    let seconds = prediction_seconds(trainer, predict, setup.steps, held_out, device)?;
    let step_seconds = setup.launch.plan().predicted_seconds();
    // Three digits are more than such a measurement is worth.
    let steps: f64 = format!("{:.2e}", seconds / step_seconds).parse()?;
    setup.settle_cost(steps);
    setup.style.say(&format!(
        "predictions  one takes {seconds:.3} s, measured, as long as {steps} steps of {step_seconds:.3} s; recorded as \
         cost = {steps}"
    ));
    if setup.style == Style::Json {
        let event = "prediction_cost";
        let line = json!({
            "event": event, "seconds": seconds, "step_seconds": step_seconds, "steps": steps,
        });
        print(&line.to_string());
    }
    Ok(())
}

/// Saves the model of the best evaluation, unless that is the last one. Returns whether it did.
fn save_best<D: PlanDevice>(
    setup: &Setup,
    run: &mut Run<D>,
    finished: &Finished,
    output: &Path,
) -> Result<bool> {
    if finished.best.is_some_and(|best| best.step != finished.step) && run.take_best()? {
        save_model(setup, run, output)?;
        return Ok(true);
    }
    if output.exists() {
        // Left by an earlier process; it is no longer the best.
        std::fs::remove_dir_all(output)
            .with_context(|| format!("cannot delete {}", output.display()))?;
    }
    Ok(false)
}

/// Saves the model in its export format.
fn save_model<D: PlanDevice>(setup: &Setup, run: &mut Run<D>, output: &Path) -> Result<()> {
    if setup.model.config.adapters().is_some() {
        let base = setup.model.base();
        return Ok(run.trainer().save_adapters(output, Some(&base), IfExists::Replace)?);
    }
    let source = setup.model.source();
    let dtype = match setup.request.options.precision {
        Precision::F32 => WeightDtype::F32,
        Precision::Bf16Master | Precision::Bf16Stochastic | Precision::Fp8 => WeightDtype::Bf16,
    };
    let options = SaveOptions {
        dtype: setup.model.config.saved_dtype(dtype),
        source: source.as_deref(),
        if_exists: IfExists::Replace,
        ..SaveOptions::default()
    };
    Ok(run.trainer().save(output, &options)?)
}

/// Generates text with the saved model, if a sample is requested.
fn sample(setup: &Setup, model: &Path) -> Result<Option<String>> {
    let settings = &setup.settings;
    if settings.sample_tokens == 0 {
        return Ok(None);
    }
    let Some(dataset) = setup.data.tokens() else { return Ok(None) };
    let tokenizer = data::tokenizer(dataset)?;
    let options = SampleOptions {
        prompt: &settings.sample_prompt,
        tokens: settings.sample_tokens,
        temperature: settings.temperature,
        seed: settings.seed.0,
        sequence: settings.seq.get(),
    };
    Ok(Some(sample::write(model, &tokenizer, &options)?))
}
