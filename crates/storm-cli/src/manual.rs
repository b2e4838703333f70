//! `storm completions` and `storm man`, generated from the definitions of the command line.

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::{Shell, generate};
use clap_mangen::Man;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use storm_files::replace_file;

#[derive(Args)]
#[command(
    after_help = "bash: storm completions bash > ~/.local/share/bash-completion/completions/storm
zsh:  storm completions zsh > \"${fpath[1]}/_storm\"
fish: storm completions fish > ~/.config/fish/completions/storm.fish"
)]
pub(crate) struct CompletionsArgs {
    /// Shell.
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Args)]
#[command(
    after_help = "To read a page: man DIR/storm-train.1. If DIR is MAN/man1: man -M MAN storm-train"
)]
pub(crate) struct ManArgs {
    /// Folder to write `storm.1`, `storm-train.1` and the others to; existing pages are replaced.
    dir: PathBuf,
}

/// Prints the completion script.
pub(crate) fn completions(args: &CompletionsArgs, mut command: Command) {
    let mut script = Vec::new();
    generate(args.shell, &mut command, "storm", &mut script);
    // Write raw: `println!` would wrap lines on a terminal. Ignore a closed pipe.
    let _ = std::io::stdout().write_all(&script);
}

/// Writes a man page for every command.
pub(crate) fn man(args: &ManArgs, command: Command) -> Result<()> {
    let dir = &args.dir;
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    pages(&command, dir)
}

fn pages(command: &Command, dir: &Path) -> Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        pages(below, dir)?;
    }
    let page = Man::new(command.clone());
    let path = dir.join(page.get_filename());
    replace_file(&path, |out| page.render(out))
        .with_context(|| format!("cannot write {}", path.display()))
}
