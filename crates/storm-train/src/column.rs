use crate::batch::sort_rows;
use crate::{Batch, TrainError};
use storm_device::Device;
use storm_exec::{Resident, SlotId, Slots};
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
    /// The columns that a program with these slots reads.
    pub(crate) fn find_all(slots: &Slots) -> Vec<(Column, SlotId)> {
        let named = [
            (Column::Tokens, "tokens".to_owned()),
            (Column::Targets, "targets".to_owned()),
            (Column::Positions, "positions".to_owned()),
            (Column::Segments, "segments".to_owned()),
            (Column::TokenOrder, order_name("tokens")),
            (Column::PositionOrder, order_name("positions")),
        ];
        named.into_iter().filter_map(|(column, name)| Some((column, slots.find(&name)?))).collect()
    }

    /// Copies the column into its slot. Sorted orders are made in `staging`, one entry per row.
    pub(crate) fn write<D: Device>(
        self,
        resident: &mut Resident<D>,
        slot: SlotId,
        batch: &Batch,
        staging: &mut [i32],
    ) -> Result<(), TrainError> {
        match self {
            Column::Tokens => resident.write(slot, &batch.tokens)?,
            Column::Targets => resident.write(slot, &batch.targets)?,
            Column::Positions => resident.write(slot, &batch.positions)?,
            Column::Segments => {
                resident.write(slot, batch.segments.as_deref().unwrap_or_default())?;
            }
            Column::TokenOrder => {
                sort_rows(&batch.tokens, staging);
                resident.write(slot, staging)?;
            }
            Column::PositionOrder => {
                sort_rows(&batch.positions, staging);
                resident.write(slot, staging)?;
            }
        }
        Ok(())
    }
}
