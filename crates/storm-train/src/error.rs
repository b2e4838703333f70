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
    /// A loaded parameter has a non-finite value.
    #[error(
        "the parameter `{parameter}` has {value} at element {element}: these weights are damaged, or their \
         training diverged; use an earlier checkpoint"
    )]
    NonFiniteParameter {
        /// Its name.
        parameter: String,
        /// NaN or infinite.
        value: f32,
        /// Its index.
        element: usize,
    },
    /// A model with finite parameters computed a non-finite result.
    #[error(
        "the {what} of the model is {value}, although all of its parameters are finite: an activation \
         overflowed; f32 reaches further than bf16"
    )]
    NonFiniteResult {
        /// The result.
        what: &'static str,
        /// NaN or infinite.
        value: f32,
    },
    /// The update of a step with non-finite gradients was already partly applied.
    #[error(
        "the gradient norm was {norm}, and parts of the update are applied: updates in the backward pass cannot be cancelled; go on from \
         the last checkpoint"
    )]
    PartlyUpdated {
        /// NaN or infinite.
        norm: f32,
    },
    /// The memory of parameters was released, and not all of them were written since.
    #[error(
        "the memory of `{parameter}` was released, and it was not written since; write all parameters before anything else"
    )]
    Released {
        /// The first such parameter.
        parameter: String,
    },
    /// From communication between ranks.
    #[error(transparent)]
    Ranks(#[from] RankError),
    /// A batch does not fit the program.
    #[error("batch: {problem}")]
    Batch {
        /// What is wrong, and what was expected.
        problem: String,
    },
    /// An option is invalid.
    #[error("{option}: {problem}")]
    Option {
        /// Its name.
        option: &'static str,
        /// What is wrong, and what was expected.
        problem: String,
    },
}
