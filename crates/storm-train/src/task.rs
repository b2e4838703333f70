//! A training step as what the planner takes.

use crate::input_rules::InputRules;
use crate::optimizer;
use crate::reference::check_moments;
use crate::{TrainError, TrainOptions};
use storm_graph::{Accumulation, ParameterInstance, Program, Training};
use storm_model::AnyModel;
use storm_plan::{RankPlace, Task, TrainingGraphs, UpdateRule};

/// Micro-batches that a step may have. What a step moves and computes is a sum over all of them, which must not
/// overflow.
pub const MICRO_BATCHES_MAX: usize = 1 << 20;

/// The step that these options describe, over `micro_batches` micro-batches, before any decision
/// about memory.
///
/// # Errors
/// The model is not valid for these sizes.
pub fn training_task(
    model: impl Into<AnyModel>,
    options: &TrainOptions,
    micro_batches: usize,
) -> Result<Task, TrainError> {
    let program = model.into().build(&options.build_options())?;
    task_of_program(&program, options, micro_batches)
}

/// One rank's part of a step of `micro_batches` that several ranks share.
///
/// # Errors
/// As [`training_task`]; or the ranks cannot share the lanes evenly.
pub fn rank_task(
    model: impl Into<AnyModel>,
    options: &TrainOptions,
    micro_batches: usize,
    rank: RankPlace,
) -> Result<Task, TrainError> {
    check_lanes(options, micro_batches)?;
    let (lanes, ranks) = (options.lanes, rank.ranks.max(1) as usize);
    if !lanes.count().is_multiple_of(ranks) {
        let problem = format!("{ranks} ranks cannot share {} lanes evenly", lanes.count());
        return Err(TrainError::Option { option: "lanes", problem });
    }
    let own = TrainOptions { lanes: (lanes.count() / ranks).into(), ..options.clone() };
    let task = training_task(model, &own, micro_batches / ranks)?;
    Ok(Task { rank, lane_groups: lanes.groups(), ..task })
}

/// [`training_task`] of a program that the caller has built.
///
/// # Errors
/// The program cannot be differentiated.
pub fn task_of_program(
    program: &Program,
    options: &TrainOptions,
    micro_batches: usize,
) -> Result<Task, TrainError> {
    if micro_batches > MICRO_BATCHES_MAX {
        let problem = format!(
            "{micro_batches} micro-batches are too many for a step: at most {MICRO_BATCHES_MAX}"
        );
        return Err(TrainError::Option { option: "accumulate", problem });
    }
    check_lanes(options, micro_batches)?;
    let precision = options.precision;
    let parameters = program.parameters();
    let instances = program.parameter_instances();
    check_moments(options, &instances)?;
    let mut updates = Vec::new();
    for parameter in parameters.into_iter().filter(|p| p.training == Training::Trainable) {
        // Named without a block: one rule for all of them.
        let template = ParameterInstance {
            name: parameter.name.clone(),
            index: 0,
            parameter: parameter.clone(),
        };
        let graph = optimizer::update_graph(&template, precision, &options.optimizer)?;
        updates.push(UpdateRule { parameter, graph });
    }
    let differentiated = |accumulation| {
        let codec = options.activation_codec;
        program.differentiate_with_codec(accumulation, precision.gradients(), codec)
    };
    let training = TrainingGraphs {
        start: differentiated(Accumulation::Start)?,
        proceed: differentiated(Accumulation::Continue)?,
        norm: optimizer::norm_graph(&instances, precision, &options.optimizer)?,
        updates,
    };
    let data = InputRules::of_program(program).data_inputs(&training.proceed);
    Ok(Task {
        forward: program.clone(),
        training: Some(training),
        micro_batches,
        lanes: options.lanes.count(),
        lane_groups: options.lanes.groups(),
        rank: RankPlace::default(),
        data,
    })
}

/// Whether the micro-batches of a step can be divided into lanes.
pub(crate) fn check_lanes(options: &TrainOptions, micro_batches: usize) -> Result<(), TrainError> {
    let lanes = options.lanes.count();
    if lanes > 0 && micro_batches.is_multiple_of(lanes) {
        return Ok(());
    }
    let problem = match lanes {
        0 => "must be at least 1".to_owned(),
        _ => format!(
            "must divide a step evenly: {lanes} do not divide its {micro_batches} micro-batches"
        ),
    };
    Err(TrainError::Option { option: "lanes", problem })
}
