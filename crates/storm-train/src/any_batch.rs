use crate::{Batch, Entries, MicroBatch, NamedInputs, TrainError, TrainOptions};

/// A reusable micro-batch buffer, for any form of data.
#[derive(Clone, Debug, PartialEq)]
pub enum AnyBatch {
    /// Sequences of tokens.
    Tokens(Batch),
    /// Samples of any other kind.
    Columns(NamedInputs),
}

impl Default for AnyBatch {
    /// An empty batch, to be filled by a source.
    fn default() -> AnyBatch {
        AnyBatch::Columns(NamedInputs::default())
    }
}

impl AnyBatch {
    /// The buffer as tokens; another form is replaced.
    pub fn as_tokens(&mut self) -> &mut Batch {
        if !matches!(self, AnyBatch::Tokens(_)) {
            *self = AnyBatch::Tokens(Batch::new(Vec::new(), Vec::new(), 1));
        }
        match self {
            AnyBatch::Tokens(batch) => batch,
            AnyBatch::Columns(_) => unreachable!("it was just made tokens"),
        }
    }

    /// The buffer as named columns; another form is replaced.
    pub fn as_columns(&mut self) -> &mut NamedInputs {
        if !matches!(self, AnyBatch::Columns(_)) {
            *self = AnyBatch::default();
        }
        match self {
            AnyBatch::Columns(columns) => columns,
            AnyBatch::Tokens(_) => unreachable!("it was just made columns"),
        }
    }
}

impl From<Batch> for AnyBatch {
    fn from(batch: Batch) -> AnyBatch {
        AnyBatch::Tokens(batch)
    }
}

impl From<NamedInputs> for AnyBatch {
    fn from(columns: NamedInputs) -> AnyBatch {
        AnyBatch::Columns(columns)
    }
}

impl MicroBatch for AnyBatch {
    fn entries(&self, input: &str) -> Option<Entries<'_>> {
        match self {
            AnyBatch::Tokens(batch) => batch.entries(input),
            AnyBatch::Columns(columns) => columns.entries(input),
        }
    }

    fn counted(&self) -> usize {
        match self {
            AnyBatch::Tokens(batch) => batch.counted(),
            AnyBatch::Columns(columns) => columns.counted(),
        }
    }

    fn units(&self) -> usize {
        match self {
            AnyBatch::Tokens(batch) => batch.units(),
            AnyBatch::Columns(columns) => columns.units(),
        }
    }

    fn check(&self, options: &TrainOptions) -> Result<(), TrainError> {
        match self {
            AnyBatch::Tokens(batch) => batch.check(options),
            AnyBatch::Columns(columns) => columns.check(options),
        }
    }
}
