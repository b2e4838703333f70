//! The address on which rank 0 listens.

use crate::hello::{Token, connect, host_name, new_token};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Instant;

/// The address on which rank 0 listens. The other ranks learn it through a rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
    token: Token,
}

impl Address {
    /// Encodes the address as a message.
    pub fn to_bytes(&self) -> Vec<u8> {
        [self.token.as_slice(), &self.port.to_le_bytes(), self.host.as_bytes()].concat()
    }

    /// Decodes a message. `None` if it is not a valid address.
    pub fn from_bytes(bytes: &[u8]) -> Option<Address> {
        let (token, rest) = bytes.split_first_chunk()?;
        let (port, host) = rest.split_first_chunk()?;
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b".-_".contains(byte);
        if host.is_empty() || host.len() > 255 || !host.iter().all(is_name) {
            return None;
        }
        let host = std::str::from_utf8(host).ok()?.to_owned();
        Some(Address { host, port: u16::from_le_bytes(*port), token: *token })
    }

    /// Listens on a port assigned by the system. The listener is nonblocking.
    pub(crate) fn listen() -> io::Result<(TcpListener, Address)> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        Ok((listener, Address { host: host_name(), port, token: new_token()? }))
    }

    /// Connects rank `rank` to rank 0.
    pub(crate) fn connect(&self, rank: u32, deadline: Instant) -> io::Result<TcpStream> {
        connect(&self.hosts(), self.port, &self.token, rank, deadline)
    }

    /// The port.
    #[cfg(test)]
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The token that each connection must start with.
    pub(crate) fn token(&self) -> &Token {
        &self.token
    }

    /// Host names of rank 0's machine, in the order to try them.
    fn hosts(&self) -> Vec<String> {
        match self.host == host_name() {
            true => vec![Ipv4Addr::LOCALHOST.to_string(), self.host.clone()],
            false => vec![self.host.clone()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        let address = Address { host: "node-1.example".to_owned(), port: 4711, token: [7; 16] };
        let bytes = address.to_bytes();
        assert_eq!(Address::from_bytes(&bytes), Some(address));
        for length in 0..=18 {
            assert_eq!(Address::from_bytes(&bytes[..length]), None);
        }
        assert_eq!(Address::from_bytes(&[bytes.as_slice(), b"/\n"].concat()), None);
        assert_eq!(Address::from_bytes(&[bytes.as_slice(), &[b'a'; 300]].concat()), None);
    }
}
