//! Building blocks of hand-made plans: tensors side by side that live in one tier and visit another.

use super::random::{Random, between};
use storm_graph::{Graph, TensorClass};
use storm_plan::{
    ALIGNMENT, Compute, Copy, Fetch, GraphId, Instruction, InstructionId, Link, Operand, Place,
    Plan, ReadAhead, Segment, SegmentId, TensorKind, Tier, Value, ValueId, Work,
};

/// Where a slab lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    Device(usize),
    /// In host memory; on the device it lies in a slot of a ring.
    Host {
        offset: usize,
        ring: usize,
        slot: usize,
    },
}

/// Tensors one after another, each in pieces.
#[derive(Clone, Debug)]
pub(crate) struct Slab {
    pub(crate) tensors: Vec<SlabTensor>,
    pub(crate) size_bytes: usize,
    pub(crate) home: Home,
    /// When its last copy home was issued.
    home_at: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct SlabTensor {
    pub(crate) pieces: Vec<ValueId>,
    pub(crate) offset: usize,
}

/// A place on the device that slabs share.
#[derive(Clone, Debug)]
struct Slot {
    offset: usize,
    size_bytes: usize,
    holds: Option<usize>,
    /// When it was last touched.
    touched_at: f64,
}

/// The pieces of a tensor at a place.
pub(crate) type Placed = (Vec<ValueId>, usize);

/// Puts a plan together segment by segment. Kernels are issued at times 1, 2, 3, …; copies at
/// random times in between.
pub(crate) struct Builder {
    pub(crate) plan: Plan,
    pub(crate) random: Random,
    pub(crate) slabs: Vec<Slab>,
    rings: Vec<Vec<Slot>>,
    now: f64,
    items: Vec<(f64, Instruction, Option<Purpose>)>,
}

/// What a copy has to be listed as.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    Input(usize),
    Result(usize),
    Fetch(usize),
}

impl Builder {
    pub(crate) fn new(graph: Graph, random: Random) -> Builder {
        let plan = Plan { graphs: vec![graph.into()], ..Plan::default() };
        let (slabs, rings, items) = (Vec::new(), Vec::new(), Vec::new());
        Builder { plan, random, slabs, rings, now: 0.0, items }
    }

    pub(crate) fn value(&mut self, name: &str, size_bytes: usize, class: TensorClass) -> ValueId {
        self.plan.values.push(Value { name: name.to_owned(), size_bytes, class });
        ValueId(self.plan.values.len() as u32 - 1)
    }

    pub(crate) fn take_device(&mut self, size_bytes: usize) -> usize {
        let offset = self.plan.bytes[Tier::DEVICE];
        self.plan.bytes[Tier::DEVICE] += size_bytes.next_multiple_of(ALIGNMENT);
        offset
    }

    pub(crate) fn take_host(&mut self, size_bytes: usize) -> usize {
        let offset = self.plan.bytes[Tier::HOST];
        self.plan.bytes[Tier::HOST] += size_bytes.next_multiple_of(ALIGNMENT);
        offset
    }

    pub(crate) fn ring(&mut self, slots: usize, size_bytes: usize) -> usize {
        let slots = (0..slots).map(|_| {
            let offset = self.take_device(size_bytes);
            Slot { offset, size_bytes, holds: None, touched_at: 0.0 }
        });
        let slots = slots.collect();
        self.rings.push(slots);
        self.rings.len() - 1
    }

    /// A slab at home on the device, or in host memory with the given ring and position in it.
    pub(crate) fn slab(
        &mut self,
        tensors: &[(&str, usize, TensorClass)],
        ring: Option<(usize, usize)>,
    ) -> usize {
        let mut slab_tensors = Vec::new();
        let mut size_bytes: usize = 0;
        for &(name, bytes, class) in tensors {
            let offset = size_bytes.next_multiple_of(ALIGNMENT);
            size_bytes = offset + bytes;
            // The host writes inputs as one value.
            let may_split = bytes >= 64 && class != TensorClass::Input;
            let parts = if may_split && self.random.chance(30) { 2 } else { 1 };
            let pieces = (0..parts)
                .map(|part| self.value(&format!("{name}#{part}"), bytes / parts, class))
                .collect();
            slab_tensors.push(SlabTensor { pieces, offset });
        }
        let home = match ring {
            None => Home::Device(self.take_device(size_bytes)),
            Some((ring, position)) => {
                let slot = position % self.rings[ring].len();
                Home::Host { offset: self.take_host(size_bytes), ring, slot }
            }
        };
        self.slabs.push(Slab { tensors: slab_tensors, size_bytes, home, home_at: 0.0 });
        self.slabs.len() - 1
    }

    /// Makes sure that a slab is on the device when the next kernel runs, and tells where.
    pub(crate) fn bring(&mut self, slab: usize, purpose: Option<Purpose>) -> usize {
        let Home::Host { offset, ring, slot } = self.slabs[slab].home else {
            return self.room(slab);
        };
        let place = &self.rings[ring][slot];
        let device = place.offset;
        if place.holds != Some(slab) {
            let at = self.slabs[slab].home_at.max(place.touched_at);
            let at = between(&mut self.random, at, self.now + 1.0);
            self.copy(slab, Link::HOST_TO_DEVICE, device, offset, at, purpose);
            let place = &mut self.rings[ring][slot];
            (place.holds, place.touched_at) = (Some(slab), at);
        }
        device
    }

    /// Room for a slab that the next kernel writes.
    pub(crate) fn room(&mut self, slab: usize) -> usize {
        match self.slabs[slab].home {
            Home::Device(offset) => offset,
            Home::Host { ring, slot, .. } => {
                self.rings[ring][slot].holds = Some(slab);
                self.rings[ring][slot].offset
            }
        }
    }

    /// After the last kernel: copies a slab home if that is in host memory.
    pub(crate) fn send_home(&mut self, slab: usize) {
        if let Home::Host { offset, ring, slot } = self.slabs[slab].home {
            let device = self.rings[ring][slot].offset;
            let at = between(&mut self.random, self.now, self.now + 1.0);
            self.copy(slab, Link::DEVICE_TO_HOST, device, offset, at, None);
            self.rings[ring][slot].touched_at = at;
            self.slabs[slab].home_at = at;
        }
    }

    /// After the last kernel: copies a slab that lies on the device to some host memory.
    pub(crate) fn send_to(&mut self, slab: usize, host: usize, purpose: Option<Purpose>) {
        let device = self.room(slab);
        let at = between(&mut self.random, self.now, self.now + 1.0);
        self.copy(slab, Link::DEVICE_TO_HOST, device, host, at, purpose);
    }

    /// All of a slab at once, or each of its values by itself.
    fn copy(
        &mut self,
        slab: usize,
        link: Link,
        device: usize,
        host: usize,
        at: f64,
        purpose: Option<Purpose>,
    ) {
        let mut values = Vec::new();
        for tensor in &self.slabs[slab].tensors {
            let mut offset = tensor.offset;
            for &value in &tensor.pieces {
                values.push(Operand { value, offset });
                offset += self.plan.value(value).size_bytes;
            }
        }
        let bytes = self.slabs[slab].size_bytes;
        let end = |tier| match tier {
            Tier::DEVICE => Place { tier, offset: device },
            tier => Place { tier, offset: host },
        };
        let kind = TensorKind::Weights;
        let (from, to) = (end(link.from), end(link.to));
        let whole = Copy { from, to, bytes, values: values.into(), kind };
        let copies = match self.random.chance(70) || purpose.is_some() {
            true => vec![whole],
            false => whole.values.iter().map(|o| self.part(&whole, o)).collect(),
        };
        for copy in copies {
            let instruction = Instruction { work: Work::Copy(copy), waits: Vec::new() };
            self.items.push((at, instruction, purpose));
        }
    }

    fn part(&self, whole: &Copy, operand: &Operand) -> Copy {
        Copy {
            from: Place { offset: whole.from.offset + operand.offset, ..whole.from },
            to: Place { offset: whole.to.offset + operand.offset, ..whole.to },
            bytes: self.plan.value(operand.value).size_bytes,
            values: [Operand { value: operand.value, offset: 0 }].into_iter().collect(),
            kind: whole.kind,
        }
    }

    /// Fetches an input before everything else of the segment, and reads ahead at some time after that.
    pub(crate) fn take_data(&mut self, input: usize) {
        self.plan.links = self.plan.links.clone().and_data();
        let bytes = self.plan.inputs[input].tensor.size_bytes();
        let fetch = Work::Fetch(Fetch { inputs: vec![input as u32], micro_batches: 1 });
        let read = Work::ReadAhead(ReadAhead { micro_batches: 1, bytes });
        let later = between(&mut self.random, 0.0, 5.0);
        for (at, work, purpose) in [(-1.0, fetch, Some(Purpose::Fetch(input))), (later, read, None)]
        {
            self.items.push((at, Instruction { work, waits: Vec::new() }, purpose));
        }
    }

    /// The next kernel.
    pub(crate) fn compute(&mut self, node: u32, operands: &[&Placed], outputs: &[&Placed]) {
        self.now += 1.0;
        let places = operands.iter().chain(outputs).map(|(_, offset)| *offset).collect();
        let spread = |tensors: &[&Placed]| {
            let mut all = Vec::new();
            for (pieces, place) in tensors {
                let mut offset = *place;
                for &value in pieces {
                    all.push(Operand { value, offset });
                    offset += self.plan.value(value).size_bytes;
                }
            }
            all
        };
        let (reads, writes) = (spread(operands), spread(outputs));
        let compute = Compute {
            graph: GraphId(0),
            node,
            layer: 0,
            places,
            reads: reads.into(),
            writes: writes.into(),
        };
        let touched = compute.places.clone();
        let instruction = Instruction { work: Work::Compute(compute), waits: Vec::new() };
        self.items.push((self.now, instruction, None));
        for slot in self.rings.iter_mut().flatten() {
            let bytes = slot.offset..slot.offset + slot.size_bytes;
            if touched.iter().any(|place| bytes.contains(place)) {
                slot.touched_at = self.now;
            }
        }
    }

    /// Everything since the last segment becomes one. The next one finds no slot filled.
    pub(crate) fn end_segment(&mut self, name: &'static str) -> SegmentId {
        let start = self.plan.instructions.len();
        self.items.sort_by(|(a, _, _), (b, _, _)| a.total_cmp(b));
        for (_, instruction, purpose) in self.items.drain(..) {
            let id = InstructionId(self.plan.instructions.len() as u32);
            match purpose {
                None => {}
                Some(Purpose::Input(index)) => self.plan.inputs[index].copies.push(id),
                Some(Purpose::Result(index)) => self.plan.results[index].copies.push(id),
                Some(Purpose::Fetch(index)) => self.plan.inputs[index].fetches.push(id),
            }
            self.plan.instructions.push(instruction);
        }
        self.now = 0.0;
        for slot in self.rings.iter_mut().flatten() {
            (slot.holds, slot.touched_at) = (None, 0.0);
        }
        for slab in &mut self.slabs {
            slab.home_at = 0.0;
        }
        let instructions = start..self.plan.instructions.len();
        self.plan.segments.push(Segment { name, instructions });
        SegmentId(self.plan.segments.len() as u32 - 1)
    }
}
