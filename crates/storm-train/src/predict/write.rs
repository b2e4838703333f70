//! Writes θ + τ·d, weight by weight and piece by piece.

use super::copies::{Copies, PIECE_ELEMENTS, Weight};
use super::direction::Course;
use super::jump::{Piece, fill};
use crate::{TrainError, Trainer};
use storm_device::PlanDevice;

/// Where weights are written to.
pub(super) trait Destination {
    /// Elements of a weight to write at once, given its number.
    fn piece_elements(&self, number: usize) -> usize;

    /// Writes a piece of a weight that starts at element `first`, and of its master if it has one.
    fn write(
        &mut self,
        number: usize,
        weight: &Weight,
        first: usize,
        parameter: &[u8],
        master: &[u8],
    ) -> Result<(), TrainError>;
}

impl<D: PlanDevice> Destination for Trainer<D> {
    fn piece_elements(&self, _: usize) -> usize {
        PIECE_ELEMENTS
    }

    fn write(
        &mut self,
        _: usize,
        weight: &Weight,
        first: usize,
        parameter: &[u8],
        master: &[u8],
    ) -> Result<(), TrainError> {
        let form = weight.form;
        self.write_state(&weight.parameter, first * form.parameter_bytes(), parameter)?;
        match master.is_empty() {
            true => Ok(()),
            false => self.write_state(&weight.master(), first * form.master_bytes(), master),
        }
    }
}

/// The copy that has θ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Before the first jump.
    Undo,
    /// Outside of predictions, while this copy is not needed.
    Reference,
}

/// What is written.
pub(super) struct Jumped<'a> {
    pub(super) origin: Origin,
    /// The direction of each weight.
    pub(super) courses: &'a [Course],
    pub(super) tau: f32,
    /// The τ that was written before.
    pub(super) before: f32,
    /// For random words.
    pub(super) seed: u64,
    pub(super) updates: u32,
}

impl<'a> Jumped<'a> {
    /// The jump from θ of a copy in a run's current state.
    pub(super) fn new<D: PlanDevice>(
        trainer: &Trainer<D>,
        origin: Origin,
        courses: &'a [Course],
        tau: f32,
        before: f32,
    ) -> Jumped<'a> {
        let (seed, updates) = (trainer.options().seed, trainer.updates());
        Jumped { origin, courses, tau, before, seed, updates }
    }
}

/// Buffers for a piece of a parameter and of its master.
#[derive(Default)]
pub(super) struct Work {
    pub(super) parameter: Vec<u8>,
    master: Vec<u8>,
}

impl Work {
    /// Writes the weights of the reference copy to the trainer.
    pub(super) fn write_back<D: PlanDevice>(
        &mut self,
        copies: &Copies,
        trainer: &mut Trainer<D>,
    ) -> Result<(), TrainError> {
        let nowhere = copies.nowhere();
        let unmoved = Jumped::new(trainer, Origin::Reference, &nowhere, 0.0, 0.0);
        self.write(copies, &unmoved, trainer).map(drop)
    }

    /// Writes all weights. Returns the norm of the change of the stored weights since the last τ.
    pub(super) fn write(
        &mut self,
        copies: &Copies,
        jumped: &Jumped<'_>,
        to: &mut impl Destination,
    ) -> Result<f64, TrainError> {
        let Work { parameter, master } = self;
        let &Jumped { origin, courses, tau, before, seed, updates } = jumped;
        let mut moved = 0.0;
        for (number, (weight, course)) in copies.weights.iter().zip(courses).enumerate() {
            let (base, reference) = (copies.base(origin, number), copies.reference.bytes(number));
            let state = copies.state.as_ref().map(|state| state.bytes(number));
            let form = weight.form;
            let size = form.copied_bytes();
            let elements = base.len() / size;
            let together = to.piece_elements(number);
            for first in (0..elements).step_by(together) {
                let end = elements.min(first + together);
                parameter.resize((end - first) * form.parameter_bytes(), 0);
                master.resize((end - first) * form.master_bytes(), 0);
                let piece = Piece {
                    form,
                    base: &base[first * size..end * size],
                    reference: &reference[first * size..end * size],
                    state: state.map(|state| &state[4 * first..4 * end]),
                    words: weight.words(seed, updates),
                    first_element: first,
                };
                moved += fill(&piece, course, tau, before, parameter, master);
                to.write(number, weight, first, parameter, master)?;
            }
        }
        Ok(moved.sqrt())
    }
}
