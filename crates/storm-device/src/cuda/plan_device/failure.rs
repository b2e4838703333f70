//! Who is to blame for an error of the card.

use super::super::CudaError;
use super::queues::{Queues, Unfinished};
use crate::DeviceError;
use crate::placed::tensor_name;
use storm_plan::{InstructionId, Plan, Queue};

/// The error for an instruction that the driver refused, or that failed and was waited for.
pub(super) fn of_instruction(plan: &Plan, id: InstructionId, error: &DeviceError) -> DeviceError {
    DeviceError::instruction(plan, id, reason(error))
}

/// The error for something that was given out and failed later, which the driver does not name: it is
/// between what was done when the queues were heard of last and what was given out. Kernels come
/// first: copies of memory that is there do not fail.
pub(super) fn of_something(plan: &Plan, queues: &Queues, error: &DeviceError) -> DeviceError {
    let unfinished = |queue: Queue| queues.unfinished(queue).map(|unfinished| (queue, unfinished));
    let mut all = Queue::ALL.into_iter().filter_map(unfinished);
    let Some((queue, suspects)) = all.next() else { return error.clone() };
    let mut reason = reason(error);
    for (queue, Unfinished { until, .. }) in all {
        let until = plan.describe(until);
        reason.push_str(&format!("; the {} queue was not done with {until}", queue.name()));
    }
    let Unfinished { after, until, count } = suspects;
    if count > 1 {
        reason.push_str("; run again with STORM_CUDA_SYNC=1 to find which");
    }
    DeviceError::Instruction {
        instruction: match after {
            _ if count == 1 => plan.describe(until),
            Some(after) => format!(
                "one of {count} instructions after {}, the last of them {},",
                plan.describe(after),
                plan.describe(until)
            ),
            None => {
                format!("one of the first {count} instructions, up to {},", plan.describe(until))
            }
        },
        queue: queue.name(),
        tensor: tensor_name(plan, &plan.instruction(until).work),
        reason,
    }
}

/// In the driver's words; what to do about it is said elsewhere.
fn reason(error: &DeviceError) -> String {
    match error {
        DeviceError::Cuda(CudaError::Driver { what, code }) => format!("{what}: {code:?}"),
        error => error.to_string(),
    }
}
