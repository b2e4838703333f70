//! What a cubin says of its kernels: an ELF file whose `.nv.info` section lists, per kernel, its
//! registers and the bytes of its stack frame, and which has a section for each kernel's static
//! shared memory. Spilled registers and arrays that are not in registers live in the stack frame, in
//! local memory, which is device memory.

use std::collections::BTreeMap;

/// `EIATTR_FRAME_SIZE`: pairs of symbol index and bytes.
const FRAME_SIZE: u8 = 0x11;
/// `EIATTR_REGCOUNT`: pairs of symbol index and registers of a thread.
const REGISTERS: u8 = 0x2f;
/// `EIFMT_SVAL`: the attribute's bytes follow its 16-bit length.
const SIZED: u8 = 0x04;

/// A section of the file.
struct Section<'a> {
    name: &'a str,
    /// The section that this one refers to; of a symbol table, its names.
    link: usize,
    bytes: &'a [u8],
    /// More than `bytes` has where the section takes no room in the file.
    size: usize,
}

/// A kernel.
pub(crate) struct Kernel {
    pub(crate) name: String,
    /// Stack frame of a thread.
    pub(crate) frame_bytes: u32,
    /// Registers of a thread.
    pub(crate) registers: u32,
    /// Static shared memory of a block. From sm_90 on, with what the system keeps for itself.
    pub(crate) shared_bytes: usize,
}

/// The file's kernels by name, or nothing if the file is not as expected.
pub(crate) fn kernels(cubin: &[u8]) -> Option<Vec<Kernel>> {
    let sections = sections(cubin)?;
    let symbols = sections.iter().find(|section| section.name == ".symtab")?;
    let names = sections.get(symbols.link)?.bytes;
    let info = sections.iter().find(|section| section.name == ".nv.info")?;
    let (mut frames, mut registers) = (BTreeMap::new(), BTreeMap::new());
    let mut at = 0;
    while at + 4 <= info.bytes.len() {
        let (format, attribute) = (info.bytes[at], info.bytes[at + 1]);
        let length = if format == SIZED { u16_at(info.bytes, at + 2)? } else { 0 };
        let found = match attribute {
            FRAME_SIZE => Some(&mut frames),
            REGISTERS => Some(&mut registers),
            _ => None,
        };
        if let (SIZED, Some(found)) = (format, found) {
            let symbol = u32_at(info.bytes, at + 4)? as usize * SYMBOL_BYTES;
            let name = string_at(names, u32_at(symbols.bytes, symbol)? as usize)?;
            found.insert(name.to_owned(), u32_at(info.bytes, at + 8)?);
        }
        at += 4 + length;
    }
    let kernel = |(name, frame_bytes): (String, u32)| {
        let shared = format!(".nv.shared.{name}");
        let shared = sections.iter().find(|section| section.name == shared);
        Kernel {
            frame_bytes,
            registers: registers.get(&name).copied().unwrap_or(0),
            shared_bytes: shared.map_or(0, |section| section.size),
            name,
        }
    };
    Some(frames.into_iter().map(kernel).collect())
}

/// Of an entry of a 64-bit symbol table.
const SYMBOL_BYTES: usize = 24;

/// The sections of a 64-bit little-endian ELF file.
fn sections(file: &[u8]) -> Option<Vec<Section<'_>>> {
    let table = u64_at(file, 0x28)?;
    let (entry, count, names) = (u16_at(file, 0x3a)?, u16_at(file, 0x3c)?, u16_at(file, 0x3e)?);
    let header = |index: usize| table + index * entry;
    let size = |index: usize| u64_at(file, header(index) + 32);
    let bytes = |index: usize| {
        let (offset, size) = (u64_at(file, header(index) + 24)?, size(index)?);
        // Sections that take no room in the file have a size all the same.
        let absent = u32_at(file, header(index) + 4)? == NO_BITS;
        file.get(offset..offset + if absent { 0 } else { size })
    };
    let names = bytes(names)?;
    (0..count)
        .map(|index| {
            let name = string_at(names, u32_at(file, header(index))? as usize)?;
            let link = u32_at(file, header(index) + 40)? as usize;
            Some(Section { name, link, bytes: bytes(index)?, size: size(index)? })
        })
        .collect()
}

/// `SHT_NOBITS`.
const NO_BITS: u32 = 8;

fn string_at(bytes: &[u8], at: usize) -> Option<&str> {
    let text = bytes.get(at..)?.split(|&byte| byte == 0).next()?;
    std::str::from_utf8(text).ok()
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_le_bytes(array_at(bytes, at)?)))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(array_at(bytes, at)?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(array_at(bytes, at)?)).ok()
}
