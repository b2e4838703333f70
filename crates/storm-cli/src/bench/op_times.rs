//! Where the time of a micro-batch goes, op by op.

use anyhow::Result;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use storm_device::Device;
use storm_train::{Batch, ReferenceTrainer};

/// Time and calls of each op in forward and backward of one micro-batch, synchronized after each
/// call.
pub(crate) struct OpTimes {
    by_op: BTreeMap<&'static str, (Duration, u32)>,
}

impl OpTimes {
    pub(crate) fn measure<D: Device>(
        trainer: &mut ReferenceTrainer<D>,
        batch: &Batch,
    ) -> Result<OpTimes> {
        let mut by_op: BTreeMap<&'static str, (Duration, u32)> = BTreeMap::new();
        let mut running: Option<(&'static str, Instant)> = None;
        trainer.profile(batch, |next| {
            let now = Instant::now();
            if let Some((op, start)) = running.take() {
                let total = by_op.entry(op).or_default();
                total.0 += now - start;
                total.1 += 1;
            }
            running = next.map(|op| (op, now));
        })?;
        Ok(OpTimes { by_op })
    }

    /// Time of the ops for which `is_counted` holds.
    pub(crate) fn of(&self, is_counted: impl Fn(&str) -> bool) -> Duration {
        let counted = self.by_op.iter().filter(|(op, _)| is_counted(op));
        counted.map(|(_, &(time, _))| time).sum()
    }

    /// Prints a table, longest first.
    pub(crate) fn print(&self) {
        let mut rows: Vec<_> = self.by_op.iter().collect();
        rows.sort_by_key(|&(_, &(time, _))| std::cmp::Reverse(time));
        let whole = self.of(|_| true);
        println!("\n{:<18} {:>6} {:>10} {:>7}", "op", "calls", "ms", "share");
        for (op, (time, calls)) in rows {
            let share = 100.0 * time.as_secs_f64() / whole.as_secs_f64();
            println!("{op:<18} {calls:>6} {:>10.2} {share:>6.1}%", time.as_secs_f64() * 1e3);
        }
    }
}
