//! Times copies between host and card.

use super::super::context::Stream;
use super::super::event::Event;
use super::super::pinned::PinnedMemory;
use super::super::transfer::{CopyRange, Direction, Transfer};
use super::super::{CudaDevice, CudaError};
use crate::DeviceError;

/// Bandwidth of copies of one size, one after another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyPoint {
    /// Size of one copy.
    pub bytes: usize,
    /// To the card, bytes per second.
    pub to_device: f64,
    /// To the host, bytes per second.
    pub to_host: f64,
}

/// The sizes that are timed, smallest first. A plan combines and splits copies to at most about 64
/// MB.
const SIZES: [usize; 3] = [1_000_000, 8_000_000, 64_000_000];

/// Size of the area that copies go from and to, on either side.
pub(super) const AREA_BYTES: usize = 256_000_000;

/// The measured figures of copies.
pub(super) struct Copies {
    /// By size, smallest first.
    pub(super) points: Vec<CopyPoint>,
    /// Both ways at once, total bytes per second.
    pub(super) duplex: f64,
    pub(super) latency_seconds: f64,
}

/// Times copies between `host` and the block of `device`, each figure over `seconds`.
pub(super) fn measure(
    device: &CudaDevice,
    host: &mut PinnedMemory,
    seconds: f64,
) -> Result<Copies, DeviceError> {
    let streams = [Stream::new(&device.context)?, Stream::new(&device.context)?];
    check_round_trip(device, host, &streams[0])?;
    let lane = |direction| Lane { device, host, stream: &streams[0], direction };
    let mut points = Vec::new();
    for bytes in SIZES {
        let rate = |direction| -> Result<f64, DeviceError> {
            Ok(bytes as f64 / lane(direction).seconds_per_copy(bytes, seconds)?)
        };
        let (to_device, to_host) = (rate(Direction::ToDevice)?, rate(Direction::ToHost)?);
        points.push(CopyPoint { bytes, to_device, to_host });
    }
    let (small, large) = (points[0], points[points.len() - 1]);
    // The time that a small copy takes in addition to that of its bytes.
    let extra = |small: f64, large: f64| SIZES[0] as f64 * (1.0 / small - 1.0 / large);
    let latency_seconds =
        extra(small.to_device, large.to_device).max(extra(small.to_host, large.to_host)).max(0.0);
    let duplex = duplex(device, host, &streams, large, seconds)?;
    Ok(Copies { points, duplex, latency_seconds })
}

/// Copies one way, in one stream.
struct Lane<'a> {
    device: &'a CudaDevice,
    host: &'a PinnedMemory,
    stream: &'a Stream,
    direction: Direction,
}

impl<'a> Lane<'a> {
    fn seconds_per_copy(&self, bytes: usize, seconds: f64) -> Result<f64, DeviceError> {
        let trial = self.time(bytes, 4)?;
        let copies = (seconds / trial).ceil().clamp(4.0, 100_000.0) as usize;
        self.time(bytes, copies)
    }

    /// Seconds per copy, over `copies` copies one after another.
    fn time(&self, bytes: usize, copies: usize) -> Result<f64, DeviceError> {
        let context = &self.device.context;
        let (start, end) = (Event::new(context)?, Event::new(context)?);
        start.record(self.stream)?;
        let transfer = self.queue(bytes, copies)?;
        end.record(self.stream)?;
        transfer.finish()?;
        Ok(end.seconds_since(&start)? / copies as f64)
    }

    /// Queues copies of `bytes` each, which walk through the area.
    fn queue(&self, bytes: usize, copies: usize) -> Result<Transfer<'a>, DeviceError> {
        let memory = &self.device.memory;
        let mut transfer = Transfer::begin(self.stream, self.direction, self.host, memory)?;
        let places = AREA_BYTES / bytes;
        for copy in 0..copies {
            let offset = copy % places * bytes;
            transfer.copy(CopyRange { host_offset: offset, device_offset: offset, bytes })?;
        }
        Ok(transfer)
    }
}

/// Times copies both ways at once, each with its share of the bytes, so that both end together.
fn duplex(
    device: &CudaDevice,
    host: &PinnedMemory,
    streams: &[Stream; 2],
    alone: CopyPoint,
    seconds: f64,
) -> Result<f64, DeviceError> {
    let bytes = alone.bytes;
    let copies = |rate: f64| (seconds * rate / bytes as f64).ceil().max(2.0) as usize;
    let counts = [copies(alone.to_device), copies(alone.to_host)];
    let directions = [Direction::ToDevice, Direction::ToHost];
    // Both start after one event, and the time ends when the later one is done.
    let start = Event::new(&device.context)?;
    start.record(&device.stream)?;
    let (mut transfers, mut ends) = (Vec::new(), Vec::new());
    for ((stream, direction), count) in streams.iter().zip(directions).zip(counts) {
        start.hold(stream)?;
        transfers.push(Lane { device, host, stream, direction }.queue(bytes, count)?);
        let end = Event::new(&device.context)?;
        end.record(stream)?;
        ends.push(end);
    }
    for transfer in transfers {
        transfer.finish()?;
    }
    let mut taken = 0.0f64;
    for end in ends {
        taken = taken.max(end.seconds_since(&start)?);
    }
    Ok((counts[0] + counts[1]) as f64 * bytes as f64 / taken)
}

/// Checks that bytes that are copied to the card and back do not change.
fn check_round_trip(
    device: &CudaDevice,
    host: &mut PinnedMemory,
    stream: &Stream,
) -> Result<(), DeviceError> {
    let half = AREA_BYTES / 2;
    let pattern = |index: usize| (index.wrapping_mul(0x9e37_79b9) >> 16) as u8;
    let (sent, received) = host.as_mut_slice()[..AREA_BYTES].split_at_mut(half);
    sent.iter_mut().enumerate().for_each(|(index, byte)| *byte = pattern(index));
    received.fill(0);
    for (direction, host_offset) in [(Direction::ToDevice, 0), (Direction::ToHost, half)] {
        let mut transfer = Transfer::begin(stream, direction, host, &device.memory)?;
        transfer.copy(CopyRange { host_offset, device_offset: 0, bytes: half })?;
        transfer.finish()?;
    }
    let (sent, received) = host.as_mut_slice()[..AREA_BYTES].split_at_mut(half);
    match sent == received {
        true => Ok(()),
        false => Err(CudaError::CopyChanged { bytes: half }.into()),
    }
}
