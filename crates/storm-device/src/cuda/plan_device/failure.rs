//! Finds the instruction that caused an error of the card.

use super::super::CudaError;
use super::queues::{Queues, Unfinished};
use crate::DeviceError;
use crate::placed::tensor_name;
use storm_plan::{InstructionId, Plan, Queue};

/// The error for an instruction that the driver refused, or that failed while the host waited for
/// it.
pub(super) fn of_instruction(plan: &Plan, id: InstructionId, error: &DeviceError) -> DeviceError {
    let reason = match error {
        DeviceError::Cuda(CudaError::Driver { what, code }) => format!("{what}: {code:?}"),
        error => error.to_string(),
    };
    DeviceError::instruction(plan, id, reason)
}

/// The error for something that failed after it was issued. The driver does not say what failed:
/// only that it lies between the last instruction known to be done and the last one issued.
/// Kernels are suspected first, since copies between valid memory do not fail.
pub(super) fn of_something(plan: &Plan, queues: &Queues, error: CudaError) -> DeviceError {
    let unfinished = |queue: Queue| queues.unfinished(queue).map(|unfinished| (queue, unfinished));
    let mut on_card = plan.queues().filter(|&queue| !plan.links.is_of_host(queue));
    let Some((queue, suspects)) = on_card.find_map(unfinished) else {
        return error.into();
    };
    let reason = match &error {
        CudaError::Driver { code, .. } => format!("{code:?}"),
        error => error.to_string(),
    };
    let Unfinished { after, last, count } = suspects;
    if count == 1 {
        return DeviceError::instruction(plan, last, reason);
    }
    let after = match after {
        Some(after) => format!("after {}", plan.describe(after)),
        None => "from the first on".to_owned(),
    };
    DeviceError::Instruction {
        instruction: format!("one of {count} instructions {after}, the last of them {},", {
            plan.describe(last)
        }),
        queue: plan.links.queue_name(queue),
        tensor: tensor_name(plan, &plan.instruction(last).work),
        reason: format!("{reason}; run again with STORM_CUDA_SYNC=1 to find which"),
    }
}
