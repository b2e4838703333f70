//! Weights and optimizer state of all ranks, as the first one reads and writes them.

use super::orders::{Order, Part};
use super::{RankState, SENT_BYTES, out_of_step};
use crate::TrainError;
use crate::weights::{Reader, Writer};
use std::ops::Range;
use storm_device::{PlanDevice, Scalar, bytes_of, bytes_of_mut};
use storm_exec::Planned;
use storm_graph::Tensor;

/// The tensors of a plan that last; with ranks, those of the first one, and what others own.
pub(crate) struct Store<'a, D> {
    pub(crate) planned: &'a mut Planned<D>,
    pub(crate) ranks: Option<&'a RankState>,
}

impl<D: PlanDevice> Store<'_, D> {
    /// Bytes of a tensor as it is stored.
    pub(crate) fn read_bytes(
        &mut self,
        name: &str,
        first: usize,
        bytes: &mut [u8],
    ) -> Result<(), TrainError> {
        self.planned.read_bytes(name, first, bytes)?;
        let Some(state) = self.ranks else { return Ok(()) };
        if self.planned.sharded(name).is_none() {
            return Ok(());
        }
        for (number, bytes) in bytes.chunks_mut(SENT_BYTES).enumerate() {
            let first = first + number * SENT_BYTES;
            state.ranks.order(Order::Read(state.part(name, first, bytes.len())?))?;
            receive(self.planned, state, name, first, bytes)?;
        }
        Ok(())
    }

    /// Sets bytes of a tensor, on all ranks that have them.
    pub(crate) fn write_bytes(
        &mut self,
        name: &str,
        first: usize,
        bytes: &[u8],
    ) -> Result<(), TrainError> {
        self.planned.write_bytes(name, first, bytes)?;
        let Some(state) = self.ranks else { return Ok(()) };
        for (number, bytes) in bytes.chunks(SENT_BYTES).enumerate() {
            let first = first + number * SENT_BYTES;
            state.ranks.order(Order::Write(state.part(name, first, bytes.len())?))?;
            state.ranks.lock().engine.broadcast(0, &mut bytes.to_vec())?;
        }
        Ok(())
    }
}

impl RankState {
    fn part(&self, name: &str, first: usize, bytes: usize) -> Result<Part, TrainError> {
        let position = self.tensors.iter().position(|known| known == name);
        let Some(tensor) = position else {
            let problem = format!("`{name}` is not shared with other ranks, and cannot be set");
            return Err(TrainError::Option { option: "plan", problem });
        };
        Ok(Part { tensor: tensor as u64, first: first as u64, bytes: bytes as u64 })
    }

    /// The name and the bytes that an order is about.
    fn named(&self, part: Part) -> Result<(&str, Range<usize>), TrainError> {
        let name = self.tensors.get(part.tensor as usize).ok_or_else(out_of_step)?;
        let first = part.first as usize;
        Ok((name, first..first.saturating_add(part.bytes as usize)))
    }
}

/// Brings what other ranks own of some bytes, whose own parts are there, to the first rank.
fn receive<D: PlanDevice>(
    planned: &Planned<D>,
    state: &RankState,
    name: &str,
    first: usize,
    bytes: &mut [u8],
) -> Result<(), TrainError> {
    let sharded = planned.sharded(name).ok_or_else(out_of_step)?;
    let place = state.ranks.place;
    let wanted = first..first + bytes.len();
    let mut receives = Vec::new();
    let mut end = 0;
    for rank in 0..place.ranks {
        let is_own = rank == place.rank;
        let owned = sharded.owned(rank, wanted.clone()).filter(|_| !is_own);
        let size: usize = owned.map(|range| range.len()).sum();
        receives.push(end..end + size);
        end += size;
    }
    let mut received = vec![0; end];
    let sends = vec![0..0; place.ranks as usize];
    state.ranks.lock().engine.exchange(&[], &sends, &mut received, &receives)?;
    for rank in (0..place.ranks).filter(|&rank| rank != place.rank) {
        let mut from = receives[rank as usize].start;
        for range in sharded.owned(rank, wanted.clone()) {
            let part = &received[from..from + range.len()];
            bytes[range.start - first..range.end - first].copy_from_slice(part);
            from += range.len();
        }
    }
    Ok(())
}

/// Any other rank: sends what it owns of some bytes to the first.
pub(super) fn send_part<D: PlanDevice>(
    planned: &mut Planned<D>,
    state: &RankState,
    part: Part,
) -> Result<(), TrainError> {
    let (name, wanted) = state.named(part)?;
    let sharded = planned.sharded(name).ok_or_else(out_of_step)?;
    let place = state.ranks.place;
    let owned: Vec<Range<usize>> = sharded.owned(place.rank, wanted).collect();
    let mut sent = Vec::new();
    for range in owned {
        let start = sent.len();
        sent.resize(start + range.len(), 0);
        planned.read_bytes(name, range.start, &mut sent[start..])?;
    }
    let mut sends = vec![0..0; place.ranks as usize];
    sends[0] = 0..sent.len();
    let receives = vec![0..0; place.ranks as usize];
    Ok(state.ranks.lock().engine.exchange(&sent, &sends, &mut [], &receives)?)
}

/// Any other rank: takes what the first one has set.
pub(super) fn take_part<D: PlanDevice>(
    planned: &mut Planned<D>,
    state: &RankState,
    part: Part,
) -> Result<(), TrainError> {
    let (name, range) = state.named(part)?;
    let mut bytes = vec![0; range.len()];
    state.ranks.lock().engine.broadcast(0, &mut bytes)?;
    Ok(planned.write_bytes(name, range.start, &bytes)?)
}

impl<D: PlanDevice> Reader for Store<'_, D> {
    fn find(&self, name: &str) -> Option<&Tensor> {
        self.planned.tensor(name).ok()
    }

    fn get(&self, name: &str) -> Result<&Tensor, TrainError> {
        Ok(self.planned.tensor(name)?)
    }

    fn read_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &mut [T],
    ) -> Result<(), TrainError> {
        // It checks what is asked for.
        self.planned.read_part(name, first, values)?;
        match self.ranks {
            Some(_) => self.read_bytes(name, first * size_of::<T>(), bytes_of_mut(values)),
            None => Ok(()),
        }
    }
}

impl<D: PlanDevice> Writer for Store<'_, D> {
    fn write<T: Scalar>(&mut self, name: &str, values: &[T]) -> Result<(), TrainError> {
        self.planned.write(name, values)?;
        match self.ranks {
            Some(_) => self.write_bytes(name, 0, bytes_of(values)),
            None => Ok(()),
        }
    }

    fn write_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &[T],
    ) -> Result<(), TrainError> {
        self.planned.write_part(name, first, values)?;
        match self.ranks {
            Some(_) => self.write_bytes(name, first * size_of::<T>(), bytes_of(values)),
            None => Ok(()),
        }
    }
}
