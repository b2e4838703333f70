//! Stands in for the crate `paste`, which nobody keeps any more and `tokenizers` asks for.

pub use pastey::paste;
