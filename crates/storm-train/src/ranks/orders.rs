//! What the first rank tells the others to do.

/// The most bytes of a message, so that a damaged length takes no memory.
const MESSAGE_BYTES_MAX: u64 = 1 << 40;

/// Some bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its position among those that ranks share.
    pub(super) tensor: u64,
    pub(super) first: u64,
    pub(super) bytes: u64,
}

/// What the first rank tells the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// A message of so many bytes for [`Ranks::hear`](super::Ranks::hear) follows.
    Hear(u64),
    /// The micro-batches of a step follow, in so many bytes.
    Step(u64),
    /// Apply what is pending.
    Flush,
    /// Send what you own of this.
    Read(Part),
    /// This much follows. Keep what is yours.
    Write(Part),
    /// The run is over, with this exit code.
    End(u64),
    /// Look for a file. What it is called and what it holds follows, in so many bytes.
    Look(u64),
    /// Write what you own of a checkpoint. Its folder follows, in so many bytes.
    Save(u64),
}

impl Order {
    /// Bytes of an order.
    pub(super) const BYTES: usize = 1 + 3 * size_of::<u64>();

    pub(super) fn to_bytes(self) -> [u8; Order::BYTES] {
        let (kind, values) = match self {
            Order::Hear(bytes) => (1, [bytes, 0, 0]),
            Order::Step(bytes) => (2, [bytes, 0, 0]),
            Order::Flush => (3, [0; 3]),
            Order::Read(Part { tensor, first, bytes }) => (4, [tensor, first, bytes]),
            Order::Write(Part { tensor, first, bytes }) => (5, [tensor, first, bytes]),
            Order::End(code) => (6, [code, 0, 0]),
            Order::Look(bytes) => (7, [bytes, 0, 0]),
            Order::Save(bytes) => (8, [bytes, 0, 0]),
        };
        let mut bytes = [0; Order::BYTES];
        bytes[0] = kind;
        for (place, value) in bytes[1..].chunks_mut(size_of::<u64>()).zip(values) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    pub(super) fn of_bytes(bytes: &[u8; Order::BYTES]) -> Option<Order> {
        let mut values = bytes[1..].chunks(size_of::<u64>()).map(|value| {
            let mut own = [0; size_of::<u64>()];
            own.copy_from_slice(value);
            u64::from_le_bytes(own)
        });
        let [first, second, third] = [values.next()?, values.next()?, values.next()?];
        let part = Part { tensor: first, first: second, bytes: third };
        match bytes[0] {
            1 if first <= MESSAGE_BYTES_MAX => Some(Order::Hear(first)),
            2 if first <= MESSAGE_BYTES_MAX => Some(Order::Step(first)),
            3 => Some(Order::Flush),
            4 if third <= MESSAGE_BYTES_MAX => Some(Order::Read(part)),
            5 if third <= MESSAGE_BYTES_MAX => Some(Order::Write(part)),
            6 => Some(Order::End(first)),
            7 if first <= MESSAGE_BYTES_MAX => Some(Order::Look(first)),
            8 if first <= MESSAGE_BYTES_MAX => Some(Order::Save(first)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_arrive_as_they_were_sent() {
        let part = Part { tensor: 3, first: 1 << 33, bytes: 17 };
        for order in [
            Order::Hear(5),
            Order::Step(1 << 20),
            Order::Flush,
            Order::Read(part),
            Order::Write(part),
            Order::End(130),
            Order::Look(80),
            Order::Save(1 << 12),
        ] {
            assert_eq!(Order::of_bytes(&order.to_bytes()), Some(order));
        }
        let mut damaged = Order::Hear(u64::MAX).to_bytes();
        assert_eq!(Order::of_bytes(&damaged), None);
        damaged[0] = 77;
        assert_eq!(Order::of_bytes(&damaged), None);
    }
}
