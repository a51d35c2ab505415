//! Completions, and manual pages of all programs that have a command line.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Command, CommandFactory as _};
use clap_complete::Shell;

use crate::output::{Ended, Exit};
use crate::{Cli, cluster};

/// Prints the completion for a shell.
#[derive(Debug, Args)]
pub(crate) struct Completion {
    /// The shell
    shell: Shell,
}

/// Writes manual pages and completions.
#[derive(Debug, Args)]
pub(crate) struct Pages {
    /// The directory
    directory: PathBuf,
}

impl Completion {
    pub(crate) fn run(&self) -> Ended {
        clap_complete::generate(
            self.shell,
            &mut Cli::command(),
            "rdmactl",
            &mut io::stdout(),
        );
        Ok(Exit::Good)
    }
}

impl Pages {
    pub(crate) fn run(&self) -> Ended {
        for program in programs() {
            write(program, &self.directory)
                .with_context(|| format!("write pages to {}", self.directory.display()))?;
        }
        Ok(Exit::Good)
    }
}

fn programs() -> [Command; 5] {
    [
        Cli::command(),
        cluster::command(),
        rdma_device_plugin::cli::command(),
        rdma_ipam_broker::cli::command(),
        rdma_agent::cli::command(),
    ]
}

/// `man1/NAME.1` with one page more for each sub-command, and `completions/` for bash, zsh, fish.
fn write(mut command: Command, directory: &Path) -> io::Result<()> {
    // Before completions are made, which add the sub-commands "help": their pages would be empty.
    let pages = directory.join("man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(command.clone().disable_help_subcommand(true), &pages)?;
    let completions = directory.join("completions");
    fs::create_dir_all(&completions)?;
    let name = command.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, &name, &completions)?;
    }
    Ok(())
}
#[cfg(test)]
mod tests {
    use super::*;

    /// Commands that print a document, with the commands below them.
    fn commands(command: &Command, name: &str, all: &mut Vec<String>) {
        for sub in command.get_subcommands() {
            let name = format!("{name} {}", sub.get_name());
            if !["completion", "pages", "help", "plan"].contains(&sub.get_name()) {
                all.extend((!sub.is_subcommand_required_set()).then(|| name.clone()));
                commands(sub, &name, all);
            }
        }
    }

    #[test]
    fn each_document_is_described() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md");
        let docs = fs::read_to_string(docs).unwrap();
        let of_clusters = [
            "kubectl rdma COMMAND",
            "kubectl rdma plan",
            "kubectl rdma verify --all",
        ];
        let mut all = of_clusters.map(str::to_owned).to_vec();
        commands(&Cli::command(), "rdmactl", &mut all);
        for name in &all {
            let line = format!("| `{name} --json` |");
            assert!(docs.contains(&line), "docs/json.md has no line {line:?}");
        }
        let described = docs.matches(" --json` |").count();
        assert_eq!(described, all.len(), "one of none");
    }

    #[test]
    fn the_first_help_of_each_program_fits_a_screen() {
        for mut program in programs() {
            let name = program.get_name().to_owned();
            let help = program.render_help().to_string();
            let lines = help.lines().count();
            assert!(lines <= 40, "{name}: {lines} lines\n{help}");
        }
    }

    #[test]
    fn each_sub_command_has_a_page() {
        let command = Command::new("rdma-thing").about("Does a thing").subcommand(
            Command::new("list")
                .about("Who has what")
                .subcommand(Command::new("all")),
        );
        let directory = tempfile::tempdir().unwrap();
        write(command, directory.path()).unwrap();
        let read = |file: &str| fs::read_to_string(directory.path().join(file)).unwrap();
        assert!(read("man1/rdma-thing.1").contains("Does a thing"));
        assert!(read("man1/rdma-thing-list.1").contains("Who has what"));
        let pages = fs::read_dir(directory.path().join("man1")).unwrap();
        assert_eq!(pages.count(), 3, "none for help");
        for file in ["rdma-thing.bash", "_rdma-thing", "rdma-thing.fish"] {
            assert!(
                read(&format!("completions/{file}")).contains("list"),
                "{file}"
            );
        }
    }
}
