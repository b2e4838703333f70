//! Detects the launcher, the rank and the number of ranks from environment variables alone.
//!
//! Every launcher has its own variables, and launchers can be nested: `srun` starts a `torchrun`
//! per machine, and `mpirun` starts its daemons with `srun`. The innermost launcher counts.
//! Incomplete or contradictory variables are an error: a process that assumed to be the only one
//! would train alone, next to the others, and write to the same files.

use std::collections::BTreeMap;
use std::fmt;
use thiserror::Error;

/// Upper limit on the number of ranks. A larger number is a mistake.
const RANKS_MAX: u32 = 1 << 20;

/// Environment variables by name.
pub type Variables = BTreeMap<String, String>;

/// The launcher of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// A shell, or anything else that starts a single process.
    Alone,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun` of MPICH, Intel MPI and others that use the Hydra launcher.
    Mpich,
    /// PyTorch's `torchrun`.
    Torchrun,
    /// Slurm's `srun`.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Alone => "no launcher",
            Launcher::OpenMpi => "mpirun of Open MPI",
            Launcher::Mpich => "mpirun of MPICH",
            Launcher::Torchrun => "torchrun",
            Launcher::Slurm => "srun",
        })
    }
}

/// The rank of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The launcher.
    pub launcher: Launcher,
    /// The rank, less than `ranks`.
    pub rank: u32,
    /// Number of ranks, on all machines.
    pub ranks: u32,
    /// The rank within its machine, less than `local_ranks`.
    pub local_rank: u32,
    /// Number of ranks on its machine.
    pub local_ranks: u32,
}

/// Why the rank of this process cannot be determined.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LaunchError {
    /// Some of a launcher's variables are missing.
    #[error(
        "{launcher} seems to have started this process, but {missing} is not set. Start it by the launcher itself, \
         or unset {present} to train with one rank"
    )]
    Missing {
        /// The launcher.
        launcher: Launcher,
        /// The missing variable.
        missing: &'static str,
        /// One that is set.
        present: &'static str,
    },
    /// A variable is not a number, or is out of range.
    #[error("{variable} is `{value}`, not a number {expected}")]
    BadNumber {
        /// The variable's name.
        variable: &'static str,
        /// Its value, shortened.
        value: String,
        /// The expected value.
        expected: String,
    },
    /// Two variables with the same meaning differ.
    #[error(
        "{first} is {first_value}, but {second} is {second_value}: two launchers started this process. Unset the \
         variables of the one that should not count"
    )]
    Contradiction {
        /// The first variable.
        first: &'static str,
        /// Its value.
        first_value: u32,
        /// The second variable.
        second: &'static str,
        /// Its value.
        second_value: u32,
    },
    /// The variables of two MPI launchers are set.
    #[error(
        "the variables of two launchers are set, those of Open MPI ({0}) and those of MPICH ({1}). Start STORM by \
         one of them, outside the other"
    )]
    TwoLaunchers(&'static str, &'static str),
    /// A world size is set, but no launcher is.
    #[error(
        "WORLD_SIZE says that there are {world_size} ranks, but no launcher that STORM knows started this process, \
         so each would train alone. Use torchrun, mpirun or srun, or unset WORLD_SIZE to train with one rank"
    )]
    NoLauncher {
        /// The number of ranks.
        world_size: u32,
    },
    /// The engine and the launcher disagree about the ranks.
    #[error(
        "{launcher} started this process as rank {rank} of {ranks}, but {engine} sees it as rank {seen_rank} of \
         {seen_ranks}. Launcher and library must belong together: {advice}"
    )]
    NotConnected {
        /// The launcher.
        launcher: Launcher,
        /// The rank according to the launcher.
        rank: u32,
        /// The number of ranks according to the launcher.
        ranks: u32,
        /// Name and version of the library.
        engine: String,
        /// The rank according to the library.
        seen_rank: u32,
        /// The number of ranks according to the library.
        seen_ranks: u32,
        /// What to do.
        advice: &'static str,
    },
}

/// The four variables of a launcher.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    ranks: &'static str,
    local_rank: &'static str,
    local_ranks: &'static str,
}

const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    ranks: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_ranks: "OMPI_COMM_WORLD_LOCAL_SIZE",
};

const MPICH: Names = Names {
    launcher: Launcher::Mpich,
    rank: "PMI_RANK",
    ranks: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_ranks: "MPI_LOCALNRANKS",
};

const TORCHRUN: Names = Names {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    ranks: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_ranks: "LOCAL_WORLD_SIZE",
};

/// Set only by `torchrun`.
const TORCHRUN_MARK: &str = "TORCHELASTIC_RUN_ID";

/// Set for processes started by `srun`. A batch script has a rank too, but no step.
const SLURM_MARK: &str = "SLURM_STEP_ID";
const SLURM_RANK: &str = "SLURM_PROCID";
const SLURM_RANKS: &str = "SLURM_STEP_NUM_TASKS";
const SLURM_LOCAL_RANK: &str = "SLURM_LOCALID";
const SLURM_NODE: &str = "SLURM_NODEID";
const SLURM_PER_NODE: &str = "SLURM_STEP_TASKS_PER_NODE";

impl Launch {
    /// A single rank, without a launcher.
    pub const ALONE: Launch =
        Launch { launcher: Launcher::Alone, rank: 0, ranks: 1, local_rank: 0, local_ranks: 1 };

    /// Detects the rank of this process from its environment. Variables that are not UTF-8 are
    /// ignored.
    pub fn of_this_process() -> Result<Launch, LaunchError> {
        Self::detect(&process_variables())
    }

    /// Detects the rank of a process with these variables.
    pub fn detect(variables: &Variables) -> Result<Launch, LaunchError> {
        let source = Source(variables);
        if source.has(TORCHRUN_MARK) {
            return source.launch(&TORCHRUN);
        }
        let has_open_mpi = source.has(OPEN_MPI.rank) || source.has(OPEN_MPI.ranks);
        let has_step = source.has(SLURM_MARK);
        // `srun --mpi=pmi2` sets the first two variables of MPICH's launcher, but not the others.
        let has_mpich = match has_step {
            true => source.has(MPICH.local_rank) || source.has(MPICH.local_ranks),
            false => source.has(MPICH.rank) || source.has(MPICH.ranks),
        };
        let launch = match (has_open_mpi, has_mpich) {
            (true, true) => return Err(LaunchError::TwoLaunchers(OPEN_MPI.rank, MPICH.rank)),
            (true, false) => source.launch(&OPEN_MPI)?,
            (false, true) => source.launch(&MPICH)?,
            (false, false) if has_step => source.slurm_launch()?,
            (false, false) => return source.alone(),
        };
        // Scripts often derive PyTorch's variables from those of mpirun or srun.
        source.agrees(TORCHRUN.rank, launch.rank, &launch)?;
        source.agrees(TORCHRUN.ranks, launch.ranks, &launch)?;
        Ok(launch)
    }

    /// Checks that an engine sees the ranks that the launcher started. `engine` names the library.
    pub fn confirm(
        &self,
        engine: &str,
        rank: u32,
        ranks: u32,
        advice: &'static str,
    ) -> Result<(), LaunchError> {
        if (rank, ranks) == (self.rank, self.ranks) {
            return Ok(());
        }
        Err(LaunchError::NotConnected {
            launcher: self.launcher,
            rank: self.rank,
            ranks: self.ranks,
            engine: engine.to_owned(),
            seen_rank: rank,
            seen_ranks: ranks,
            advice,
        })
    }
}

/// The environment variables of this process.
pub fn process_variables() -> Variables {
    let pairs = std::env::vars_os();
    pairs
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

struct Source<'a>(&'a Variables);

impl Source<'_> {
    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// A number up to `max`, if the variable is set.
    fn number(&self, variable: &'static str, max: u32) -> Result<Option<u32>, LaunchError> {
        let Some(value) = self.0.get(variable) else { return Ok(None) };
        let is_plain = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
        match value.parse().ok().filter(|number| is_plain && *number <= max) {
            Some(number) => Ok(Some(number)),
            None => {
                let value = value.chars().take(40).collect();
                Err(LaunchError::BadNumber { variable, value, expected: format!("up to {max}") })
            }
        }
    }

    fn required(
        &self,
        launcher: Launcher,
        variable: &'static str,
        max: u32,
        present: &'static str,
    ) -> Result<u32, LaunchError> {
        let number = self.number(variable, max)?;
        number.ok_or(LaunchError::Missing { launcher, missing: variable, present })
    }

    /// A number of ranks, which must not be zero.
    fn count(
        &self,
        launcher: Launcher,
        variable: &'static str,
        max: u32,
        present: &'static str,
    ) -> Result<u32, LaunchError> {
        let number = self.required(launcher, variable, max, present)?;
        if number == 0 {
            let expected = format!("from 1 to {max}");
            return Err(LaunchError::BadNumber { variable, value: "0".to_owned(), expected });
        }
        Ok(number)
    }

    fn launch(&self, names: &Names) -> Result<Launch, LaunchError> {
        let all = [names.rank, names.ranks, names.local_rank, names.local_ranks, TORCHRUN_MARK];
        let present = all.into_iter().find(|name| self.has(name)).unwrap_or(names.rank);
        let launcher = names.launcher;
        let ranks = self.count(launcher, names.ranks, RANKS_MAX, present)?;
        let rank = self.required(launcher, names.rank, ranks - 1, present)?;
        let local_ranks = self.count(launcher, names.local_ranks, ranks, present)?;
        let local_rank = self.required(launcher, names.local_rank, local_ranks - 1, present)?;
        Ok(Launch { launcher, rank, ranks, local_rank, local_ranks })
    }

    fn slurm_launch(&self) -> Result<Launch, LaunchError> {
        let launcher = Launcher::Slurm;
        let ranks = self.count(launcher, SLURM_RANKS, RANKS_MAX, SLURM_MARK)?;
        let rank = self.required(launcher, SLURM_RANK, ranks - 1, SLURM_MARK)?;
        let node = self.required(launcher, SLURM_NODE, RANKS_MAX, SLURM_MARK)?;
        let local_ranks = match self.0.get(SLURM_PER_NODE) {
            None => {
                let missing = SLURM_PER_NODE;
                return Err(LaunchError::Missing { launcher, missing, present: SLURM_MARK });
            }
            Some(text) => tasks_of_node(text, node)
                .filter(|count| (1..=ranks).contains(count))
                .ok_or_else(|| LaunchError::BadNumber {
                    variable: SLURM_PER_NODE,
                    value: text.chars().take(40).collect(),
                    expected: format!("of tasks for each node, such as 4(x2),3, with node {node}"),
                })?,
        };
        let local_rank = self.required(launcher, SLURM_LOCAL_RANK, local_ranks - 1, SLURM_MARK)?;
        let launch = Launch { launcher, rank, ranks, local_rank, local_ranks };
        self.agrees(MPICH.rank, rank, &launch)?;
        self.agrees(MPICH.ranks, ranks, &launch)?;
        Ok(launch)
    }

    /// Checks that a variable of another launcher or a script has the same value, if it is set.
    fn agrees(
        &self,
        variable: &'static str,
        expected: u32,
        launch: &Launch,
    ) -> Result<(), LaunchError> {
        let Some(value) = self.number(variable, RANKS_MAX)? else { return Ok(()) };
        if value == expected {
            return Ok(());
        }
        let is_rank = variable == TORCHRUN.rank || variable == MPICH.rank;
        let first = match (launch.launcher, is_rank) {
            (Launcher::OpenMpi, true) => OPEN_MPI.rank,
            (Launcher::OpenMpi, false) => OPEN_MPI.ranks,
            (Launcher::Mpich, true) => MPICH.rank,
            (Launcher::Mpich, false) => MPICH.ranks,
            (_, true) => SLURM_RANK,
            (_, false) => SLURM_RANKS,
        };
        Err(LaunchError::Contradiction {
            first,
            first_value: expected,
            second: variable,
            second_value: value,
        })
    }

    /// The result without a launcher. A world size above 1 means that an unknown launcher set it.
    fn alone(&self) -> Result<Launch, LaunchError> {
        match self.number(TORCHRUN.ranks, RANKS_MAX)? {
            Some(world_size) if world_size > 1 => Err(LaunchError::NoLauncher { world_size }),
            _ => Ok(Launch::ALONE),
        }
    }
}

/// The number of tasks of a node in Slurm's notation: `4(x2),3` means 4, 4 and 3.
fn tasks_of_node(text: &str, node: u32) -> Option<u32> {
    let mut first = 0u32;
    for part in text.split(',') {
        let (count, nodes) = match part.split_once("(x") {
            Some((count, rest)) => (count, rest.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        let count = count.parse().ok()?;
        let end = first.checked_add(nodes)?;
        if (first..end).contains(&node) {
            return Some(count);
        }
        first = end;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(text: &str) -> Result<Launch, LaunchError> {
        let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
        Launch::detect(&pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    fn launch(launcher: Launcher, numbers: [u32; 4]) -> Result<Launch, LaunchError> {
        let [rank, ranks, local_rank, local_ranks] = numbers;
        Ok(Launch { launcher, rank, ranks, local_rank, local_ranks })
    }

    const OMPI: &str = "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                        OMPI_COMM_WORLD_LOCAL_SIZE=4";
    const HYDRA: &str = "PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2";
    const TORCH: &str =
        "TORCHELASTIC_RUN_ID=none RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2";
    const SRUN: &str = "SLURM_STEP_ID=0 SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=11 SLURM_LOCALID=1 SLURM_NODEID=2 \
                        SLURM_STEP_TASKS_PER_NODE=4(x2),3";

    #[test]
    fn every_launcher_is_known_by_its_variables() {
        assert_eq!(detect("PATH=/bin"), Ok(Launch::ALONE));
        assert_eq!(detect("WORLD_SIZE=1 RANK=0"), Ok(Launch::ALONE));
        assert_eq!(detect(OMPI), launch(Launcher::OpenMpi, [5, 8, 1, 4]));
        assert_eq!(detect(HYDRA), launch(Launcher::Mpich, [2, 4, 0, 2]));
        assert_eq!(detect(TORCH), launch(Launcher::Torchrun, [3, 4, 1, 2]));
        assert_eq!(detect(SRUN), launch(Launcher::Slurm, [9, 11, 1, 3]));
    }

    #[test]
    fn the_innermost_launcher_counts() {
        // A batch script is a single process, whatever the size of its job.
        assert_eq!(detect("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=7"), Ok(Launch::ALONE));
        // mpirun starts its daemons with srun, and srun starts a torchrun on each machine.
        assert_eq!(detect(&format!("{SRUN} {OMPI}")), launch(Launcher::OpenMpi, [5, 8, 1, 4]));
        assert_eq!(detect(&format!("{SRUN} {HYDRA}")), launch(Launcher::Mpich, [2, 4, 0, 2]));
        assert_eq!(detect(&format!("{SRUN} {TORCH}")), launch(Launcher::Torchrun, [3, 4, 1, 2]));
        assert_eq!(detect(&format!("{OMPI} {TORCH}")), launch(Launcher::Torchrun, [3, 4, 1, 2]));
        // srun with its own PMI server.
        let pmi = format!("{SRUN} PMI_RANK=9 PMI_SIZE=11");
        assert_eq!(detect(&pmi), launch(Launcher::Slurm, [9, 11, 1, 3]));
        // A script that sets PyTorch's variables.
        let script = format!("{OMPI} RANK=5 WORLD_SIZE=8");
        assert_eq!(detect(&script), launch(Launcher::OpenMpi, [5, 8, 1, 4]));
    }

    /// If any of its variables is missing, a launcher is rejected, and the message names the
    /// variable.
    #[test]
    fn half_of_the_variables_are_refused() {
        for (all, marks) in [
            (OMPI, vec![]),
            (HYDRA, vec![]),
            (TORCH, vec![TORCHRUN_MARK]),
            (SRUN, vec![SLURM_MARK]),
        ] {
            for left_out in all.split_whitespace() {
                let name = left_out.split('=').next().unwrap();
                if marks.contains(&name) {
                    continue;
                }
                let error = detect(&all.replace(left_out, "")).unwrap_err();
                assert!(
                    matches!(&error, LaunchError::Missing { missing, .. } if *missing == name),
                    "{error}"
                );
                assert!(error.to_string().contains(name));
            }
        }
        // Without the marker variable, torchrun's world size belongs to no known launcher.
        assert_eq!(
            detect(&TORCH.replace("TORCHELASTIC_RUN_ID=none", "")),
            Err(LaunchError::NoLauncher { world_size: 4 })
        );
    }

    #[test]
    fn contradictions_are_refused() {
        let contradicts = |text: &str, name: &str| {
            let error = detect(text).unwrap_err();
            let found =
                matches!(&error, LaunchError::Contradiction { second, .. } if *second == name);
            assert!(found, "{error}");
        };
        contradicts(&format!("{OMPI} RANK=4 WORLD_SIZE=8"), "RANK");
        contradicts(&format!("{HYDRA} RANK=2 WORLD_SIZE=8"), "WORLD_SIZE");
        contradicts(&format!("{SRUN} PMI_RANK=0 PMI_SIZE=11"), "PMI_RANK");
        contradicts(&format!("{SRUN} PMI_RANK=9 PMI_SIZE=12"), "PMI_SIZE");
        assert!(matches!(detect(&format!("{OMPI} {HYDRA}")), Err(LaunchError::TwoLaunchers(..))));
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let cases = [
            ("OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_RANK=8"),
            ("OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_RANK=-1"),
            ("OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_RANK=+5"),
            ("OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_RANK="),
            ("OMPI_COMM_WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=0"),
            ("OMPI_COMM_WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=99999999999"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE=4", "OMPI_COMM_WORLD_LOCAL_SIZE=9"),
            ("OMPI_COMM_WORLD_LOCAL_RANK=1", "OMPI_COMM_WORLD_LOCAL_RANK=4"),
        ];
        for (good, bad) in cases {
            let error = detect(&OMPI.replace(good, bad)).unwrap_err();
            assert!(matches!(error, LaunchError::BadNumber { .. }), "{bad}: {error}");
        }
        for bad in ["", "4(x2)", "x", "1,4(x4294967295)", "4(x2", "0(x3)"] {
            let text = SRUN.replace("4(x2),3", bad);
            assert!(matches!(detect(&text), Err(LaunchError::BadNumber { .. })), "{bad}");
        }
        assert_eq!(detect("WORLD_SIZE=2"), Err(LaunchError::NoLauncher { world_size: 2 }));
        assert!(detect("WORLD_SIZE=two").is_err());
    }

    #[test]
    fn an_engine_that_sees_other_ranks_is_refused() {
        let launch = detect(OMPI).unwrap();
        assert_eq!(launch.confirm("MPI", 5, 8, "do this"), Ok(()));
        for (rank, ranks) in [(0, 1), (4, 8), (5, 9)] {
            let error = launch.confirm("MPI", rank, ranks, "do this").unwrap_err().to_string();
            assert!(error.contains("rank 5 of 8") && error.contains("do this"), "{error}");
        }
    }
}
