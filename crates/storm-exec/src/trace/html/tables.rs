use super::TierLimits;
use super::page::{Cell, Table};
use super::units::{show_bytes, show_ns};
use crate::trace::class_name;
use crate::trace::summary::Summary;
use std::io::{self, Write};
use storm_plan::{PerTier, Plan, Tier};

/// Writes the summary in numbers.
pub(super) fn write(
    plan: &Plan,
    summary: &Summary,
    limits: PerTier<TierLimits>,
    out: &mut impl Write,
) -> io::Result<()> {
    writeln!(out, "<div class=\"tables\">")?;
    for table in
        [queues(summary), stalls(summary), transfers(summary), memory(plan, summary, limits)]
    {
        table.write(out)?;
    }
    writeln!(out, "</div>")
}

fn queues(summary: &Summary) -> Table {
    let row = |queue: &crate::trace::QueueSummary| {
        let busy = show_ns(queue.busy_ns);
        let cells = vec![
            Cell::Text(queue.instructions.to_string()),
            Cell::Text(busy),
            Cell::Share(summary.busy_share(queue.queue)),
        ];
        (queue.name.clone(), cells)
    };
    Table {
        caption: "Queues",
        columns: &["queue", "instructions", "busy", "of the step"],
        rows: summary.queues.iter().map(row).collect(),
    }
}

fn stalls(summary: &Summary) -> Table {
    let row = |stall: &crate::trace::Stall| {
        let share = stall.ns as f64 / summary.total_ns.max(1) as f64;
        (stall.cause.to_string(), vec![Cell::Text(show_ns(stall.ns)), Cell::Share(share)])
    };
    Table {
        caption: "The compute queue stood still",
        columns: &["waiting for", "time", "of the step"],
        rows: summary.stalls.iter().map(row).collect(),
    }
}

fn transfers(summary: &Summary) -> Table {
    let row = |transfer: &crate::trace::TransferSummary| {
        let cells = vec![
            Cell::Text(show_bytes(transfer.bytes)),
            Cell::Text(show_ns(transfer.busy_ns)),
            Cell::Share(transfer.hidden_share()),
        ];
        (format!("{} to the {}", class_name(transfer.class), transfer.link.to), cells)
    };
    Table {
        caption: "Transfers, and how much of their time the compute queue worked",
        columns: &["what", "size", "time", "hidden"],
        rows: summary.transfers.iter().map(row).collect(),
    }
}

fn memory(plan: &Plan, summary: &Summary, limits: PerTier<TierLimits>) -> Table {
    let row = |tier: Tier| {
        let (plan_bytes, limits) = (plan.bytes[tier], limits[tier]);
        let taken_bytes = plan_bytes as u64 + limits.beside_plan_bytes;
        let cells = vec![
            Cell::Text(show_bytes(summary.peak_bytes[tier] as u64)),
            Cell::Text(show_bytes(plan_bytes as u64)),
            Cell::Text(show_bytes(limits.beside_plan_bytes)),
            Cell::Text(show_bytes(limits.budget_bytes)),
            Cell::Share(taken_bytes as f64 / limits.budget_bytes.max(1) as f64),
        ];
        (tier.to_string(), cells)
    };
    Table {
        caption: "Memory",
        columns: &["tier", "in use at most", "plan takes", "besides", "budget", "budget taken"],
        rows: plan.tiers().map(row).collect(),
    }
}
