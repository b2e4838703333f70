//! Access to persistent tensors while the queues are empty: reads, writes and initialization.

use super::Planned;
use super::room::Room;
use crate::ExecError;
use crate::resident::{check, check_part};
use std::ops::Range;
use std::sync::Arc;
use storm_device::{DeviceError, HostBuffer, PlanDevice, Scalar, bytes_of, bytes_of_mut};
use storm_graph::{Graph, Tensor, TensorId};
use storm_plan::{Lasting, Operand, Place, Plan, Sharded, Tier};

impl<D: PlanDevice> Planned<D> {
    /// The persistent tensor of that name. If ranks share it, reads and writes access only what this rank owns.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn tensor(&self, name: &str) -> Result<&Tensor, ExecError> {
        match self.sharded(name) {
            Some(sharded) => Ok(&sharded.tensor),
            None => Ok(&self.plan.lasting[self.find(name)?].tensor),
        }
    }

    /// The tensor of that name if ranks share it.
    pub fn sharded(&self, name: &str) -> Option<&Sharded> {
        self.sharded.get(name).map(|&(index, _)| &self.plan.sharded[index])
    }

    /// The parts of a shared tensor that this rank owns within some bytes: the name of each part, the first byte in it,
    /// and the range within the requested bytes.
    fn own_parts(
        &self,
        name: &str,
        bytes: Range<usize>,
    ) -> Option<Vec<(String, usize, Range<usize>)>> {
        let (_, parts) = self.sharded.get(name)?;
        let mut found = Vec::new();
        for &(first, index) in parts {
            let tensor = &self.plan.lasting[index].tensor;
            let end = first + tensor.size_bytes();
            let range = bytes.start.max(first)..bytes.end.min(end);
            if !range.is_empty() {
                let inside = range.start - bytes.start..range.end - bytes.start;
                found.push((tensor.name.clone(), range.start - first, inside));
            }
        }
        Some(found)
    }

    /// Writes a persistent tensor, in whatever tier it is.
    ///
    /// # Errors
    /// No such tensor, the wrong dtype or element count, or an error of the device.
    pub fn write<T: Scalar>(&mut self, name: &str, values: &[T]) -> Result<(), ExecError> {
        check(self.tensor(name)?, T::DTYPE, values.len())?;
        self.write_bytes(name, 0, bytes_of(values))
    }

    /// Writes elements of a persistent tensor, starting at `first`, in whatever tier it is.
    ///
    /// # Errors
    /// No such tensor, the wrong dtype, more elements than it has, or an error of the device.
    pub fn write_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &[T],
    ) -> Result<(), ExecError> {
        check_part(self.tensor(name)?, T::DTYPE, first, values.len())?;
        self.write_bytes(name, first * size_of::<T>(), bytes_of(values))
    }

    /// Reads a persistent tensor.
    ///
    /// # Errors
    /// No such tensor, the wrong dtype or element count, or an error of the device.
    pub fn read<T: Scalar>(&mut self, name: &str, values: &mut [T]) -> Result<(), ExecError> {
        check(self.tensor(name)?, T::DTYPE, values.len())?;
        self.read_part(name, 0, values)
    }

    /// Reads elements of a persistent tensor, starting at `first`.
    ///
    /// # Errors
    /// No such tensor, the wrong dtype, more elements than it has, or an error of the device.
    pub fn read_part<T: Scalar>(
        &mut self,
        name: &str,
        first: usize,
        values: &mut [T],
    ) -> Result<(), ExecError> {
        check_part(self.tensor(name)?, T::DTYPE, first, values.len())?;
        self.read_bytes(name, first * size_of::<T>(), bytes_of_mut(values))
    }

    /// Reads bytes of a persistent tensor as it is stored, starting at `first`.
    ///
    /// # Errors
    /// No such tensor, more bytes than it has, or an error of the device.
    pub fn read_bytes(
        &mut self,
        name: &str,
        first: usize,
        bytes: &mut [u8],
    ) -> Result<(), ExecError> {
        check_bytes(self.tensor(name)?, first, bytes.len())?;
        if let Some(parts) = self.own_parts(name, first..first + bytes.len()) {
            for (part, first, range) in parts {
                self.read_bytes(&part, first, &mut bytes[range])?;
            }
            return Ok(());
        }
        let lasting = &self.plan.lasting[self.find(name)?];
        for (place, range) in read_places(&self.plan, lasting, first..first + bytes.len()) {
            self.device.read(place, &mut bytes[range.start - first..range.end - first])?;
        }
        Ok(())
    }

    /// Reads persistent tensors as they are stored, as fast as the device can.
    ///
    /// # Errors
    /// No such tensor, the wrong number of bytes, or an error of the device.
    pub fn read_all(&mut self, reads: Vec<(&str, &mut [u8])>) -> Result<(), ExecError> {
        let mut places = Vec::with_capacity(reads.len());
        for (name, bytes) in reads {
            let lasting = &self.plan.lasting[self.find(name)?];
            let tensor = &lasting.tensor;
            if bytes.len() != tensor.size_bytes() {
                return Err(ExecError::Device(DeviceError::WrongSize {
                    tensor: tensor.name.clone(),
                    tensor_bytes: tensor.size_bytes(),
                    given_bytes: bytes.len(),
                }));
            }
            let mut rest = bytes;
            for (place, range) in read_places(&self.plan, lasting, 0..rest.len()) {
                let (part, after) = rest.split_at_mut(range.len());
                places.push((place, part));
                rest = after;
            }
        }
        Ok(self.device.read_all(places)?)
    }

    /// Begins to read whole persistent tensors as they will be once everything issued so far is done, and does not wait for
    /// it. Returns `false` if that is not possible here; then nothing was begun.
    ///
    /// # Errors
    /// No such tensor, or an error of the device.
    pub fn begin_read<'n>(
        &mut self,
        names: impl Iterator<Item = &'n str>,
    ) -> Result<bool, ExecError> {
        let mut places = Vec::new();
        for name in names {
            let lasting = &self.plan.lasting[self.find(name)?];
            let of_tensor = read_places(&self.plan, lasting, 0..lasting.tensor.size_bytes());
            places.extend(of_tensor.into_iter().map(|(place, range)| (place, range.len())));
        }
        Ok(self.device.begin_read(&places)?)
    }

    /// Waits for the read that was begun, and fills `bytes` with its tensors one after another. Returns `false` if none was
    /// begun.
    ///
    /// # Errors
    /// From the device.
    pub fn finish_read(&mut self, bytes: &mut [u8]) -> Result<bool, ExecError> {
        Ok(self.device.finish_read(bytes)?)
    }

    /// Host memory that the device fills fastest.
    ///
    /// # Errors
    /// The machine or a limit does not allow it.
    pub fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, ExecError> {
        Ok(self.device.host_buffer(bytes)?)
    }

    /// Writes bytes of a persistent tensor as it is stored, starting at `first`, in whatever tier it is.
    ///
    /// # Errors
    /// No such tensor, more bytes than it has, or an error of the device.
    pub fn write_bytes(&mut self, name: &str, first: usize, bytes: &[u8]) -> Result<(), ExecError> {
        check_bytes(self.tensor(name)?, first, bytes.len())?;
        if let Some(parts) = self.own_parts(name, first..first + bytes.len()) {
            for (part, first, range) in parts {
                self.write_bytes(&part, first, &bytes[range])?;
            }
            return Ok(());
        }
        let lasting = &self.plan.lasting[self.find(name)?];
        for (place, range) in write_places(&self.plan, lasting, first..first + bytes.len()) {
            self.device.write(place, &bytes[range.start - first..range.end - first])?;
        }
        Ok(())
    }

    /// Reads a scalar of the plan as the last step left it, such as a gradient's sum of squares.
    ///
    /// # Errors
    /// From the device.
    pub fn read_scalar(&mut self, operand: Operand) -> Result<f32, ExecError> {
        let mut bytes = [0; size_of::<f32>()];
        self.device.read(Place { tier: Tier::DEVICE, offset: operand.offset }, &mut bytes)?;
        Ok(f32::from_ne_bytes(bytes))
    }

    /// Computes a persistent tensor with the nodes of `graph`: it is the first output of the last node. The graph's
    /// sources are persistent tensors, or those in `given`, by name. Tensors that are not on the device use device
    /// memory that is free between steps.
    ///
    /// # Errors
    /// An unknown name, the wrong shape or dtype, no room on the device, or an error of the device.
    ///
    /// # Panics
    /// If the graph has no node.
    pub fn initialize(
        &mut self,
        name: &str,
        graph: &Graph,
        layer: u16,
        given: &[(&str, &[u8])],
    ) -> Result<(), ExecError> {
        self.reclaim_idle()?;
        let plan = Arc::clone(&self.plan);
        let target = &plan.lasting[self.find(name)?];
        let wanted = graph.nodes().last().expect("a graph with a node").outputs[0];
        let output = graph.tensor(wanted);
        check(&target.tensor, output.dtype, output.shape.elements())?;

        let mut room = Room::between_steps(&plan);
        let made = match on_device(target) {
            Some(place) => place,
            None => Place { tier: Tier::DEVICE, offset: room.take(output)? },
        };
        let mut places: Vec<(TensorId, usize)> = vec![(wanted, made.offset)];
        for node in graph.nodes() {
            for (_, id) in node.op.operands() {
                if places.iter().all(|(known, _)| *known != id) {
                    places.push((id, self.place_operand(graph.tensor(id), given, &mut room)?));
                }
            }
            for &id in node.outputs.iter().filter(|&&id| id != wanted) {
                places.push((id, room.take(graph.tensor(id))?));
            }
            let place = |id: TensorId| {
                let known = places.iter().find(|(known, _)| *known == id);
                known.expect("operands and outputs are placed above").1
            };
            self.device.run_alone(graph, node, place, layer)?;
        }
        for (place, range) in write_places(&plan, target, 0..output.size_bytes()) {
            let from = Place { offset: made.offset + range.start, ..made };
            if place != from {
                self.copy(from, place, range.len())?;
            }
        }
        Ok(())
    }

    /// Makes sure that an operand is in device memory, and returns its place.
    fn place_operand(
        &mut self,
        operand: &Tensor,
        given: &[(&str, &[u8])],
        room: &mut Room,
    ) -> Result<usize, ExecError> {
        let at = |offset| Place { tier: Tier::DEVICE, offset };
        if let Some((_, bytes)) = given.iter().find(|(name, _)| *name == operand.name) {
            if bytes.len() != operand.size_bytes() {
                return Err(ExecError::Device(DeviceError::WrongSize {
                    tensor: operand.name.clone(),
                    tensor_bytes: operand.size_bytes(),
                    given_bytes: bytes.len(),
                }));
            }
            let offset = room.take(operand)?;
            self.device.write(at(offset), bytes)?;
            return Ok(offset);
        }
        let plan = Arc::clone(&self.plan);
        let lasting = &plan.lasting[self.find(&operand.name)?];
        check(&lasting.tensor, operand.dtype, operand.shape.elements())?;
        if let Some(place) = on_device(lasting) {
            return Ok(place.offset);
        }
        let offset = room.take(operand)?;
        for (from, range) in read_places(&plan, lasting, 0..operand.size_bytes()) {
            self.copy(from, at(offset + range.start), range.len())?;
        }
        Ok(offset)
    }

    /// Copies between two places, on empty queues.
    fn copy(&mut self, from: Place, to: Place, bytes: usize) -> Result<(), ExecError> {
        const PART: usize = 16 << 20;
        let mut part = vec![0; bytes.min(PART)];
        for start in (0..bytes).step_by(PART) {
            let part = &mut part[..PART.min(bytes - start)];
            self.device.read(Place { offset: from.offset + start, ..from }, part)?;
            self.device.write(Place { offset: to.offset + start, ..to }, part)?;
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Result<usize, ExecError> {
        let found = self.by_name.get(name).copied();
        found.ok_or_else(|| ExecError::unknown(name, self.by_name.keys()))
    }
}

/// Checks that a tensor has these bytes.
fn check_bytes(tensor: &Tensor, first: usize, count: usize) -> Result<(), ExecError> {
    let end = first.saturating_add(count);
    if end <= tensor.size_bytes() {
        return Ok(());
    }
    Err(ExecError::Device(DeviceError::WrongSize {
        tensor: tensor.name.clone(),
        tensor_bytes: tensor.size_bytes(),
        given_bytes: end,
    }))
}

/// The place of a whole tensor on the device, if it has one.
fn on_device(lasting: &Lasting) -> Option<Place> {
    lasting.places.iter().copied().find(|place| place.tier == Tier::DEVICE)
}

/// The places to read some bytes of a tensor from, with the range of each, in order. Prefers host memory.
fn read_places(plan: &Plan, lasting: &Lasting, bytes: Range<usize>) -> Vec<(Place, Range<usize>)> {
    let in_host = |place: &&Place| place.tier == Tier::HOST;
    let whole = lasting.places.iter().find(in_host).or(lasting.places.first());
    if let Some(&Place { tier, offset }) = whole {
        return vec![(Place { tier, offset: offset + bytes.start }, bytes)];
    }
    let mut reads: Vec<(Place, Range<usize>)> = Vec::new();
    for (place, range) in parts(plan, lasting, bytes) {
        match reads.last_mut() {
            Some((known, of)) if *of == range => {
                if place.tier == Tier::HOST {
                    *known = place;
                }
            }
            _ => reads.push((place, range)),
        }
    }
    reads
}

/// All places where some bytes of a tensor must be written, with the ranges they hold.
fn write_places(plan: &Plan, lasting: &Lasting, bytes: Range<usize>) -> Vec<(Place, Range<usize>)> {
    let whole = |&Place { tier, offset }: &Place| {
        (Place { tier, offset: offset + bytes.start }, bytes.clone())
    };
    let wholes = lasting.places.iter().map(whole);
    wholes.chain(parts(plan, lasting, bytes.clone())).collect()
}

/// The places of single pieces that hold some of these bytes, piece by piece.
fn parts(plan: &Plan, lasting: &Lasting, bytes: Range<usize>) -> Vec<(Place, Range<usize>)> {
    let (mut found, mut start) = (Vec::new(), 0);
    let mut parts = lasting.parts.iter().peekable();
    for (piece, &value) in lasting.pieces.iter().enumerate() {
        let end = start + plan.value(value).size_bytes;
        let range = bytes.start.max(start)..bytes.end.min(end);
        while let Some(&(_, Place { tier, offset })) =
            parts.next_if(|&&(part, _)| part as usize == piece)
        {
            if !range.is_empty() {
                let place = Place { tier, offset: offset + range.start - start };
                found.push((place, range.clone()));
            }
        }
        start = end;
    }
    found
}
