use crate::trace::StallCause;
use crate::trace::summary::largest_class;
use storm_graph::{Phase, TensorClass};
use storm_plan::{Compute, InstructionId, Plan, TensorKind, Work};

/// How a period of time was used; each kind has a color.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Forward,
    Backward,
    Recomputed,
    Optimizer,
    Weights,
    Gradients,
    OptimizerState,
    Activations,
    Inputs,
    /// The compute queue waits for a copy or for the host.
    Waiting,
    /// The compute queue is between two kernels.
    BetweenKernels,
}

/// Groups of kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Kernels,
    Copies,
    Idle,
}

impl Family {
    pub(super) const ALL: [Family; 3] = [Family::Kernels, Family::Copies, Family::Idle];

    pub(super) fn name(self) -> &'static str {
        match self {
            Family::Kernels => "kernels",
            Family::Copies => "copies",
            Family::Idle => "compute stands still",
        }
    }
}

impl Kind {
    pub(super) const ALL: [Kind; 11] = [
        Kind::Forward,
        Kind::Backward,
        Kind::Recomputed,
        Kind::Optimizer,
        Kind::Weights,
        Kind::Gradients,
        Kind::OptimizerState,
        Kind::Activations,
        Kind::Inputs,
        Kind::Waiting,
        Kind::BetweenKernels,
    ];

    /// Position in [`Kind::ALL`].
    pub(super) fn index(self) -> usize {
        self as usize
    }

    pub(super) fn family(self) -> Family {
        match self {
            Kind::Forward | Kind::Backward | Kind::Recomputed | Kind::Optimizer => Family::Kernels,
            Kind::Waiting | Kind::BetweenKernels => Family::Idle,
            _ => Family::Copies,
        }
    }

    /// Its color in the style sheet.
    pub(super) fn key(self) -> &'static str {
        match self {
            Kind::Forward => "forward",
            Kind::Backward => "backward",
            Kind::Recomputed => "recomputed",
            Kind::Optimizer => "optimizer",
            Kind::Weights => "weights",
            Kind::Gradients => "gradients",
            Kind::OptimizerState => "optimizer-state",
            Kind::Activations => "activations",
            Kind::Inputs => "inputs",
            Kind::Waiting => "waiting",
            Kind::BetweenKernels => "between-kernels",
        }
    }

    /// The name in the legend.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::OptimizerState => "optimizer state",
            Kind::Waiting => "waits for a copy or the host",
            Kind::BetweenKernels => "between kernels",
            other => other.key(),
        }
    }

    pub(super) fn of_instruction(plan: &Plan, id: InstructionId) -> Kind {
        match &plan.instruction(id).work {
            Work::Compute(compute) => Kind::of_kernel(plan, compute),
            Work::Fetch(_) | Work::ReadAhead(_) => Kind::Inputs,
            Work::Collective(collective) => match collective.moves {
                TensorKind::Weights => Kind::Weights,
                _ => Kind::Gradients,
            },
            Work::Copy(copy) => match largest_class(plan, copy) {
                TensorClass::Input => Kind::Inputs,
                TensorClass::Parameter(_) => Kind::Weights,
                TensorClass::Gradient => Kind::Gradients,
                TensorClass::OptimizerState => Kind::OptimizerState,
                TensorClass::Activation | TensorClass::Cache | TensorClass::Scratch => {
                    Kind::Activations
                }
            },
        }
    }

    fn of_kernel(plan: &Plan, compute: &Compute) -> Kind {
        let node = &plan.graphs[compute.graph.0 as usize].nodes()[compute.node as usize];
        match node.phase {
            _ if node.op.is_update() => Kind::Optimizer,
            Phase::Recompute => Kind::Recomputed,
            Phase::Forward => Kind::Forward,
            Phase::Backward => Kind::Backward,
        }
    }

    pub(super) fn of_stall(cause: StallCause) -> Kind {
        match cause {
            StallCause::Overhead => Kind::BetweenKernels,
            StallCause::Copy(..) | StallCause::Host | StallCause::Drain | StallCause::Data => {
                Kind::Waiting
            }
        }
    }
}
