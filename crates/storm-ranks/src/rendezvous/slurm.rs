//! Rendezvous for the ranks of a Slurm step, at a port on the step's first host. The port is
//! derived from the job and step IDs.
//!
//! Slurm gives its processes no shared secret, so the token is also derived from these IDs. It
//! keeps runs apart but does not stop an attacker on the cluster's network. Neither do NCCL's own
//! connections.

use super::{MESSAGE_BYTES_MAX, RendezvousError, port, required};
use crate::hello::{Token, connect, hear};
use crate::launch::{Launch, Launcher, Variables};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Overrides the port, if the derived one is taken.
const PORT_VARIABLE: &str = "STORM_RENDEZVOUS_PORT";

/// Below the usual range of ephemeral ports.
const PORTS: Range<u16> = 20_000..32_000;

/// How often rank 0 polls for new connections.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);

/// The rendezvous of a Slurm step.
pub struct SlurmMeeting {
    /// The first host of the step.
    host: String,
    /// This process's host, as Slurm names it.
    own_host: String,
    port: u16,
    /// Job and step IDs.
    run: String,
    time: Duration,
}

impl SlurmMeeting {
    pub(super) fn new(
        variables: &Variables,
        time: Duration,
    ) -> Result<SlurmMeeting, RendezvousError> {
        let launcher = Launcher::Slurm;
        let required = |variable| required(launcher, variables, variable);
        let variable = "SLURM_STEP_NODELIST";
        let list = required(variable)?;
        let host = first_host(list).ok_or_else(|| {
            let list: String = list.chars().take(80).collect();
            RendezvousError::Variable {
                launcher,
                variable,
                problem: format!("`{list}`, not a list of hosts"),
            }
        })?;
        let run = format!("{}.{}", required("SLURM_JOB_ID")?, required("SLURM_STEP_ID")?);
        let port = match variables.get(PORT_VARIABLE) {
            Some(value) => port(launcher, PORT_VARIABLE, value)?,
            None => PORTS.start + (hash(&run, 0) % PORTS.len() as u64) as u16,
        };
        let own_host = required("SLURMD_NODENAME")?.to_owned();
        Ok(SlurmMeeting { host, own_host, port, run, time })
    }

    pub(super) fn share(
        &self,
        launch: &Launch,
        name: &str,
        message: &[u8],
    ) -> Result<Vec<u8>, RendezvousError> {
        let deadline = Instant::now() + self.time;
        let token = token(&format!("{}/{name}", self.run));
        if launch.rank == 0 {
            self.give(launch.ranks, &token, message, deadline)?;
            return Ok(message.to_vec());
        }
        let stream =
            connect(std::slice::from_ref(&self.host), self.port, &token, launch.rank, deadline);
        stream.and_then(|stream| take(&stream)).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> RendezvousError {
        RendezvousError::Port { host: self.host.clone(), port: self.port, source }
    }

    /// Rank 0's part: sends the message to every other rank, which connects once.
    fn give(
        &self,
        ranks: u32,
        token: &Token,
        message: &[u8],
        deadline: Instant,
    ) -> Result<(), RendezvousError> {
        if self.own_host != self.host {
            let (host, first) = (self.own_host.clone(), self.host.clone());
            return Err(RendezvousError::NotFirstHost { host, first });
        }
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, self.port))
            .map_err(|source| self.failed(source))?;
        listener.set_nonblocking(true).map_err(|source| self.failed(source))?;
        let mut is_told = vec![false; ranks as usize];
        is_told[0] = true;
        while is_told.contains(&false) {
            match listener.accept() {
                // Not a rank, or a rank that disconnected. A rank will connect again.
                Ok((stream, _)) => match tell(&stream, token, ranks, message) {
                    Ok(rank) => is_told[rank as usize] = true,
                    Err(_) => continue,
                },
                Err(_) if Instant::now() < deadline => std::thread::sleep(ACCEPT_INTERVAL),
                Err(_) => {
                    let missing = is_told.iter().filter(|is_told| !**is_told).count() as u32;
                    return Err(RendezvousError::Missing { missing, ranks, time: self.time });
                }
            }
        }
        Ok(())
    }
}

/// Sends the message to one rank and waits for its acknowledgment.
fn tell(mut stream: &TcpStream, token: &Token, ranks: u32, message: &[u8]) -> io::Result<u32> {
    let rank = hear(stream, token, ranks)?;
    stream.write_all(&(message.len() as u32).to_le_bytes())?;
    stream.write_all(message)?;
    stream.read_exact(&mut [0])?;
    Ok(rank)
}

/// The other ranks' part: receives the message on an open connection.
fn take(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::other(format!("a message of {length} bytes")));
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message)?;
    stream.write_all(&[1])?;
    Ok(message)
}

/// The first host of a Slurm host list: `gpu003` for `gpu[003-007,9],login1`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.chars();
    while let Some(next) = rest.next() {
        match next {
            ',' => break,
            '[' => {
                let (inside, after) = rest.as_str().split_once(']')?;
                let first = inside.split([',', '-']).next()?;
                if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                host.push_str(first);
                rest = after.chars();
            }
            _ if next.is_ascii_alphanumeric() || "._-".contains(next) => host.push(next),
            _ => return None,
        }
    }
    (!host.is_empty() && host.len() <= 255).then_some(host)
}

fn token(text: &str) -> Token {
    let mut token = [0; 16];
    token[..8].copy_from_slice(&hash(text, 1).to_le_bytes());
    token[8..].copy_from_slice(&hash(text, 2).to_le_bytes());
    token
}

/// FNV-1a, which is the same on every rank. Each `salt` gives an independent hash.
fn hash(text: &str, salt: u8) -> u64 {
    let bytes = std::iter::once(salt).chain(text.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::Rendezvous;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, host) in [
            ("login1", "login1"),
            ("gpu[003-007,9],login1", "gpu003"),
            ("gpu[7,9-11]", "gpu7"),
            ("a,b", "a"),
            ("rack[1-2]n[03-04].example", "rack1n03.example"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for list in ["", ",a", "gpu[", "gpu[]", "gpu[-3]", "a b", "a;b", "gpu[$x]"] {
            assert_eq!(first_host(list), None, "{list}");
        }
        assert_eq!(first_host(&"a".repeat(300)), None);
    }

    /// Slurm's variables on one machine. Each test gets its own port, assigned by the system just
    /// before.
    fn variables() -> Variables {
        let port = TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port().to_string();
        let pairs = [
            ("SLURM_JOB_ID", "4711"),
            ("SLURM_STEP_ID", "3"),
            ("SLURM_STEP_NODELIST", "localhost"),
            ("SLURMD_NODENAME", "localhost"),
            (PORT_VARIABLE, &port),
        ];
        pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    const LONG: Duration = Duration::from_secs(600);

    fn share(
        variables: &Variables,
        rank: u32,
        time: Duration,
        name: &str,
    ) -> Result<Vec<u8>, RendezvousError> {
        let launch =
            Launch { launcher: Launcher::Slurm, rank, ranks: 4, local_rank: 0, local_ranks: 1 };
        let mut meeting = Rendezvous::of_launcher(&launch, variables, time)?;
        meeting.share(&launch, name, format!("{name} of rank {rank}").as_bytes())
    }

    /// In any order of arrival, and with foreign connections to the same port.
    #[test]
    fn all_ranks_get_the_first_ones_message() {
        let variables = variables();
        let port: u16 = variables[PORT_VARIABLE].parse().unwrap();
        for name in ["id", "address"] {
            std::thread::scope(|scope| {
                let share = |rank| share(&variables, rank, LONG, name).unwrap();
                let ranks: Vec<_> =
                    [3, 1, 0, 2].map(|rank| scope.spawn(move || share(rank))).into();
                // This may connect before, during or after the rendezvous.
                if let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", port)) {
                    let _ = stranger.write_all(&[b'x'; 100]);
                }
                for rank in ranks {
                    assert_eq!(rank.join().unwrap(), format!("{name} of rank 0").as_bytes());
                }
            });
        }
    }

    #[test]
    fn a_taken_port_is_named() {
        let variables = variables();
        let taken = format!("0.0.0.0:{}", variables[PORT_VARIABLE]);
        let _listener = TcpListener::bind(&taken).unwrap();
        let error = share(&variables, 0, LONG, "id").unwrap_err().to_string();
        assert!(
            error.contains(&variables[PORT_VARIABLE]) && error.contains(PORT_VARIABLE),
            "{error}"
        );
    }

    #[test]
    fn ranks_that_do_not_come_are_counted() {
        let error = share(&variables(), 0, Duration::from_millis(50), "id").unwrap_err();
        assert!(matches!(error, RendezvousError::Missing { missing: 3, ranks: 4, .. }), "{error}");
        let error = share(&variables(), 1, Duration::from_millis(50), "id").unwrap_err();
        assert!(matches!(error, RendezvousError::Port { .. }), "{error}");
    }

    #[test]
    fn the_first_rank_must_be_on_the_first_host() {
        let mut variables = variables();
        variables.insert("SLURMD_NODENAME".to_owned(), "other".to_owned());
        assert!(matches!(
            share(&variables, 0, LONG, "id"),
            Err(RendezvousError::NotFirstHost { .. })
        ));
    }

    #[test]
    fn every_variable_is_needed() {
        for name in ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURMD_NODENAME"] {
            let mut variables = variables();
            variables.remove(name);
            let error = share(&variables, 0, LONG, "id").unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn jobs_and_steps_have_ports_of_their_own() {
        let mut variables = variables();
        variables.remove(PORT_VARIABLE);
        let port = |job: u32| {
            let mut variables = variables.clone();
            variables.insert("SLURM_JOB_ID".to_owned(), job.to_string());
            SlurmMeeting::new(&variables, LONG).unwrap().port
        };
        let ports: std::collections::BTreeSet<u16> = (1000..1100).map(port).collect();
        assert!(ports.len() > 95, "{}", ports.len());
        assert!(ports.iter().all(|port| PORTS.contains(port)));
    }
}
