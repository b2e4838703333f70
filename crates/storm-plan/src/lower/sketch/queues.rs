//! Kernels and copies of a sketch, and when they end.
//!
//! Memory that copies touch is divided into cells. A write to a cell starts after every earlier use of it, and a
//! read after the last write. A plan states this as waits; a sketch derives it from the times of each cell's last
//! read and last write.

use crate::HardwareProfile;
use crate::queue::Link;
use std::ops::Range;

/// The most repetitions of a segment that are followed; the others take as long as the last one.
const FOLLOWED_MAX: usize = 6;

/// Repetitions that differ by less than this share count as equal.
const ALIKE: f64 = 1e-6;

/// Where an item runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Compute,
    In,
    Out,
    ReadDisk,
    WriteDisk,
    /// Collectives. Their seconds are all they take.
    Ranks,
}

const LANES: usize = 6;

/// What an item does with cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
    /// Overwrites memory that overlaps these cells, so it starts after every earlier use of them. It does not
    /// count as a use: the next use of these cells adds its own touch.
    TakeOver,
}

/// Consecutive cells, and what happens to them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) used: Use,
}

/// Some kernels in a row, or a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    lane: Lane,
    kernels: u32,
    /// Of a copy, without its latency.
    seconds: f64,
    touches: (u32, u32),
    /// Whether the host waits for it before the next segment, as for inputs and results.
    is_awaited: bool,
}

/// The items of a segment; in issue order once it is closed.
#[derive(Debug, Default)]
pub(super) struct Segment {
    computes: Vec<Item>,
    /// Each copy, and after how many items of the compute queue it is issued.
    copies: Vec<(u32, Item)>,
    touches: Vec<Touch>,
    /// Where the touches of the next item start.
    next: u32,
    order: Vec<Item>,
    pub(super) times: usize,
}

impl Segment {
    /// How many items the compute queue has so far.
    pub(super) fn position(&self) -> usize {
        self.computes.len()
    }

    /// How many items it has, once it is closed.
    pub(super) fn items(&self) -> usize {
        self.order.len()
    }

    /// Adds cells to what the next item touches.
    pub(super) fn touch(&mut self, touches: impl IntoIterator<Item = Touch>) {
        self.touches.extend(touches);
    }

    pub(super) fn compute(&mut self, seconds: f64, kernels: u32) {
        let item = self.item(Lane::Compute, seconds, kernels);
        self.computes.push(item);
    }

    pub(super) fn copy(&mut self, after: usize, lane: Lane, seconds: f64) {
        let item = self.item(lane, seconds, 1);
        self.copies.push((after as u32, item));
    }

    fn item(&mut self, lane: Lane, seconds: f64, kernels: u32) -> Item {
        let end = self.touches.len() as u32;
        let touches = (std::mem::replace(&mut self.next, end), end);
        Item { lane, kernels, seconds, touches, is_awaited: false }
    }

    /// Removes everything, and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.computes.clear();
        self.copies.clear();
        self.touches.clear();
        self.next = 0;
        self.order.clear();
    }

    /// Makes the host wait for the last copy.
    pub(super) fn await_copy(&mut self) {
        if let Some((_, copy)) = self.copies.last_mut() {
            copy.is_awaited = true;
        }
    }

    /// Inserts the copies where they are issued: each right after the item before it.
    pub(super) fn close(&mut self, times: usize) {
        self.times = times;
        // The index of each compute item after insertion: after the earlier items and their copies.
        let mut places = vec![0; self.computes.len() + 1];
        for (after, _) in &mut self.copies {
            *after = (*after).min(self.computes.len() as u32);
            places[*after as usize] += 1;
        }
        let mut before = 0;
        for (position, place) in places.iter_mut().enumerate() {
            let copies = std::mem::replace(place, before + position);
            before += copies;
        }
        // Every entry is overwritten below.
        let Some(&any) = self.computes.first().or(self.copies.first().map(|(_, copy)| copy)) else {
            return;
        };
        self.order.resize(self.computes.len() + self.copies.len(), any);
        for (after, copy) in &self.copies {
            let place = &mut places[*after as usize];
            self.order[*place] = *copy;
            *place += 1;
        }
        for (compute, place) in self.computes.iter().zip(places) {
            self.order[place] = *compute;
        }
    }

    /// Seconds of all kernels, in all runs.
    fn computing_seconds(&self) -> f64 {
        self.times as f64 * self.computes.iter().map(|item| item.seconds).sum::<f64>()
    }

    /// Seconds of copies over each lane, in all runs.
    fn moving_seconds(&self, lane: Lane) -> f64 {
        let copies = self.copies.iter().filter(|(_, item)| item.lane == lane);
        self.times as f64 * copies.map(|(_, item)| item.seconds).sum::<f64>()
    }
}

/// When cells were last used, and when queues are done.
#[derive(Default)]
pub(super) struct Moments {
    host: f64,
    free: [f64; LANES],
    written: Vec<f64>,
    used: Vec<f64>,
    /// When all copies that the host waits for are done.
    awaited: f64,
}

impl Moments {
    /// The start of a step, before anything was used.
    fn restart(&mut self, cells: usize) {
        (self.host, self.free, self.awaited) = (0.0, [0.0; LANES], 0.0);
        for moments in [&mut self.written, &mut self.used] {
            moments.clear();
            moments.resize(cells, 0.0);
        }
    }
}

/// Seconds of a step of these segments, and how many items were followed.
pub(super) fn step_seconds(
    segments: &[Segment],
    cells: u32,
    profile: &HardwareProfile,
    now: &mut Moments,
) -> (f64, usize) {
    let mut rates =
        Rates { slowdown: [1.0; LANES], latency: [0.0; LANES], launch: profile.launch_seconds };
    for (lanes, link) in [
        ([Lane::In, Lane::Out], Link::HOST_TO_DEVICE),
        ([Lane::ReadDisk, Lane::WriteDisk], Link::DISK_TO_HOST),
    ] {
        let (Some(there), Some(back)) =
            (profile.find_link(link), profile.find_link(link.reversed()))
        else {
            continue;
        };
        let shared = ((there.bandwidth + back.bandwidth) / there.duplex_bandwidth).max(1.0);
        let alone = lanes
            .map(|lane| segments.iter().map(|segment| segment.moving_seconds(lane)).sum::<f64>());
        // As in the simulation of plans: both directions are busy at once for as long as possible.
        let both = alone[0].min(alone[1]);
        for (lane, alone) in lanes.into_iter().zip(alone) {
            rates.latency[lane as usize] = there.latency_seconds;
            if alone > 0.0 {
                rates.slowdown[lane as usize] = 1.0 + (shared - 1.0) * both / alone;
            }
        }
    }
    if let Some(link) = &profile.ranks {
        let computing = segments.iter().map(Segment::computing_seconds).sum::<f64>();
        let moving = segments.iter().map(|segment| segment.moving_seconds(Lane::Ranks)).sum();
        rates.slowdown[Lane::Compute as usize] = link.slowdown(computing, moving);
    }
    now.restart(cells as usize);
    let mut followed = 0;
    for segment in segments {
        followed += segment.items() * repeat(segment, &rates, now);
    }
    (now.free.iter().copied().fold(now.host, f64::max), followed)
}

struct Rates {
    slowdown: [f64; LANES],
    latency: [f64; LANES],
    launch: f64,
}

/// All runs of a segment. Returns how many were followed.
fn repeat(segment: &Segment, rates: &Rates, now: &mut Moments) -> usize {
    let mut last_took = f64::NAN;
    for done in 1..=segment.times {
        let before = now.free[0];
        run(segment, rates, now);
        let took = now.free[0] - before;
        let left = segment.times - done;
        if (took - last_took).abs() <= ALIKE * took || done == FOLLOWED_MAX {
            let later = left as f64 * took;
            now.host += later;
            now.awaited += later;
            now.free.iter_mut().for_each(|free| *free += later);
            now.written.iter_mut().chain(&mut now.used).for_each(|moment| *moment += later);
            return done;
        }
        last_took = took;
    }
    segment.times
}

fn run(segment: &Segment, rates: &Rates, now: &mut Moments) {
    now.host = now.host.max(now.awaited);
    for item in &segment.order {
        let lane = item.lane as usize;
        let touches = &segment.touches[item.touches.0 as usize..item.touches.1 as usize];
        let mut start = now.free[lane].max(now.host + rates.launch);
        for touch in touches {
            let cells = cells(touch);
            let moments = match touch.used {
                Use::Read => &now.written[cells],
                Use::Write | Use::TakeOver => &now.used[cells],
            };
            start = moments.iter().copied().fold(start, f64::max);
        }
        now.host += rates.launch * f64::from(item.kernels);
        let seconds = rates.latency[lane] + item.seconds * rates.slowdown[lane];
        // The last of several kernels cannot start before it is issued.
        let last = item.seconds * rates.slowdown[lane] / f64::from(item.kernels.max(1));
        let end = (start + seconds).max(now.host + last);
        for touch in touches {
            let cells = cells(touch);
            match touch.used {
                Use::Read => {}
                Use::Write => now.written[cells.clone()].fill(end),
                Use::TakeOver => continue,
            }
            for used in &mut now.used[cells] {
                *used = used.max(end);
            }
        }
        now.free[lane] = end;
        if item.is_awaited {
            now.awaited = now.awaited.max(end);
        }
    }
}

fn cells(touch: &Touch) -> Range<usize> {
    touch.first as usize..(touch.first + touch.count) as usize
}
