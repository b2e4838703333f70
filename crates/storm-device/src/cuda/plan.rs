//! Translates a placed node into kernel launches and matrix products with addresses.

use super::compile::KernelSource;
use super::context::{Argument, Card, Joint, Launch};
use super::dispatch;
use super::gemm::{Gemm, GemmCall};
use super::modules::Kernels;
use crate::DeviceError;
use crate::placed::{PlacedNode, View};
use storm_graph::DType;

/// One operation for the card.
#[derive(Clone, Debug)]
pub(super) enum Action {
    Launch(Launch),
    Gemm(GemmCall),
}

/// Translates one node into actions.
pub(super) struct Planner<'a> {
    pub(super) node: &'a PlacedNode,
    kernels: &'a Kernels,
    gemm: &'a Gemm,
    /// Address of offset 0.
    base: u64,
    actions: Vec<Action>,
}

/// A kernel and its compile-time definitions.
#[derive(Clone, Debug)]
pub(super) struct KernelChoice<'a> {
    pub(super) source: KernelSource,
    pub(super) name: &'a str,
    /// `-D` definitions.
    pub(super) definitions: Vec<(&'static str, String)>,
    /// Dynamic shared memory.
    pub(super) shared_bytes: usize,
}

impl<'a> Planner<'a> {
    pub(super) fn plan(
        node: &'a PlacedNode,
        kernels: &'a Kernels,
        gemm: &'a Gemm,
        base: u64,
    ) -> Result<Vec<Action>, DeviceError> {
        let mut planner = Planner { node, kernels, gemm, base, actions: Vec::new() };
        dispatch::plan(&mut planner)?;
        Ok(planner.actions)
    }

    pub(super) fn address(&self, view: &View) -> u64 {
        self.base + view.offset as u64
    }

    pub(super) fn pointer(&self, view: &View) -> Argument {
        Argument::Pointer(self.address(view))
    }

    /// The address of an element of a tensor.
    pub(super) fn pointer_to(&self, view: &View, element: usize) -> Argument {
        Argument::Pointer(self.address(view) + (element * view.dtype.size_bytes()) as u64)
    }

    /// The address of an operand. Null if it is absent.
    pub(super) fn maybe(&self, view: &Option<View>) -> Argument {
        Argument::Pointer(view.as_ref().map_or(0, |view| self.address(view)))
    }

    pub(super) fn output(&self, index: usize) -> Argument {
        self.pointer(&self.node.outputs[index])
    }

    /// The card that the node will run on.
    pub(super) fn card(&self) -> &'a Card {
        self.kernels.card()
    }

    /// Adds a kernel launch.
    pub(super) fn launch(
        &mut self,
        choice: KernelChoice<'_>,
        grid: (u32, u32, u32),
        block: u32,
        arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        // The driver rejects an empty grid; here it means there is nothing to do.
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
            return Ok(());
        }
        let kernel = self.kernels.get(&choice)?;
        let shared_bytes = choice.shared_bytes as u32;
        let begins_early = false;
        self.actions.push(Action::Launch(Launch {
            kernel,
            grid,
            block,
            shared_bytes,
            arguments,
            begins_early,
            joint: None,
        }));
        Ok(())
    }

    /// Lets the last added kernel start before the previous one in the stream has ended. Its source
    /// must call `wait_for_kernels_before`.
    pub(super) fn let_begin_early(&mut self) {
        if let Some(Action::Launch(launch)) = self.actions.last_mut() {
            launch.begins_early = true;
        }
    }

    /// Lets the last added kernel be joined with others like it, into one launch of the kernel
    /// `choice`. `common` are the positions of the arguments that all of them have in common.
    pub(super) fn let_join(
        &mut self,
        choice: KernelChoice<'_>,
        common: &'static [usize],
    ) -> Result<(), DeviceError> {
        let kernel = self.kernels.get(&choice)?;
        if let Some(Action::Launch(launch)) = self.actions.last_mut() {
            launch.joint = Some(Joint { kernel, common });
        }
        Ok(())
    }

    /// Adds a matrix product.
    pub(super) fn gemm(&mut self, call: GemmCall) -> Result<(), DeviceError> {
        let call = self.gemm.prepare(call, self.kernels)?;
        self.actions.push(Action::Gemm(call));
        Ok(())
    }
}

/// The name of a storage type in kernel sources.
pub(super) fn type_name(dtype: DType) -> String {
    match dtype {
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::I32 => "int",
        DType::I8 => "signed char",
        DType::U8 => "unsigned char",
    }
    .to_owned()
}
