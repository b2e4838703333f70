//! Ranks that are threads of one process: the reference for every other engine.
//!
//! A collective has two phases. Each rank posts a copy of the data it sends on a shared board. Once
//! all parts are posted, each rank takes the data addressed to it. The next collective starts after
//! all ranks have done so.

use crate::engine::{Engine, Place, check_exchange, check_gather, check_rank};
use crate::error::{Collective, RankError};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A rank that is a thread.
pub struct InProcess {
    place: Place,
    board: Arc<Board>,
}

struct Board {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The part that each rank has posted.
    parts: Vec<Option<Part>>,
    /// Number of ranks that have taken their data.
    taken: usize,
    /// Whether each rank has ended.
    ended: Vec<bool>,
    /// The first failure. It fails all ranks.
    failure: Option<RankError>,
}

impl State {
    /// A rank that has not posted its part yet.
    fn missing(&self) -> Option<u32> {
        (0..).zip(&self.parts).find(|(_, part)| part.is_none()).map(|(rank, _)| rank)
    }

    /// A rank that ended without posting its part.
    fn gone(&self) -> Option<u32> {
        let mut ranks = (0..).zip(self.parts.iter().zip(&self.ended));
        ranks.find(|(_, (part, ended))| part.is_none() && **ended).map(|(rank, _)| rank)
    }
}

#[derive(Clone)]
struct Part {
    collective: Collective,
    /// The bytes for each rank.
    bytes: Vec<Arc<[u8]>>,
}

/// Connects `ranks` ranks, one per thread.
pub fn connect(ranks: u32) -> Vec<InProcess> {
    let (parts, ended) = (vec![None; ranks as usize], vec![false; ranks as usize]);
    let state = State { parts, taken: 0, ended, failure: None };
    let board = Arc::new(Board { state: Mutex::new(state), changed: Condvar::new() });
    (0..ranks)
        .map(|rank| InProcess { place: Place { rank, ranks }, board: board.clone() })
        .collect()
}

impl InProcess {
    /// Runs one collective: sends `bytes[i]` to rank `i` and returns the bytes received from each
    /// rank.
    fn run(
        &mut self,
        collective: Collective,
        bytes: Vec<Arc<[u8]>>,
    ) -> Result<Vec<Arc<[u8]>>, RankError> {
        let own = self.place.rank as usize;
        // The previous collective is over once this rank's part has been removed from the board.
        let mut state = self.wait(|state| state.parts[own].is_none())?;
        state.parts[own] = Some(Part { collective, bytes });
        self.board.changed.notify_all();
        drop(state);
        let mut state = self.wait(|state| state.missing().is_none() || state.gone().is_some())?;
        if let Some(rank) = state.gone() {
            return Err(self.fail(state, RankError::Gone { rank }));
        }
        let mut received = Vec::new();
        for (other, part) in (0..).zip(state.parts.iter().flatten()) {
            if part.collective != collective {
                let error = RankError::OutOfStep { collective, other };
                return Err(self.fail(state, error));
            }
            received.push(part.bytes[own].clone());
        }
        state.taken += 1;
        if state.taken == state.parts.len() {
            state.taken = 0;
            state.parts.fill(None);
            self.board.changed.notify_all();
        }
        Ok(received)
    }

    /// Waits until `is_ready` holds or a rank has failed.
    fn wait(&self, is_ready: impl Fn(&State) -> bool) -> Result<MutexGuard<'_, State>, RankError> {
        let state = self.board.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |state: &mut State| state.failure.is_none() && !is_ready(state);
        let state =
            self.board.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(state),
        }
    }

    fn fail(&self, mut state: MutexGuard<'_, State>, error: RankError) -> RankError {
        let error = state.failure.get_or_insert(error).clone();
        self.board.changed.notify_all();
        error
    }

    /// Copies the bytes received from a rank to their destination.
    fn put(
        &self,
        collective: Collective,
        from: u32,
        sent: &[u8],
        to: &mut [u8],
    ) -> Result<(), RankError> {
        if sent.len() != to.len() {
            let error =
                RankError::Length { collective, from, sent: sent.len(), expected: to.len() };
            let state = self.board.state.lock().unwrap_or_else(PoisonError::into_inner);
            return Err(self.fail(state, error));
        }
        to.copy_from_slice(sent);
        Ok(())
    }

    fn same_for_all(&self, bytes: &[u8]) -> Vec<Arc<[u8]>> {
        vec![bytes.into(); self.place.ranks as usize]
    }
}

impl Engine for InProcess {
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
        let collective = Collective::Exchange;
        let bytes = sends.iter().map(|range| send[range.clone()].into()).collect();
        let received = self.run(collective, bytes)?;
        for ((from, sent), range) in (0..).zip(&received).zip(receives) {
            self.put(collective, from, sent, &mut receive[range.clone()])?;
        }
        Ok(())
    }

    fn gather(
        &mut self,
        piece: &[u8],
        all: &mut [u8],
        ranges: &[Range<usize>],
    ) -> Result<(), RankError> {
        check_gather(self.place, all, ranges)?;
        let collective = Collective::Gather;
        let received = self.run(collective, self.same_for_all(piece))?;
        for ((from, sent), range) in (0..).zip(&received).zip(ranges) {
            self.put(collective, from, sent, &mut all[range.clone()])?;
        }
        Ok(())
    }

    fn broadcast(&mut self, from: u32, bytes: &mut [u8]) -> Result<(), RankError> {
        check_rank(self.place, from)?;
        let received = self.run(Collective::Broadcast, self.same_for_all(bytes))?;
        self.put(Collective::Broadcast, from, &received[from as usize], bytes)
    }

    fn agree(&mut self, numbers: &mut [i64]) -> Result<(), RankError> {
        let own: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let received = self.run(Collective::Agree, self.same_for_all(&own))?;
        let mut theirs = vec![0; own.len()];
        for (from, sent) in (0..).zip(&received) {
            self.put(Collective::Agree, from, sent, &mut theirs)?;
            for (number, bytes) in numbers.iter_mut().zip(theirs.as_chunks().0) {
                *number = (*number).max(i64::from_le_bytes(*bytes));
            }
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), RankError> {
        self.run(Collective::Barrier, self.same_for_all(&[])).map(drop)
    }

    fn abort(&mut self, reason: &str) {
        let state = self.board.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.fail(state, RankError::Aborted { rank: self.place.rank, reason: reason.to_owned() });
    }
}

/// Ranks that wait for a rank that was dropped get an error.
impl Drop for InProcess {
    fn drop(&mut self) {
        let mut state = self.board.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ended[self.place.rank as usize] = true;
        self.board.changed.notify_all();
    }
}
