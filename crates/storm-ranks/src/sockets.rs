//! Ranks connected by sockets, for launchers other than `mpirun`.
//!
//! Every rank has a connection to rank 0, which forwards messages between the others. This is
//! enough for the data that GPU ranks exchange outside their steps: settings, micro-batches,
//! losses, weights and state. Gradients go over NCCL.
//!
//! A collective runs from all ranks to rank 0 and back. Each message starts with the kind and the
//! sequence number of its collective, so ranks that are out of step detect it.

use crate::address::Address;
use crate::engine::{Engine, Place, check_exchange, check_gather, check_rank};
use crate::error::{Collective, RankError};
use crate::hello::hear;
use crate::launch::Launch;
use crate::rendezvous::{Rendezvous, RendezvousError};
use crate::watch::{end_process, last_words};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

/// How often rank 0 polls for new connections.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);

/// The kind of a message that reports a failure: the failed rank and the reason.
const FAILED: u8 = 255;

/// Maximum length of a reason that is sent.
const REASON_BYTES_MAX: usize = 4096;

/// A rank connected to the others by sockets.
pub struct Sockets {
    place: Place,
    /// Connections by rank. Rank 0 has one to every other rank. The others have one, to rank 0.
    streams: Vec<Option<TcpStream>>,
    /// Number of collectives so far.
    count: u64,
    /// The first failure. All later collectives return it.
    failure: Option<RankError>,
}

/// Message header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    kind: u8,
    count: u64,
    bytes: u64,
}

impl Header {
    const BYTES: usize = 17;

    fn to_bytes(self) -> [u8; Header::BYTES] {
        let mut bytes = [0; Header::BYTES];
        bytes[0] = self.kind;
        bytes[1..9].copy_from_slice(&self.count.to_le_bytes());
        bytes[9..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    fn of_bytes(bytes: [u8; Header::BYTES]) -> Header {
        let number = |from: usize| {
            let mut own = [0; 8];
            own.copy_from_slice(&bytes[from..from + 8]);
            u64::from_le_bytes(own)
        };
        Header { kind: bytes[0], count: number(1), bytes: number(9) }
    }
}

impl Sockets {
    /// Connects the ranks of a launch. Rank 0 announces its address through the rendezvous.
    pub fn connect(
        launch: &Launch,
        rendezvous: &mut Rendezvous,
        time: Duration,
    ) -> Result<Sockets, RendezvousError> {
        let place = Place { rank: launch.rank, ranks: launch.ranks };
        let deadline = Instant::now() + time;
        if place.rank == 0 {
            let (listener, address) = Address::listen().map_err(RendezvousError::Sockets)?;
            rendezvous.share(launch, "sockets", &address.to_bytes())?;
            return Sockets::accept(place, &listener, &address, deadline, time);
        }
        let address = rendezvous.share(launch, "sockets", &[])?;
        let address = Address::from_bytes(&address).ok_or_else(|| {
            RendezvousError::Sockets(io::Error::other("the first rank has no address"))
        })?;
        let stream = address
            .connect(place.rank, deadline)
            .and_then(patient)
            .map_err(RendezvousError::Sockets)?;
        Ok(Sockets::new(place, vec![Some(stream)]))
    }

    fn accept(
        place: Place,
        listener: &TcpListener,
        address: &Address,
        deadline: Instant,
        time: Duration,
    ) -> Result<Sockets, RendezvousError> {
        let ranks = place.ranks;
        let mut streams: Vec<Option<TcpStream>> = (0..ranks).map(|_| None).collect();
        let missing = |streams: &[Option<TcpStream>]| {
            streams[1..].iter().filter(|stream| stream.is_none()).count() as u32
        };
        while missing(&streams) > 0 {
            match listener.accept() {
                Ok((stream, _)) => {
                    // Not a rank, or a rank that disconnected. A rank will connect again.
                    let Ok(rank) = hear(&stream, address.token(), ranks) else { continue };
                    let Ok(stream) = patient(stream) else { continue };
                    streams[rank as usize] = Some(stream);
                }
                Err(_) if Instant::now() < deadline => std::thread::sleep(ACCEPT_INTERVAL),
                Err(_) => {
                    let missing = missing(&streams);
                    return Err(RendezvousError::Missing { missing, ranks, time });
                }
            }
        }
        Ok(Sockets::new(place, streams))
    }

    fn new(place: Place, streams: Vec<Option<TcpStream>>) -> Sockets {
        Sockets { place, streams, count: 0, failure: None }
    }

    /// Waits for all ranks, then disconnects.
    pub fn finish(mut self) -> Result<(), RankError> {
        self.barrier()
    }

    fn is_first(&self) -> bool {
        self.place.rank == 0
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.place.rank;
        (0..self.place.ranks).filter(move |&rank| rank != own)
    }

    /// Runs a collective. If it fails here, reports the reason to the connected ranks.
    fn run<T>(
        &mut self,
        collective: Collective,
        body: impl FnOnce(&mut Sockets, Collective) -> Result<T, RankError>,
    ) -> Result<T, RankError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        self.count += 1;
        body(self, collective).map_err(|error| self.fail(error))
    }

    fn fail(&mut self, error: RankError) -> RankError {
        let (rank, is_gone, reason) = match &error {
            RankError::Gone { rank } => (*rank, 1, String::new()),
            RankError::Aborted { rank, reason } => (*rank, 0, reason.clone()),
            other => (self.place.rank, 0, other.to_string()),
        };
        let mut end = reason.len().min(REASON_BYTES_MAX);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let mut message = rank.to_le_bytes().to_vec();
        message.push(is_gone);
        message.extend_from_slice(&reason.as_bytes()[..end]);
        let header = Header { kind: FAILED, count: self.count, bytes: message.len() as u64 };
        for stream in self.streams.iter_mut().flatten() {
            // Ignore errors: the peer may be gone.
            let _ = stream.write_all(&header.to_bytes()).and_then(|()| stream.write_all(&message));
        }
        self.failure = Some(error.clone());
        error
    }

    fn stream(&mut self, rank: u32) -> Result<&mut TcpStream, RankError> {
        let stream = self.streams.get_mut(rank as usize).and_then(Option::as_mut);
        stream.ok_or(RankError::Gone { rank })
    }

    fn send(&mut self, to: u32, collective: Collective, bytes: &[u8]) -> Result<(), RankError> {
        let header =
            Header { kind: collective as u8, count: self.count, bytes: bytes.len() as u64 };
        let stream = self.stream(to)?;
        let sent = stream.write_all(&header.to_bytes()).and_then(|()| stream.write_all(bytes));
        match sent {
            Ok(()) => Ok(()),
            // The peer may have sent a reason before it closed the connection.
            Err(_) => Err(self.reason_of(to)),
        }
    }

    /// Why a rank that can no longer be written to has ended.
    fn reason_of(&mut self, of: u32) -> RankError {
        let mut bytes = [0; Header::BYTES];
        let Ok(stream) = self.stream(of) else { return RankError::Gone { rank: of } };
        match stream.read_exact(&mut bytes).map(|()| Header::of_bytes(bytes)) {
            Ok(header) if header.kind == FAILED => self.failed(of, header.bytes),
            _ => RankError::Gone { rank: of },
        }
    }

    /// Reads the failure that a rank reports.
    fn failed(&mut self, from: u32, bytes: u64) -> RankError {
        let gone = RankError::Gone { rank: from };
        if bytes > (REASON_BYTES_MAX + 5) as u64 {
            return gone;
        }
        let mut message = vec![0; bytes as usize];
        let read = self.stream(from).map(|stream| stream.read_exact(&mut message));
        if !matches!(read, Ok(Ok(()))) {
            return gone;
        }
        match message.split_first_chunk() {
            Some((rank, [0, reason @ ..])) => RankError::Aborted {
                rank: u32::from_le_bytes(*rank),
                reason: String::from_utf8_lossy(reason).into_owned(),
            },
            Some((rank, [1, ..])) => RankError::Gone { rank: u32::from_le_bytes(*rank) },
            _ => gone,
        }
    }

    /// Waits for a message header. Returns the number of bytes that follow.
    fn header(&mut self, from: u32, collective: Collective) -> Result<u64, RankError> {
        let mut bytes = [0; Header::BYTES];
        let read = self.stream(from)?.read_exact(&mut bytes);
        read.map_err(|_| RankError::Gone { rank: from })?;
        let header = Header::of_bytes(bytes);
        if header.kind == FAILED {
            return Err(self.failed(from, header.bytes));
        }
        match (header.kind, header.count) == (collective as u8, self.count) {
            true => Ok(header.bytes),
            false => Err(RankError::OutOfStep { collective, other: from }),
        }
    }

    /// Receives a message of known length. `of` is the rank that sent it, even if `from` forwarded
    /// it.
    fn receive(
        &mut self,
        from: u32,
        of: u32,
        collective: Collective,
        to: &mut [u8],
    ) -> Result<(), RankError> {
        let sent = self.header(from, collective)?;
        if sent != to.len() as u64 {
            let (sent, expected) = (sent as usize, to.len());
            return Err(RankError::Length { collective, from: of, sent, expected });
        }
        let read = self.stream(from)?.read_exact(to);
        read.map_err(|_| RankError::Gone { rank: from })
    }

    /// Receives a message of any length. Memory is allocated only as bytes arrive.
    fn receive_any(&mut self, from: u32, collective: Collective) -> Result<Vec<u8>, RankError> {
        let sent = self.header(from, collective)?;
        let mut bytes = Vec::new();
        let read = self.stream(from)?.take(sent).read_to_end(&mut bytes);
        match read {
            Ok(read) if read as u64 == sent => Ok(bytes),
            _ => Err(RankError::Gone { rank: from }),
        }
    }
}

/// Removes the timeouts of a connection: a rank may compute for any time between messages, and
/// [`crate::Watch`] detects lost ranks.
fn patient(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(stream)
}

impl Engine for Sockets {
    fn place(&self) -> Place {
        self.place
    }

    fn exchange(
        &mut self,
        send: &[u8],
        sends: &[Range<usize>],
        receive: &mut [u8],
        receives: &[Range<usize>],
    ) -> Result<(), RankError> {
        check_exchange(self.place, send, sends, receive, receives)?;
        let own = self.place.rank as usize;
        self.run(Collective::Exchange, |sockets, collective| {
            let (from, to) = (sends[own].clone(), receives[own].clone());
            if from.len() != to.len() {
                let (from, sent, expected) = (own as u32, from.len(), to.len());
                return Err(RankError::Length { collective, from, sent, expected });
            }
            receive[to].copy_from_slice(&send[from]);
            if !sockets.is_first() {
                for rank in sockets.others() {
                    sockets.send(0, collective, &send[sends[rank as usize].clone()])?;
                }
                for rank in sockets.others() {
                    let to = receives[rank as usize].clone();
                    sockets.receive(0, rank, collective, &mut receive[to])?;
                }
                return Ok(());
            }
            // Messages by sender and receiver. Those to rank 0 are left empty, because it has
            // already stored them.
            let mut passed: Vec<Vec<Vec<u8>>> = vec![Vec::new()];
            for from in sockets.others() {
                let mut messages = Vec::new();
                for to in (0..sockets.place.ranks).filter(|&to| to != from) {
                    match to {
                        0 => {
                            let to = receives[from as usize].clone();
                            sockets.receive(from, from, collective, &mut receive[to])?;
                            messages.push(Vec::new());
                        }
                        _ => messages.push(sockets.receive_any(from, collective)?),
                    }
                }
                messages.insert(from as usize, Vec::new());
                passed.push(messages);
            }
            for to in sockets.others() {
                sockets.send(to, collective, &send[sends[to as usize].clone()])?;
                for from in sockets.others().filter(|&from| from != to) {
                    sockets.send(to, collective, &passed[from as usize][to as usize])?;
                }
            }
            Ok(())
        })
    }

    fn gather(
        &mut self,
        piece: &[u8],
        all: &mut [u8],
        ranges: &[Range<usize>],
    ) -> Result<(), RankError> {
        check_gather(self.place, all, ranges)?;
        let own = self.place.rank as usize;
        self.run(Collective::Gather, |sockets, collective| {
            let to = ranges[own].clone();
            if piece.len() != to.len() {
                let (from, sent, expected) = (own as u32, piece.len(), to.len());
                return Err(RankError::Length { collective, from, sent, expected });
            }
            all[to].copy_from_slice(piece);
            if !sockets.is_first() {
                sockets.send(0, collective, piece)?;
                for rank in sockets.others() {
                    let to = ranges[rank as usize].clone();
                    sockets.receive(0, rank, collective, &mut all[to])?;
                }
                return Ok(());
            }
            for rank in sockets.others() {
                let to = ranges[rank as usize].clone();
                sockets.receive(rank, rank, collective, &mut all[to])?;
            }
            for to in sockets.others() {
                for rank in (0..sockets.place.ranks).filter(|&rank| rank != to) {
                    sockets.send(to, collective, &all[ranges[rank as usize].clone()])?;
                }
            }
            Ok(())
        })
    }

    fn broadcast(&mut self, from: u32, bytes: &mut [u8]) -> Result<(), RankError> {
        check_rank(self.place, from)?;
        self.run(Collective::Broadcast, |sockets, collective| match sockets.place.rank {
            0 => {
                if from != 0 {
                    sockets.receive(from, from, collective, bytes)?;
                }
                let mut others = sockets.others().filter(|&to| to != from);
                others.try_for_each(|to| sockets.send(to, collective, bytes))
            }
            rank if rank == from => sockets.send(0, collective, bytes),
            _ => sockets.receive(0, from, collective, bytes),
        })
    }

    fn agree(&mut self, numbers: &mut [i64]) -> Result<(), RankError> {
        self.run(Collective::Agree, |sockets, collective| {
            let mut bytes: Vec<u8> =
                numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            if sockets.is_first() {
                let mut theirs = vec![0; bytes.len()];
                for rank in sockets.others() {
                    sockets.receive(rank, rank, collective, &mut theirs)?;
                    for (number, theirs) in numbers.iter_mut().zip(theirs.as_chunks().0) {
                        *number = (*number).max(i64::from_le_bytes(*theirs));
                    }
                }
                bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                return sockets.others().try_for_each(|to| sockets.send(to, collective, &bytes));
            }
            sockets.send(0, collective, &bytes)?;
            sockets.receive(0, 0, collective, &mut bytes)?;
            for (number, agreed) in numbers.iter_mut().zip(bytes.as_chunks().0) {
                *number = i64::from_le_bytes(*agreed);
            }
            Ok(())
        })
    }

    fn barrier(&mut self) -> Result<(), RankError> {
        self.run(Collective::Barrier, |sockets, collective| {
            if !sockets.is_first() {
                sockets.send(0, collective, &[])?;
                return sockets.receive(0, 0, collective, &mut []);
            }
            for rank in sockets.others() {
                sockets.receive(rank, rank, collective, &mut [])?;
            }
            sockets.others().try_for_each(|to| sockets.send(to, collective, &[]))
        })
    }

    fn abort(&mut self, reason: &str) {
        let rank = self.place.rank;
        if self.failure.is_none() {
            self.fail(RankError::Aborted { rank, reason: reason.to_owned() });
        }
        last_words(&format!("storm: rank {rank}: {reason}. All ranks end\n"));
        end_process(1)
    }
}
