use crate::Batch;
use crate::batch::sort_rows;
use storm_exec::{SlotId, Slots};
use storm_graph::order_name;

/// What a program may read of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Tokens,
    Targets,
    Positions,
    Segments,
    /// Rows sorted by token, for the gradient of the embedding.
    TokenOrder,
    /// Rows sorted by position, for the gradient of learned positions.
    PositionOrder,
}

impl Column {
    /// Every column and the name of the input that it fills.
    fn all() -> [(Column, String); 6] {
        [
            (Column::Tokens, "tokens".to_owned()),
            (Column::Targets, "targets".to_owned()),
            (Column::Positions, "positions".to_owned()),
            (Column::Segments, "segments".to_owned()),
            (Column::TokenOrder, order_name("tokens")),
            (Column::PositionOrder, order_name("positions")),
        ]
    }

    /// The columns that a program with these slots reads.
    pub(crate) fn find_all(slots: &Slots) -> Vec<(Column, SlotId)> {
        let all = Column::all().into_iter();
        all.filter_map(|(column, name)| Some((column, slots.find(&name)?))).collect()
    }

    /// The column that fills an input.
    pub(crate) fn named(name: &str) -> Option<Column> {
        Column::all().into_iter().find(|(_, known)| known == name).map(|(column, _)| column)
    }

    /// The column's entries. Sorted orders are made in `staging`, one entry per row.
    pub(crate) fn entries<'a>(self, batch: &'a Batch, staging: &'a mut [i32]) -> &'a [i32] {
        match self {
            Column::Tokens => &batch.tokens,
            Column::Targets => &batch.targets,
            Column::Positions => &batch.positions,
            Column::Segments => batch.segments.as_deref().unwrap_or_default(),
            Column::TokenOrder => {
                sort_rows(&batch.tokens, staging);
                staging
            }
            Column::PositionOrder => {
                sort_rows(&batch.positions, staging);
                staging
            }
        }
    }
}
