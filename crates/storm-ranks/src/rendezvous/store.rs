//! A client of PyTorch's `TCPStore`, which `torchrun` runs for the processes that it starts.
//!
//! A connection starts with a magic number. A query is a byte for its kind, followed by its
//! arguments. Lengths and numbers have 64 bits in native byte order. Answers are not trusted: their
//! length is limited, and every read has a deadline.

use super::{MESSAGE_BYTES_MAX, RendezvousError, port, required};
use crate::launch::{Launch, Launcher, Variables};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const WAIT: u8 = 6;

const MAGIC: u32 = 0x3C85_F7CE;

/// The answer to [`WAIT`] once the key is set.
const STOP_WAITING: u8 = 0;

/// The address of `torchrun`'s store, and the key prefix of this run.
pub struct StoreMeeting {
    host: String,
    port: u16,
    prefix: String,
    time: Duration,
}

impl StoreMeeting {
    pub(super) fn new(
        variables: &Variables,
        time: Duration,
    ) -> Result<StoreMeeting, RendezvousError> {
        let launcher = Launcher::Torchrun;
        let required = |variable| required(launcher, variables, variable);
        if variables.get("TORCHELASTIC_USE_AGENT_STORE").map(String::as_str) != Some("True") {
            return Err(RendezvousError::NoAgentStore);
        }
        // A run restarted by torchrun has the same store, which still contains the old messages.
        let restarts = required("TORCHELASTIC_RESTART_COUNT")?;
        let run = required("TORCHELASTIC_RUN_ID")?;
        Ok(StoreMeeting {
            host: required("MASTER_ADDR")?.to_owned(),
            port: port(launcher, "MASTER_PORT", required("MASTER_PORT")?)?,
            prefix: format!("storm/{run}/{restarts}"),
            time,
        })
    }

    pub(super) fn share(
        &self,
        launch: &Launch,
        name: &str,
        message: &[u8],
    ) -> Result<Vec<u8>, RendezvousError> {
        let deadline = Instant::now() + self.time;
        let key = format!("{}/{name}", self.prefix);
        let shared = Store::connect(&self.host, self.port, deadline).and_then(|mut store| {
            if launch.rank == 0 {
                store.set(&key, message)?;
            }
            store.get(&key, MESSAGE_BYTES_MAX)
        });
        let fail =
            |source| RendezvousError::Store { host: self.host.clone(), port: self.port, source };
        shared.map_err(fail)
    }
}

/// A connection to a store.
struct Store {
    stream: TcpStream,
    deadline: Instant,
}

impl Store {
    fn connect(host: &str, port: u16, deadline: Instant) -> io::Result<Store> {
        let mut last = io::Error::other("the host has no address");
        for address in (host, port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, left(deadline)?) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    let mut store = Store { stream, deadline };
                    store.send(VALIDATE, &MAGIC.to_ne_bytes())?;
                    return Ok(store);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn set(&mut self, key: &str, value: &[u8]) -> io::Result<()> {
        self.send(SET, &[with_length(key.as_bytes()), with_length(value)].concat())
    }

    /// Waits for a key and returns its value.
    fn get(&mut self, key: &str, bytes_max: usize) -> io::Result<Vec<u8>> {
        let key = with_length(key.as_bytes());
        self.send(WAIT, &[1u64.to_ne_bytes().as_slice(), &key].concat())?;
        let mut answer = [0];
        self.receive(&mut answer)?;
        if answer[0] != STOP_WAITING {
            return Err(io::Error::other("it stopped waiting for the first rank"));
        }
        self.send(GET, &key)?;
        let mut length = [0; 8];
        self.receive(&mut length)?;
        let length = u64::from_ne_bytes(length);
        if length > bytes_max as u64 {
            return Err(io::Error::other(format!(
                "its answer has {length} bytes, more than {bytes_max}"
            )));
        }
        let mut value = vec![0; length as usize];
        self.receive(&mut value)?;
        Ok(value)
    }

    fn send(&mut self, query: u8, arguments: &[u8]) -> io::Result<()> {
        self.stream.set_write_timeout(Some(left(self.deadline)?))?;
        self.stream.write_all(&[&[query], arguments].concat())
    }

    /// Reads exactly this many bytes. The deadline applies to the whole read.
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        while at < bytes.len() {
            self.stream.set_read_timeout(Some(left(self.deadline)?))?;
            match self.stream.read(&mut bytes[at..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => at += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(late()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn with_length(bytes: &[u8]) -> Vec<u8> {
    [(bytes.len() as u64).to_ne_bytes().as_slice(), bytes].concat()
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late()) } else { Ok(left) }
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the first rank's message did not come in time")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_secs(600);

    /// Starts a server that sends these bytes to its first client. Returns the value that the
    /// client gets.
    fn answer_with(bytes: Vec<u8>, time: Duration) -> io::Result<Vec<u8>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            // Wait until the client disconnects.
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let got = Store::connect("127.0.0.1", port, Instant::now() + time)
            .and_then(|mut store| store.get("key", 1000));
        server.join().unwrap();
        got
    }

    #[test]
    fn answers_are_checked() {
        let good = [&[STOP_WAITING], with_length(b"value").as_slice()].concat();
        assert_eq!(answer_with(good.clone(), LONG).unwrap(), b"value");
        for length in 0..good.len() {
            let error = answer_with(good[..length].to_vec(), LONG).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{length}");
        }
        assert!(answer_with(vec![1], LONG).is_err());
        // A length that would exhaust memory.
        for length in [1001, 1 << 40, u64::MAX] {
            let bytes = [&[STOP_WAITING], length.to_ne_bytes().as_slice()].concat();
            let error = answer_with(bytes, LONG).unwrap_err().to_string();
            assert!(error.contains("more than 1000"), "{error}");
        }
    }

    #[test]
    fn a_store_that_says_nothing_is_left() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut store =
            Store::connect("127.0.0.1", port, Instant::now() + Duration::from_millis(100)).unwrap();
        assert_eq!(store.get("key", 10).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn variables_are_checked() {
        let all = [
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ];
        let meeting = |changed: &str, value: Option<&str>| {
            let mut variables: Variables =
                all.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
            variables.remove(changed);
            variables.extend(value.map(|value| (changed.to_owned(), value.to_owned())));
            StoreMeeting::new(&variables, LONG)
        };
        assert!(meeting("", None).is_ok());
        for (name, _) in all {
            assert!(meeting(name, None).is_err(), "{name}");
            assert!(meeting(name, Some("")).is_err(), "{name}");
        }
        assert!(matches!(
            meeting("TORCHELASTIC_USE_AGENT_STORE", Some("False")),
            Err(RendezvousError::NoAgentStore)
        ));
        for port in ["0", "65536", "-1", "29500x"] {
            assert!(meeting("MASTER_PORT", Some(port)).is_err(), "{port}");
        }
    }
}
