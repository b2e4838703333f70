use crate::{Budget, Tier};
use std::fmt;

/// No plan fits the budget.
#[derive(Clone, Debug, PartialEq)]
pub struct TooSmall {
    /// The given budget.
    pub budget: Budget,
    /// Memory of the smallest plan that works with this much host memory.
    pub min_bytes: Budget,
    /// The largest uses of device memory in the smallest plan, by name.
    pub consumers: Vec<(String, u64)>,
}

/// Number of consumers to report.
const CONSUMERS: usize = 6;

impl fmt::Display for TooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |bytes: &Budget| [bytes[Tier::DEVICE], bytes[Tier::HOST]].map(Size);
        let ([vram, ram], [vram_min, ram_min]) = (of(&self.budget), of(&self.min_bytes));
        let lacks = |tier: Tier| self.min_bytes[tier] > self.budget[tier];
        let [disk_min, disk] = [&self.min_bytes, &self.budget].map(|b| Size(b[Tier::DISK]));
        match lacks(Tier::HOST) {
            true => write!(
                f,
                "with all layers on the device it still takes {ram_min} of host memory and \
                 {vram_min} of device memory; given are {ram} and {vram}"
            )?,
            false if lacks(Tier::DISK) && !lacks(Tier::DEVICE) => {
                write!(f, "it takes at least {disk_min} on disk; given are {disk}")?;
            }
            false => write!(
                f,
                "it takes at least {vram_min} of device memory with {ram} of host memory; given are \
                 {vram}"
            )?,
        }
        if self.budget[Tier::DISK] > 0 && (lacks(Tier::HOST) || lacks(Tier::DEVICE)) {
            write!(f, ", with {disk_min} on disk; given are {disk}")?;
        }
        f.write_str("\nThe smallest plan holds on the device:")?;
        for (name, bytes) in self.consumers.iter().take(CONSUMERS) {
            let size = Size(*bytes).to_string();
            write!(f, "\n  {size:>12}  {name}")?;
        }
        Ok(())
    }
}

/// Formats bytes for display.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 >= 1 << 30 {
            true => write!(f, "{:.2} GiB", self.0 as f64 / f64::from(1 << 30)),
            false => write!(f, "{:.2} MiB", self.0 as f64 / f64::from(1 << 20)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_it_takes() {
        let mut problem = TooSmall {
            budget: Budget::new(1 << 30, 8 << 30),
            min_bytes: Budget::new(3 << 29, 4 << 30),
            consumers: vec![("weights".to_owned(), 1 << 30), ("work area".to_owned(), 1 << 29)],
        };
        assert_eq!(
            problem.to_string(),
            "it takes at least 1.50 GiB of device memory with 8.00 GiB of host memory; given are \
             1.00 GiB\nThe smallest plan holds on the device:\n      1.00 GiB  weights\n    \
             512.00 MiB  work area"
        );
        problem.budget[Tier::HOST] = 1 << 30;
        assert!(problem.to_string().contains("still takes 4.00 GiB of host memory"), "{problem}");
        // With a disk.
        let shown = |problem: &TooSmall| problem.to_string().lines().next().unwrap().to_owned();
        problem.budget = Budget::new(1 << 30, 8 << 30).with(Tier::DISK, 1 << 20);
        problem.min_bytes[Tier::DISK] = 3 << 20;
        assert_eq!(
            shown(&problem),
            "it takes at least 1.50 GiB of device memory with 8.00 GiB of host memory; given are 1.00 GiB, with 3.00 MiB on \
             disk; given are 1.00 MiB"
        );
        problem.budget[Tier::DEVICE] = 2 << 30;
        assert_eq!(shown(&problem), "it takes at least 3.00 MiB on disk; given are 1.00 MiB");
    }
}
