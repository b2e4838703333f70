//! Compares the ways to a disk: `scratch_ways FOLDER [MIB] [ROUNDS]` measures each in turn, and prints every rate and the medians.

use std::error::Error;
use std::path::Path;
use storm_host::{ScratchFolder, ScratchRates, ScratchWay};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let Some(folder) = words.first() else {
        println!("scratch_ways FOLDER [MIB] [ROUNDS]: measures the disk that the folder is on");
        return Ok(());
    };
    let number = |at: usize, otherwise: u64| words.get(at).map_or(Ok(otherwise), |w| w.parse());
    let (mebibytes, rounds) = (number(1, 512)?, number(2, 7)?);
    let folder = ScratchFolder::open(Path::new(folder))?;
    println!("GB/s                                              read   write    both");
    let mut found: Vec<(String, [f64; 3])> = Vec::new();
    for _ in 0..rounds {
        for way in [ScratchWay::Ring, ScratchWay::Direct] {
            let rates = ScratchRates::measure(&folder, mebibytes << 20, way)?;
            let name = rates.path.to_string();
            let rates = [rates.read, rates.write, rates.both].map(|rate| rate / 1e9);
            show(&name, rates);
            found.push((name, rates));
        }
    }
    let mut names: Vec<&String> = found.iter().map(|(name, _)| name).collect();
    names.sort();
    names.dedup();
    for name in names {
        let median = |of: usize| {
            let mut rates: Vec<f64> =
                found.iter().filter(|(by, _)| by == name).map(|(_, rates)| rates[of]).collect();
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2]
        };
        show(&format!("{name}: median"), [0, 1, 2].map(median));
    }
    Ok(())
}

fn show(name: &str, [read, write, both]: [f64; 3]) {
    println!("{name:<46} {read:>7.2} {write:>7.2} {both:>7.2}");
}
