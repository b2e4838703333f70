//! The handshake on a connection between two ranks: the peer's rank, and a token that proves it
//! belongs to this run.
//!
//! Anyone on the network can connect, so no input is trusted: every field has a fixed size, every
//! read has a timeout, and a connection without the run's token is closed.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// A secret shared by the ranks of one run.
pub(crate) type Token = [u8; 16];

/// Starts every handshake. The last byte is the version.
const MAGIC: [u8; 8] = *b"STORMRK\x01";

/// Timeout for reads and writes of the handshake.
const HELLO_TIME: Duration = Duration::from_secs(5);

/// Delay between connection attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Sends the handshake and waits until the other side has accepted it.
fn say(mut stream: &TcpStream, token: &Token, rank: u32) -> io::Result<()> {
    let mut hello = Vec::with_capacity(28);
    hello.extend_from_slice(&MAGIC);
    hello.extend_from_slice(token);
    hello.extend_from_slice(&rank.to_le_bytes());
    stream.set_read_timeout(Some(HELLO_TIME))?;
    stream.set_write_timeout(Some(HELLO_TIME))?;
    stream.write_all(&hello)?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer)?;
    match answer == MAGIC {
        true => Ok(()),
        false => Err(io::Error::other("something else listens there")),
    }
}

/// Reads and accepts a handshake. Returns the peer's rank. Any other connection is an error.
pub(crate) fn hear(mut stream: &TcpStream, token: &Token, ranks: u32) -> io::Result<u32> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HELLO_TIME))?;
    stream.set_write_timeout(Some(HELLO_TIME))?;
    let mut hello = [0; 28];
    stream.read_exact(&mut hello)?;
    let rank = u32::from_le_bytes([hello[24], hello[25], hello[26], hello[27]]);
    if hello[..8] != MAGIC || hello[8..24] != *token || rank == 0 || rank >= ranks {
        return Err(io::Error::other("not a rank of this run"));
    }
    stream.write_all(&MAGIC)?;
    Ok(rank)
}

/// Connects to rank 0, retrying until the deadline because rank 0 may start later. `hosts` are
/// names or addresses of its machine, tried in order.
pub(crate) fn connect(
    hosts: &[String],
    port: u16,
    token: &Token,
    rank: u32,
    deadline: Instant,
) -> io::Result<TcpStream> {
    loop {
        let mut last = io::Error::other("no address");
        for host in hosts {
            match connect_once(host, port, token, rank, deadline) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        if Instant::now() + RETRY_INTERVAL >= deadline {
            return Err(last);
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

fn connect_once(
    host: &str,
    port: u16,
    token: &Token,
    rank: u32,
    deadline: Instant,
) -> io::Result<TcpStream> {
    let mut last = io::Error::other("it has no address");
    for address in (host, port).to_socket_addrs()? {
        let left =
            deadline.saturating_duration_since(Instant::now()).clamp(RETRY_INTERVAL, HELLO_TIME);
        let said = TcpStream::connect_timeout(&address, left).and_then(|stream| {
            stream.set_nodelay(true)?;
            say(&stream, token, rank)?;
            Ok(stream)
        });
        match said {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Generates a random token for a run.
pub(crate) fn new_token() -> io::Result<Token> {
    let mut token = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut token)?;
    Ok(token)
}

/// The host name of this machine.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
