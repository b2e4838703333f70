//! Detects lost ranks.
//!
//! Every rank has a connection to rank 0, on which both sides send heartbeats. When a process dies,
//! its operating system closes the connection at once. When a machine dies, the heartbeats stop.
//! Rank 0 tells the others which rank was lost. So all ranks learn of a loss within seconds,
//! whatever they or their launcher are doing.

use crate::address::Address;
use crate::engine::Place;
use crate::hello::{Token, hear};
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Heartbeat.
const BEAT: u8 = 1;
/// The sender has finished normally.
const BYE: u8 = 2;
/// A rank is gone. Its number and the cause follow.
const LOST: u8 = 3;

/// How often rank 0 polls for new connections.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(10);

/// Maximum number of concurrent connections that do not belong to ranks.
const STRANGERS_MAX: usize = 64;

/// Heartbeat interval and timeouts.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Interval between heartbeats.
    pub beat: Duration,
    /// A rank counts as gone after this long without a heartbeat.
    pub silence: Duration,
    /// Timeout for all ranks to connect.
    pub join: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            beat: Duration::from_secs(1),
            silence: Duration::from_secs(8),
            join: Duration::from_secs(60),
        }
    }
}

/// Why a rank counts as gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its connection was closed: the process has ended.
    Closed,
    /// Its heartbeats stopped: its machine or the network is down.
    Silent,
    /// It never connected.
    NeverJoined,
}

impl Cause {
    fn from_byte(byte: u8) -> Option<Cause> {
        [Cause::Closed, Cause::Silent, Cause::NeverJoined]
            .into_iter()
            .find(|cause| *cause as u8 == byte)
    }
}

/// A rank that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The rank.
    pub rank: u32,
    /// Why it counts as gone.
    pub cause: Cause,
}

impl Loss {
    /// The message that reports the loss.
    fn to_word(self) -> [u8; 6] {
        let [a, b, c, d] = self.rank.to_le_bytes();
        [LOST, a, b, c, d, self.cause as u8]
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.rank;
        match self.cause {
            Cause::Closed => write!(f, "rank {rank} has ended before the run did"),
            Cause::Silent => write!(f, "rank {rank} no longer answers"),
            Cause::NeverJoined => write!(f, "rank {rank} did not start"),
        }
    }
}

type OnLoss = Box<dyn FnOnce(Loss) + Send>;

/// Watches the other ranks until `finish`. If dropped earlier, the others count this rank
/// as lost.
pub struct Watch {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    pace: Pace,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// This rank's connections, by rank.
    peers: Vec<Peer>,
    /// Whether losses are no longer reported.
    is_over: bool,
    /// Called on the first loss.
    on_loss: Option<OnLoss>,
    /// The first loss. Ranks that connect later are told about it.
    lost: Option<Loss>,
    /// Threads that read connections, including those that do not belong to ranks.
    readers: Vec<JoinHandle<()>>,
}

enum Peer {
    /// Never connected: the rank itself, or any rank after the watch was dropped.
    None,
    /// Not yet connected.
    Awaited,
    /// Connected.
    Here(TcpStream),
    /// A final message was sent on the connection.
    Finished,
}

impl Peer {
    /// Sends a few bytes. The reader thread detects a closed connection.
    fn send(&self, bytes: &[u8]) {
        if let Peer::Here(stream) = self {
            let mut stream: &TcpStream = stream;
            let _ = stream.write_all(bytes);
        }
    }

    /// Tells the peer that this rank has finished, or acknowledges that the peer has. A rank that
    /// is not connected yet is told when it connects.
    fn say_bye(&mut self) {
        self.send(&[BYE]);
        if let Peer::Here(stream) = self {
            let _ = stream.shutdown(Shutdown::Write);
            *self = Peer::Finished;
        }
    }
}

impl Watch {
    /// Starts the watch of rank 0, which listens for the others. `on_loss` runs at most once, on a
    /// thread of the watch.
    pub fn listen(
        place: Place,
        pace: Pace,
        on_loss: impl FnOnce(Loss) + Send + 'static,
    ) -> io::Result<(Watch, Address)> {
        let (listener, address) = Address::listen()?;
        let awaited =
            (0..place.ranks).map(|rank| if rank == 0 { Peer::None } else { Peer::Awaited });
        let mut watch = Watch::new(pace, awaited.collect(), Box::new(on_loss))?;
        let (shared, token) = (watch.shared.clone(), *address.token());
        watch
            .threads
            .push(spawn("watch-accept", move || accept(&shared, &listener, token, place.ranks))?);
        Ok((watch, address))
    }

    /// Starts the watch of any other rank, which connects to rank 0.
    pub fn join(
        place: Place,
        address: &Address,
        pace: Pace,
        on_loss: impl FnOnce(Loss) + Send + 'static,
    ) -> io::Result<Watch> {
        let deadline = Instant::now() + pace.join;
        let stream = address.connect(place.rank, deadline)?;
        let mut watch = Watch::new(pace, vec![Peer::Here(stream.try_clone()?)], Box::new(on_loss))?;
        let shared = watch.shared.clone();
        watch.threads.push(spawn("watch-read", move || follow(&shared, 0, stream))?);
        Ok(watch)
    }

    fn new(pace: Pace, peers: Vec<Peer>, on_loss: OnLoss) -> io::Result<Watch> {
        let on_loss = Some(on_loss);
        let state = State { peers, is_over: false, on_loss, lost: None, readers: Vec::new() };
        let shared = Arc::new(Shared { pace, state: Mutex::new(state), changed: Condvar::new() });
        let beating = shared.clone();
        let threads = vec![spawn("watch-beat", move || beating.beat())?];
        Ok(Watch { shared, threads })
    }

    /// Stops watching, and tells the others that this rank's exit is not a loss.
    pub fn finish(mut self) {
        let mut state = self.shared.lock();
        state.is_over = true;
        state.on_loss = None;
        for peer in &mut state.peers {
            peer.say_bye();
        }
        self.shared.changed.notify_all();
        drop(state);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // No thread is left that could start more readers.
        let readers = std::mem::take(&mut self.shared.lock().readers);
        for reader in readers {
            let _ = reader.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if !state.is_over {
            state.is_over = true;
            for peer in &mut state.peers {
                match peer {
                    Peer::Here(stream) => drop(stream.shutdown(Shutdown::Both)),
                    // Connections from this rank are no longer accepted.
                    Peer::Awaited => *peer = Peer::None,
                    Peer::None | Peer::Finished => {}
                }
            }
            self.shared.changed.notify_all();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends heartbeats on all connections.
    fn beat(&self) {
        let mut state = self.lock();
        while !state.is_over {
            for peer in &state.peers {
                peer.send(&[BEAT]);
            }
            let waited = self.changed.wait_timeout(state, self.pace.beat);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Reports the first loss to the other ranks and to the owner.
    fn lose(&self, loss: Loss) {
        let mut state = self.lock();
        let Some(on_loss) = state.on_loss.take().filter(|_| !state.is_over) else { return };
        state.lost = Some(loss);
        for (rank, peer) in (0..).zip(&state.peers) {
            if rank != loss.rank {
                peer.send(&loss.to_word());
            }
        }
        drop(state);
        on_loss(loss);
    }
}

/// A message on a connection.
enum Word {
    Beat,
    Bye,
    Lost(Loss),
}

fn read_word(mut stream: &TcpStream) -> io::Result<Word> {
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    match kind[0] {
        BEAT => Ok(Word::Beat),
        BYE => Ok(Word::Bye),
        LOST => {
            let mut rest = [0; 5];
            stream.read_exact(&mut rest)?;
            let [a, b, c, d, cause] = rest;
            let cause = Cause::from_byte(cause).ok_or(ErrorKind::InvalidData)?;
            Ok(Word::Lost(Loss { rank: u32::from_le_bytes([a, b, c, d]), cause }))
        }
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

/// Reads a connection until the peer has finished or a rank is gone.
fn follow(shared: &Shared, rank: u32, stream: TcpStream) {
    let mut has_finished = stream.set_read_timeout(Some(shared.pace.silence)).is_err();
    loop {
        match read_word(&stream) {
            Ok(Word::Beat) => {}
            // Keep reading to the end: closing a connection with unread bytes would discard our
            // reply.
            Ok(Word::Bye) => {
                has_finished = true;
                shared.lock().peers[rank as usize].say_bye();
            }
            Ok(Word::Lost(loss)) => return shared.lose(loss),
            Err(_) if has_finished => return,
            Err(error) => {
                let is_silent = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
                let cause = if is_silent { Cause::Silent } else { Cause::Closed };
                return shared.lose(Loss { rank, cause });
            }
        }
    }
}

/// Rank 0's part: accepts connections until every rank has joined. It continues after this rank has
/// finished, because the others must be told so.
fn accept(shared: &Arc<Shared>, listener: &TcpListener, token: Token, ranks: u32) {
    let deadline = Instant::now() + shared.pace.join;
    let mut strangers = 0;
    loop {
        let mut state = shared.lock();
        let missing = state.peers.iter().position(|peer| matches!(peer, Peer::Awaited));
        let Some(missing) = missing else { return };
        if Instant::now() > deadline {
            drop(state);
            return shared.lose(Loss { rank: missing as u32, cause: Cause::NeverJoined });
        }
        state.readers.retain(|reader| !reader.is_finished());
        let is_crowded = state.readers.len() >= ranks as usize + STRANGERS_MAX;
        if !is_crowded && let Ok((stream, _)) = listener.accept() {
            strangers += 1;
            let of_thread = shared.clone();
            // If no thread can be started, the rank connects again.
            let reader = spawn(&format!("watch-read-{strangers}"), move || {
                welcome(&of_thread, stream, &token, ranks)
            });
            state.readers.extend(reader);
            continue;
        }
        let waited = shared.changed.wait_timeout(state, ACCEPT_INTERVAL);
        drop(waited);
    }
}

/// Reads a handshake. If it comes from a rank that has not joined yet, follows that rank.
fn welcome(shared: &Shared, stream: TcpStream, token: &Token, ranks: u32) {
    let Ok(rank) = hear(&stream, token, ranks) else { return };
    let Ok(copy) = stream.try_clone() else { return };
    let mut state = shared.lock();
    match &mut state.peers[rank as usize] {
        peer @ Peer::Awaited => *peer = Peer::Here(copy),
        // Two processes claim the same rank: the first one wins.
        _ => return,
    }
    if let Some(loss) = state.lost {
        state.peers[rank as usize].send(&loss.to_word());
    }
    if state.is_over {
        state.peers[rank as usize].say_bye();
    }
    shared.changed.notify_all();
    drop(state);
    follow(shared, rank, stream);
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run)
}

/// A callback for [`Watch`] that reports the loss and ends this process. Code that waits for the
/// lost rank cannot prevent this.
pub fn end_on_loss(place: Place) -> impl FnOnce(Loss) + Send + 'static {
    move |loss| {
        let rank = place.rank;
        let advice = "Start the run again to go on from its last checkpoint";
        last_words(&format!("storm: rank {rank}: {loss}, so this rank ends too. {advice}\n"));
        end_process(1)
    }
}

/// Prints a line in a single write: all ranks may print to one terminal at the same moment.
pub(crate) fn last_words(line: &str) {
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Ends this process at once. Exit handlers might wait for other ranks.
pub(crate) fn end_process(code: i32) -> ! {
    // SAFETY: has no preconditions.
    unsafe { libc::_exit(code) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Timeouts too long to occur in a test.
    const PATIENT: Pace = Pace {
        beat: Duration::from_millis(5),
        silence: Duration::from_secs(600),
        join: Duration::from_secs(600),
    };

    /// Starts the watches of all ranks. Returns the losses that they report.
    fn watches(ranks: u32) -> (Vec<Watch>, Receiver<(u32, Loss)>) {
        let (sender, losses) = channel();
        let report = |rank, sender: Sender<_>| move |loss| sender.send((rank, loss)).unwrap();
        let place = |rank| Place { rank, ranks };
        let (first, address) = Watch::listen(place(0), PATIENT, report(0, sender.clone())).unwrap();
        let address = Address::from_bytes(&address.to_bytes()).unwrap();
        let others = (1..ranks).map(|rank| {
            Watch::join(place(rank), &address, PATIENT, report(rank, sender.clone())).unwrap()
        });
        let all = std::iter::once(first).chain(others).collect();
        (all, losses)
    }

    #[test]
    fn every_other_rank_hears_of_a_loss_once() {
        for lost in 0..4 {
            let (mut all, losses) = watches(4);
            drop(all.remove(lost as usize));
            let mut heard: Vec<(u32, Loss)> = (0..3).map(|_| losses.recv().unwrap()).collect();
            heard.sort_by_key(|(rank, _)| *rank);
            let loss = Loss { rank: lost, cause: Cause::Closed };
            let expected: Vec<_> =
                (0..4).filter(|rank| *rank != lost).map(|rank| (rank, loss)).collect();
            assert_eq!(heard, expected);
            drop(all);
            // All senders are gone, and there was no other report.
            assert!(losses.recv().is_err());
        }
    }

    #[test]
    fn ranks_that_finish_in_any_order_are_no_loss() {
        for order in [[0, 0, 0], [2, 1, 0], [1, 0, 0]] {
            let (mut all, losses) = watches(3);
            for next in order {
                all.remove(next).finish();
            }
            assert!(losses.recv().is_err());
        }
    }

    #[test]
    fn a_silent_rank_is_lost() {
        let (sender, losses) = channel();
        let pace = Pace { silence: Duration::from_millis(100), ..PATIENT };
        let place = Place { rank: 0, ranks: 2 };
        let (_watch, address) =
            Watch::listen(place, pace, move |loss| sender.send(loss).unwrap()).unwrap();
        let deadline = Instant::now() + PATIENT.join;
        let _silent = address.connect(1, deadline).unwrap();
        assert_eq!(losses.recv().unwrap(), Loss { rank: 1, cause: Cause::Silent });
    }

    #[test]
    fn a_rank_that_never_comes_is_lost() {
        let (sender, losses) = channel();
        let pace = Pace { join: Duration::from_millis(100), ..PATIENT };
        let place = Place { rank: 0, ranks: 2 };
        let (_watch, _) =
            Watch::listen(place, pace, move |loss| sender.send(loss).unwrap()).unwrap();
        assert_eq!(losses.recv().unwrap(), Loss { rank: 1, cause: Cause::NeverJoined });
    }

    /// Foreign connections cannot take a rank's place, and their messages are ignored.
    #[test]
    fn strangers_are_not_heard() {
        let (sender, losses) = channel();
        let place = Place { rank: 0, ranks: 2 };
        let report = sender.clone();
        let (first, address) =
            Watch::listen(place, PATIENT, move |loss| report.send(loss).unwrap()).unwrap();
        let stranger = |bytes: &[u8]| {
            let mut stream = TcpStream::connect(("localhost", address.port())).unwrap();
            stream.write_all(bytes).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            // A reset connection has no answer either.
            let _ = stream.read_to_end(&mut answer);
            assert_eq!(answer, [0u8; 0]);
        };
        stranger(b"");
        stranger(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n");
        stranger(&[0xff; 4096]);
        let token = [0; 16];
        for rank in [0u32, 1, 2, u32::MAX] {
            stranger(&[b"STORMRK\x01".as_slice(), &token, &rank.to_le_bytes()].concat());
        }
        for rank in [0u32, 2] {
            stranger(&[b"STORMRK\x01".as_slice(), address.token(), &rank.to_le_bytes()].concat());
        }
        let place = Place { rank: 1, ranks: 2 };
        let second =
            Watch::join(place, &address, PATIENT, move |loss| sender.send(loss).unwrap()).unwrap();
        let finishing = std::thread::spawn(|| second.finish());
        first.finish();
        finishing.join().unwrap();
        assert!(losses.recv().is_err());
    }
}
