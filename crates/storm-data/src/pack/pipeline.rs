//! Threads that read, encode and write concurrently, in order and with a limit on input in flight.

use super::encode::{Encoded, Encoder};
use super::input::Job;
use super::under_way::UnderWay;
use crate::DataError;
use crate::tokenizer::Tokenizer;
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

type Reply = Result<Encoded, DataError>;

/// A job, and the channel for its result.
type Work = (Job, Sender<Reply>);

/// Reads with `read` on one thread, encodes on `threads`, and writes with `write` on this one, in
/// reading order. The first failure in that order stops everything.
pub(super) fn run<O>(
    threads: usize,
    under_way: &UnderWay,
    read: impl FnOnce(&mut dyn FnMut(Job) -> bool) -> Result<(), DataError> + Send,
    encoder: Encoder<'_, O>,
    mut write: impl FnMut(Encoded) -> Result<(), DataError>,
) -> Result<(), DataError>
where
    O: Fn() -> Result<Tokenizer, DataError> + Sync,
{
    let (work_sender, work_receiver) = sync_channel::<Work>(threads);
    let work_receiver = Mutex::new(work_receiver);
    let (encoder, work_receiver) = (&encoder, &work_receiver);
    thread::scope(move |scope| {
        // Start the encoding threads first: if the system refuses one, dropping `work_sender` stops
        // the others.
        for _ in 0..threads {
            thread::Builder::new()
                .spawn_scoped(scope, move || encode_all(encoder, work_receiver))
                .map_err(no_thread)?;
        }
        // Pending results, in order.
        let (order_sender, order_receiver) = sync_channel::<Receiver<Reply>>(2 * threads);
        let closing = Closing(under_way);
        thread::Builder::new()
            .spawn_scoped(scope, move || read_all(read, under_way, &work_sender, &order_sender))
            .map_err(no_thread)?;
        // Consumed here, so on failure dropping it and `closing` stops the other threads.
        for reply in order_receiver {
            let result = reply.recv().map_err(|_| lost()).flatten();
            let encoded = result?;
            let bytes = encoded.bytes;
            write(encoded)?;
            under_way.leave(bytes);
        }
        drop(closing);
        Ok(())
    })
}

/// Tells the reader that the writer has stopped.
struct Closing<'a>(&'a UnderWay);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn no_thread(source: std::io::Error) -> DataError {
    let problem = format!("the system refuses another thread ({source}); try fewer");
    DataError::Option { option: "threads", problem }
}

fn lost() -> DataError {
    let source = std::io::Error::other("a thread ended before its time");
    DataError::Io { path: Path::new("encoding").to_owned(), source }
}

fn read_all(
    read: impl FnOnce(&mut dyn FnMut(Job) -> bool) -> Result<(), DataError>,
    under_way: &UnderWay,
    work: &SyncSender<Work>,
    order: &SyncSender<Receiver<Reply>>,
) {
    let mut emit = |job: Job| {
        let (sender, receiver) = channel();
        under_way.enter(job.bytes)
            && order.send(receiver).is_ok()
            && work.send((job, sender)).is_ok()
    };
    if let Err(error) = read(&mut emit) {
        let (sender, receiver) = channel();
        // If the channel is closed, something else failed first.
        sender.send(Err(error)).ok();
        order.send(receiver).ok();
    }
}

fn encode_all<O>(encoder: &Encoder<'_, O>, work: &Mutex<Receiver<Work>>)
where
    O: Fn() -> Result<Tokenizer, DataError> + Sync,
{
    let mut tokenizer = None;
    loop {
        let next = match work.lock() {
            Ok(work) => work.recv(),
            Err(_) => return,
        };
        let Ok((job, reply)) = next else { return };
        let opened = match tokenizer.take() {
            Some(tokenizer) => Ok(tokenizer),
            None => encoder.tokenizer(),
        };
        let result = opened.and_then(|opened| {
            let result = encoder.encode(&opened, job);
            tokenizer = Some(opened);
            result
        });
        // Fails if the writer has stopped.
        reply.send(result).ok();
    }
}
