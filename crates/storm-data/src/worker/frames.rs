//! Frames between a process and its worker: a length, then that many bytes.

use std::io::{self, Read, Write};

/// Frame size limit: enough for the largest tokenizer, or the ids of a batch of texts.
const FRAME_BYTES_MAX: u32 = 512 << 20;

/// Writes a frame and flushes it.
pub(crate) fn write_frame(out: &mut impl Write, parts: &[&[u8]]) -> io::Result<()> {
    put_frame(out, parts)?;
    out.flush()
}

/// Writes a frame without flushing.
pub(crate) fn put_frame(out: &mut impl Write, parts: &[&[u8]]) -> io::Result<()> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let length = u32::try_from(length).ok().filter(|&length| length <= FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::other("more than fits one message"))?;
    out.write_all(&length.to_le_bytes())?;
    parts.iter().try_for_each(|part| out.write_all(part))
}

/// The next frame. `None` at the end.
pub(crate) fn read_frame(input: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match input.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let length = u32::from_le_bytes(length);
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::other("a message that is too long"));
    }
    // Allocate as bytes arrive, not by the announced length.
    let mut bytes = Vec::new();
    input.take(u64::from(length)).read_to_end(&mut bytes)?;
    match bytes.len() == length as usize {
        true => Ok(Some(bytes)),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
