//! Measures the link between ranks: the time of the two collectives of a plan, at a few sizes.
//!
//! Every rank sends as many bytes as it receives. A collective's time is that of its slowest rank.
//! The times are fitted to a latency and a bandwidth. If the ranks run on several machines, the
//! ranks within each machine are also measured separately. The network between machines then gets
//! its own bandwidth.

use crate::engine::{Engine, Place};
use crate::error::{Collective, RankError};
use std::ops::Range;
use std::time::Duration;

/// Bytes that a rank sends to all others together, and the number of repetitions. GPUs also need
/// the last size: smaller ones take little more than the latency.
const SIZES: [(usize, usize); 5] =
    [(4 << 10, 15), (256 << 10, 9), (4 << 20, 5), (32 << 20, 3), (256 << 20, 3)];
const SIZES_OF_HOSTS: usize = 4;

/// Bytes of a machine name.
const NAME_BYTES: usize = 64;

/// The measured link between ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkMeasurement {
    /// Number of ranks.
    pub ranks: u32,
    /// Collectives among all ranks.
    pub points: Vec<LinkPoint>,
    /// Latency of one collective.
    pub latency_seconds: f64,
    /// Bytes per second that each rank sends, and also receives, while all ranks do so.
    pub bandwidth: f64,
    /// The network between machines. `None` if all ranks share one machine, if each machine has one
    /// rank, or if machines have different numbers of ranks. `bandwidth` then covers all traffic of
    /// a rank.
    pub machines: Option<MachineMeasurement>,
}

/// The measured link between machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineMeasurement {
    /// Ranks per machine.
    pub ranks: u32,
    /// Bytes per second that a machine sends, and also receives. A lower bound if the ranks
    /// themselves are the bottleneck.
    pub bandwidth: f64,
}

/// One collective of one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkPoint {
    /// [`Collective::Exchange`] or [`Collective::Gather`].
    pub collective: Collective,
    /// Bytes that each rank sends, and also receives.
    pub bytes: usize,
    /// Median over several repetitions of the slowest rank's time.
    pub seconds: f64,
}

/// Runs collectives and times each one. It sends one range of a buffer to each rank, and stores the
/// bytes from each rank in a range of another buffer. All ranks call it at the same time.
/// Implementations may use the engine.
pub trait Carrier<E> {
    /// Runs one collective. `sends` and `receives` have one range per rank.
    fn carry(
        &mut self,
        engine: &mut dyn Engine,
        sends: &[Range<usize>],
        receives: &[Range<usize>],
    ) -> Result<Duration, E>;
}

/// Runs collectives through an engine, as the CPU device does.
pub struct HostCarrier<'a> {
    /// Time elapsed since an arbitrary start.
    clock: &'a mut dyn FnMut() -> Duration,
    /// Send and receive buffers.
    buffers: [Vec<u8>; 2],
}

impl<'a> HostCarrier<'a> {
    /// Uses a clock that returns the time elapsed since an arbitrary start.
    pub fn new(clock: &'a mut dyn FnMut() -> Duration) -> HostCarrier<'a> {
        HostCarrier { clock, buffers: [Vec::new(), Vec::new()] }
    }
}

impl Carrier<RankError> for HostCarrier<'_> {
    fn carry(
        &mut self,
        engine: &mut dyn Engine,
        sends: &[Range<usize>],
        receives: &[Range<usize>],
    ) -> Result<Duration, RankError> {
        for (buffer, ranges) in self.buffers.iter_mut().zip([sends, receives]) {
            buffer.resize(ranges.iter().map(|range| range.end).max().unwrap_or(0), 1);
        }
        let [send, receive] = &mut self.buffers;
        let start = (self.clock)();
        engine.exchange(send, sends, receive, receives)?;
        Ok((self.clock)().saturating_sub(start))
    }
}

/// The machine of each rank, as a number. Ranks with equal numbers have the same host name.
///
/// # Errors
/// A rank is gone.
pub fn machines_of_ranks(engine: &mut dyn Engine) -> Result<Vec<u32>, RankError> {
    let system = rustix::system::uname();
    let mut name = system.nodename().to_bytes().to_vec();
    name.resize(NAME_BYTES, 0);
    let count = engine.place().ranks as usize;
    let mut all = vec![0; count * NAME_BYTES];
    let ranges: Vec<Range<usize>> =
        (0..count).map(|rank| rank * NAME_BYTES..(rank + 1) * NAME_BYTES).collect();
    engine.gather(&name, &mut all, &ranges)?;
    Ok(numbered(&all.chunks(NAME_BYTES).collect::<Vec<_>>()))
}

/// Replaces each name with the index of its first occurrence.
fn numbered(names: &[&[u8]]) -> Vec<u32> {
    let first = |name: &&[u8]| names.iter().position(|known| known == name).unwrap_or(0) as u32;
    names.iter().map(first).collect()
}

/// Measures the link of the CPU device. All ranks call it with the same `machines`, and all get the
/// same result. `clock` returns the time elapsed since an arbitrary start.
///
/// # Errors
/// A rank is gone.
///
/// # Panics
/// If there is only one rank, or `machines` does not have one entry per rank.
pub fn measure_link(
    engine: &mut dyn Engine,
    machines: &[u32],
    clock: &mut dyn FnMut() -> Duration,
) -> Result<LinkMeasurement, RankError> {
    measure_sizes(engine, machines, &mut HostCarrier::new(clock), &SIZES[..SIZES_OF_HOSTS])
}

/// Measures the link between GPUs, like [`measure_link`]. The carrier runs the collectives.
///
/// # Errors
/// A rank is gone, or the carrier failed.
///
/// # Panics
/// As [`measure_link`].
pub fn measure_cards<E: From<RankError>>(
    engine: &mut dyn Engine,
    machines: &[u32],
    carrier: &mut dyn Carrier<E>,
) -> Result<LinkMeasurement, E> {
    measure_sizes(engine, machines, carrier, &SIZES)
}

fn measure_sizes<E: From<RankError>>(
    engine: &mut dyn Engine,
    machines: &[u32],
    carrier: &mut dyn Carrier<E>,
    sizes: &[(usize, usize)],
) -> Result<LinkMeasurement, E> {
    let Place { rank, ranks } = engine.place();
    assert!(ranks > 1 && machines.len() == ranks as usize, "a link joins several ranks");
    let mut link = Link { engine, carrier, sizes };
    let all = vec![true; ranks as usize];
    let points = link.points(&all)?;
    let (latency_seconds, bandwidth) = fitted(&points);
    let on_machine = ranks_of_each(machines).filter(|&count| count > 1 && count < ranks);
    let Some(on_machine) = on_machine else {
        return Ok(LinkMeasurement { ranks, points, latency_seconds, bandwidth, machines: None });
    };
    let own = machines[rank as usize];
    let inside = link.points(&machines.iter().map(|&other| other == own).collect::<Vec<_>>())?;
    let (_, bandwidth) = fitted(&inside);
    // All ranks of a machine send to all ranks of others.
    let (bytes, seconds) = largest(&points);
    let between = f64::from(on_machine) * f64::from(ranks - on_machine) / f64::from(ranks - 1);
    let between = between * bytes / (seconds - latency_seconds).max(f64::MIN_POSITIVE);
    let machines = Some(MachineMeasurement { ranks: on_machine, bandwidth: between });
    Ok(LinkMeasurement { ranks, points, latency_seconds, bandwidth, machines })
}

/// Ranks per machine. `None` if machines differ.
fn ranks_of_each(machines: &[u32]) -> Option<u32> {
    let count = |machine: &u32| machines.iter().filter(|&other| other == machine).count();
    let first = count(machines.first()?);
    machines.iter().all(|machine| count(machine) == first).then_some(first as u32)
}

/// The largest size in bytes, and the mean time of its collectives in seconds.
fn largest(points: &[LinkPoint]) -> (f64, f64) {
    let bytes = points.iter().map(|point| point.bytes).max().unwrap_or(0);
    (bytes as f64, mean_seconds(points, bytes))
}

fn mean_seconds(points: &[LinkPoint], bytes: usize) -> f64 {
    let of_size: Vec<f64> =
        points.iter().filter(|point| point.bytes == bytes).map(|point| point.seconds).collect();
    of_size.iter().sum::<f64>() / of_size.len().max(1) as f64
}

/// Latency and bandwidth, fitted to the smallest and the largest size.
fn fitted(points: &[LinkPoint]) -> (f64, f64) {
    let least = points.iter().map(|point| point.bytes).min().unwrap_or(0);
    let (most, slow) = largest(points);
    let quick = mean_seconds(points, least);
    // If the clock did not advance, use a very high bandwidth rather than an infinite one.
    let bandwidth = match slow > quick {
        true => (most - least as f64) / (slow - quick),
        false => most / slow.max(1e-9),
    };
    ((quick - least as f64 / bandwidth).max(0.0), bandwidth)
}

struct Link<'a, E> {
    engine: &'a mut dyn Engine,
    carrier: &'a mut dyn Carrier<E>,
    sizes: &'a [(usize, usize)],
}

impl<E: From<RankError>> Link<'_, E> {
    /// Both collectives at all sizes, among the ranks that take part.
    fn points(&mut self, takes_part: &[bool]) -> Result<Vec<LinkPoint>, E> {
        let mut points = Vec::new();
        for &(bytes, times) in self.sizes {
            for collective in [Collective::Exchange, Collective::Gather] {
                points.push(self.point(collective, bytes, times, takes_part)?);
            }
        }
        Ok(points)
    }

    fn point(
        &mut self,
        collective: Collective,
        bytes: usize,
        times: usize,
        takes_part: &[bool],
    ) -> Result<LinkPoint, E> {
        let rank = self.engine.place().rank as usize;
        let others = takes_part.iter().filter(|&&takes| takes).count() - 1;
        let part = bytes / others;
        let bytes = part * others;
        let mut next = 0;
        let receives: Vec<Range<usize>> = takes_part
            .iter()
            .enumerate()
            .map(|(other, &takes)| {
                let start = next;
                next += if takes && other != rank { part } else { 0 };
                start..next
            })
            .collect();
        let sends: Vec<Range<usize>> = match collective {
            // Every rank gets the same bytes.
            Collective::Gather => receives.iter().map(|range| 0..range.len()).collect(),
            _ => receives.clone(),
        };
        let mut nanoseconds = Vec::new();
        // Discard the first repetition: it touches memory for the first time and opens connections.
        for _ in 0..=times {
            self.engine.barrier()?;
            let taken = self.carrier.carry(self.engine, &sends, &receives)?;
            let mut slowest = [taken.as_nanos() as i64];
            self.engine.agree(&mut slowest)?;
            nanoseconds.push(slowest[0]);
        }
        nanoseconds.remove(0);
        nanoseconds.sort_unstable();
        let seconds = nanoseconds[times / 2] as f64 / 1e9;
        Ok(LinkPoint { collective, bytes, seconds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::in_process::{self, InProcess};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    const SMALLER: [(usize, usize); 3] = [(4 << 10, 3), (64 << 10, 2), (1 << 20, 3)];

    /// A link with a simulated clock that advances with the bytes sent. Ranks are spread over
    /// machines.
    struct Timed<'a> {
        inner: InProcess,
        machines: &'a [u32],
        model: Model,
        nanoseconds: &'a AtomicU64,
        /// Sizes seen so far. The first use of each size takes longer, which must not affect the
        /// result.
        seen: Vec<usize>,
    }

    #[derive(Clone, Copy)]
    struct Model {
        latency: f64,
        inside: f64,
        between: f64,
    }

    impl Engine for Timed<'_> {
        fn place(&self) -> Place {
            self.inner.place()
        }

        fn exchange(
            &mut self,
            send: &[u8],
            sends: &[Range<usize>],
            receive: &mut [u8],
            receives: &[Range<usize>],
        ) -> Result<(), RankError> {
            let own = self.machines[self.place().rank as usize];
            let on_machine = self.machines.iter().filter(|&&other| other == own).count();
            let all: usize = sends.iter().map(|range| range.len()).sum();
            let away = sends.iter().zip(self.machines).filter(|(_, other)| **other != own);
            let away: usize = away.map(|(range, _)| range.len()).sum();
            let Model { latency, inside, between } = self.model;
            let moving = (all as f64 / inside).max((on_machine * away) as f64 / between);
            let first = if self.seen.contains(&all) { 0.0 } else { 1.0 };
            self.seen.push(all);
            let passed = ((latency + moving + first) * 1e9) as u64;
            self.nanoseconds.fetch_add(passed, Ordering::Relaxed);
            self.inner.exchange(send, sends, receive, receives)
        }

        fn gather(
            &mut self,
            piece: &[u8],
            all: &mut [u8],
            ranges: &[Range<usize>],
        ) -> Result<(), RankError> {
            self.inner.gather(piece, all, ranges)
        }

        fn broadcast(&mut self, from: u32, bytes: &mut [u8]) -> Result<(), RankError> {
            self.inner.broadcast(from, bytes)
        }

        fn agree(&mut self, numbers: &mut [i64]) -> Result<(), RankError> {
            self.inner.agree(numbers)
        }

        fn barrier(&mut self) -> Result<(), RankError> {
            self.inner.barrier()
        }

        fn abort(&mut self, reason: &str) {
            self.inner.abort(reason);
        }
    }

    fn measured(machines: &[u32], model: Model) -> LinkMeasurement {
        let mut all = thread::scope(|scope| {
            let measure = |inner: InProcess| {
                let nanoseconds = &AtomicU64::new(0);
                let mut engine = Timed { inner, machines, model, nanoseconds, seen: Vec::new() };
                let mut clock = || Duration::from_nanos(nanoseconds.load(Ordering::Relaxed));
                let mut carrier = HostCarrier::new(&mut clock);
                measure_sizes(&mut engine, machines, &mut carrier, &SMALLER).expect("no failure")
            };
            let ranks = in_process::connect(machines.len() as u32);
            let threads: Vec<_> =
                ranks.into_iter().map(|rank| scope.spawn(move || measure(rank))).collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).collect::<Vec<_>>()
        });
        assert!(all.iter().all(|one| one == &all[0]), "all ranks have the same figures");
        all.swap_remove(0)
    }

    fn close(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-3, "{found}, not {expected}");
    }

    #[test]
    fn a_link_is_found_again_by_what_it_takes() {
        let model = Model { latency: 3e-5, inside: 2e9, between: 1.0 };
        for ranks in [2, 3, 4] {
            let found = measured(&vec![0; ranks], model);
            assert_eq!((found.ranks, found.machines), (ranks as u32, None));
            close(found.latency_seconds, model.latency);
            close(found.bandwidth, model.inside);
            assert_eq!(found.points.len(), 2 * SMALLER.len());
            for point in &found.points {
                close(point.seconds, model.latency + point.bytes as f64 / model.inside);
            }
        }
    }

    #[test]
    fn machines_have_a_bandwidth_of_their_own() {
        let model = Model { latency: 5e-5, inside: 1e10, between: 1e9 };
        // For any assignment of ranks to machines.
        for machines in [[0, 0, 2, 2], [0, 1, 0, 1]] {
            let found = measured(&machines, model);
            close(found.latency_seconds, model.latency);
            close(found.bandwidth, model.inside);
            let between = found.machines.expect("two machines");
            assert_eq!(between.ranks, 2);
            close(between.bandwidth, model.between);
        }
        // Each machine has one rank, so the network connects the ranks directly.
        let found = measured(&[0, 1], model);
        assert_eq!(found.machines, None);
        close(found.bandwidth, model.between);
        // If machines differ in size, no single bandwidth fits all of them.
        assert_eq!(measured(&[0, 0, 0, 3], model).machines, None);
    }

    #[test]
    fn ranks_of_one_machine_have_one_number() {
        assert_eq!(numbered(&[b"b", b"a", b"b", b"c", b"a"]), [0, 1, 0, 3, 1]);
        let mut engine = in_process::connect(1).swap_remove(0);
        assert_eq!(machines_of_ranks(&mut engine).expect("no failure"), [0]);
    }
}
