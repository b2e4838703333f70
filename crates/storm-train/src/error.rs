use crate::CheckpointError;
use storm_exec::ExecError;
use storm_graph::GraphError;
use storm_model::ModelError;
use storm_plan::PlanError;
use storm_ranks::RankError;

/// Why training could not be set up or a step could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// From the graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// From the executor or the device.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// From the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// From the planner.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// From a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A parameter that was read has a value that is no number.
    #[error(
        "the parameter `{parameter}` has {value} at element {element}: these weights are damaged, or their \
         training diverged; use an earlier checkpoint"
    )]
    NonFiniteParameter {
        /// Its name.
        parameter: String,
        /// NaN or infinite.
        value: f32,
        /// Where it is.
        element: usize,
    },
    /// A model of finite parameters makes something that is no number.
    #[error(
        "the {what} of the model is {value}, although all of its parameters are finite: an activation \
         overflowed; f32 reaches further than bf16"
    )]
    NonFiniteResult {
        /// What it makes.
        what: &'static str,
        /// NaN or infinite.
        value: f32,
    },
    /// What is left of a step whose gradients were not finite and were applied nevertheless.
    #[error(
        "the gradient norm was {norm}, and parts of the update are applied: updates in the backward pass cannot be cancelled; go on from \
         the last checkpoint"
    )]
    PartlyUpdated {
        /// NaN or infinite.
        norm: f32,
    },
    /// Between ranks.
    #[error(transparent)]
    Ranks(#[from] RankError),
    /// A batch that does not fit the program.
    #[error("batch: {problem}")]
    Batch {
        /// What is wrong, and what was expected.
        problem: String,
    },
    /// An option that makes no sense.
    #[error("{option}: {problem}")]
    Option {
        /// Which.
        option: &'static str,
        /// What is wrong, and what was expected.
        problem: String,
    },
}
