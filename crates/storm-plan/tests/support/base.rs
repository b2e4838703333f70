//! One small plan that is safe, and ways to damage it.

use super::small::{Kernel, copy, empty, input, kernel, lasting, result, segment, value};
use super::tight_budget;
use storm_graph::{TensorClass, Training};
use storm_plan::{
    Actor, CheckError, Compute, Copy, InstructionId, Link, Plan, Tier, ValueId, Work, verify,
};

pub(crate) const X: ValueId = ValueId(0);
pub(crate) const W: ValueId = ValueId(1);
pub(crate) const Y: ValueId = ValueId(2);

/// Instructions of [`base`].
pub(crate) const BRING_X: usize = 0;
pub(crate) const BRING_W: usize = 1;
pub(crate) const ADD: usize = 2;
pub(crate) const TAKE_Y: usize = 3;

/// A micro-batch `x` and a weight `w` come in, their sum `y` goes out; twice.
pub(crate) fn base() -> Plan {
    let mut plan = empty(3, 3);
    value(&mut plan, "x", TensorClass::Input);
    value(&mut plan, "w", TensorClass::Parameter(Training::Trainable));
    value(&mut plan, "y", TensorClass::Activation);
    let add = InstructionId(ADD as u32);
    let bring_x = copy(&mut plan, Link::HOST_TO_DEVICE, 0, 0, &[X], &[add]);
    let bring_w = copy(&mut plan, Link::HOST_TO_DEVICE, 1, 1, &[W], &[]);
    kernel(&mut plan, Kernel::Add, &[(X, 0), (W, 1)], &[(Y, 2)], &[bring_w]);
    let take_y = copy(&mut plan, Link::DEVICE_TO_HOST, 2, 2, &[Y], &[add]);
    segment(&mut plan, "body", 2);
    lasting(&mut plan, W, &[(Tier::HOST, 1)]);
    input(&mut plan, X, 0, &[bring_x]);
    result(&mut plan, Y, 2, &[take_y]);
    plan
}

pub(crate) fn refused(plan: &Plan) -> CheckError {
    verify(plan, tight_budget(plan)).expect_err("the plan has a problem")
}

/// The error of [`base`] with some damage.
pub(crate) fn damaged(damage: impl FnOnce(&mut Plan)) -> CheckError {
    let mut plan = base();
    damage(&mut plan);
    refused(&plan)
}

pub(crate) fn compute(plan: &mut Plan) -> &mut Compute {
    match &mut plan.instructions[ADD].work {
        Work::Compute(compute) => compute,
        _ => unreachable!("it is a kernel"),
    }
}

pub(crate) fn copy_of(plan: &mut Plan, index: usize) -> &mut Copy {
    match &mut plan.instructions[index].work {
        Work::Copy(copy) => copy,
        _ => unreachable!("it is a copy"),
    }
}

pub(crate) fn is(actor: &Actor, index: usize) -> bool {
    matches!(actor, Actor::Instruction { id, .. } if id.index() == index)
}
