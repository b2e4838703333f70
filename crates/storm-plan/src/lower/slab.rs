//! Contiguous tensors, split into pieces, with the copies that move them.

use crate::pack::aligned;

/// Largest copy, so that an urgent one never waits long behind another.
pub(crate) const COPY_BYTES_MAX: usize = 64 << 20;

/// Contiguous tensors with the same layout in every tier.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slab {
    pub(crate) entries: Vec<Entry>,
    pub(crate) size_bytes: usize,
}

/// One tensor of a slab.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) offset: usize,
    pub(crate) size_bytes: usize,
    /// Sizes of its pieces, in order.
    pub(crate) pieces: Vec<usize>,
}

/// A copy of some consecutive pieces.
#[derive(Clone, Debug)]
pub(crate) struct CopyRun {
    /// Offset in the slab.
    pub(crate) offset: usize,
    pub(crate) size_bytes: usize,
    /// Entry, piece, and the piece's offset in the run.
    pub(crate) pieces: Vec<(usize, usize, usize)>,
}

impl Slab {
    /// Adds a tensor in pieces of at most `piece_bytes`.
    pub(crate) fn push(&mut self, size_bytes: usize, piece_bytes: usize) {
        let whole = size_bytes / piece_bytes;
        let mut pieces = vec![piece_bytes; whole];
        if size_bytes > whole * piece_bytes || size_bytes == 0 {
            pieces.push(size_bytes - whole * piece_bytes);
        }
        self.push_pieces(pieces);
    }

    /// Adds a tensor with only some of its pieces; the others are empty.
    pub(crate) fn push_some(
        &mut self,
        size_bytes: usize,
        piece_bytes: usize,
        is_there: impl Fn(usize) -> bool,
    ) {
        self.push(size_bytes, piece_bytes);
        let mut pieces = self.entries.pop().expect("just pushed").pieces;
        self.size_bytes -= aligned(size_bytes);
        let others = pieces.iter_mut().enumerate().filter(|&(piece, _)| !is_there(piece));
        others.for_each(|(_, bytes)| *bytes = 0);
        self.push_pieces(pieces);
    }

    fn push_pieces(&mut self, pieces: Vec<usize>) {
        let size_bytes = pieces.iter().sum();
        self.entries.push(Entry { offset: self.size_bytes, size_bytes, pieces });
        self.size_bytes += aligned(size_bytes);
    }

    /// The same tensors with only some of their pieces; the others are empty. Consecutive pieces stay contiguous.
    pub(crate) fn with_some(&self, is_there: impl Fn(usize, usize) -> bool) -> Slab {
        let mut slab = Slab::default();
        for (e, entry) in self.entries.iter().enumerate() {
            let pieces = entry.pieces.iter().enumerate();
            let bytes = |(p, &bytes): (usize, &usize)| if is_there(e, p) { bytes } else { 0 };
            slab.push_pieces(pieces.map(bytes).collect());
        }
        slab
    }

    /// Copies that move the given entries, with pieces combined up to the size limit.
    pub(crate) fn runs(&self, entries: std::ops::Range<usize>) -> Vec<CopyRun> {
        let pieces = entries.flat_map(|e| (0..self.entries[e].pieces.len()).map(move |p| (e, p)));
        self.runs_of(pieces)
    }

    /// Copies that move the given pieces, which are in order.
    pub(crate) fn runs_of(&self, pieces: impl Iterator<Item = (usize, usize)>) -> Vec<CopyRun> {
        let mut runs: Vec<CopyRun> = Vec::new();
        for (e, p) in pieces {
            let (start, size) = (self.piece_offset(e, p), self.entries[e].pieces[p]);
            if size == 0 {
                continue;
            }
            match runs.last_mut() {
                Some(run)
                    if start + size - run.offset <= COPY_BYTES_MAX
                        && start - (run.offset + run.size_bytes) < crate::pack::ALIGNMENT =>
                {
                    run.pieces.push((e, p, start - run.offset));
                    run.size_bytes = start + size - run.offset;
                }
                _ => {
                    runs.push(CopyRun { offset: start, size_bytes: size, pieces: vec![(e, p, 0)] })
                }
            }
        }
        runs
    }

    /// The offset of a piece in the slab.
    pub(crate) fn piece_offset(&self, entry: usize, piece: usize) -> usize {
        let entry = &self.entries[entry];
        entry.offset + entry.pieces[..piece].iter().sum::<usize>()
    }
}
