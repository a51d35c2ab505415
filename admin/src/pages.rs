//! Completions, and manual pages.

use std::io;
use std::path::PathBuf;

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
            node_server::pages::write(program, &self.directory)
                .with_context(|| format!("write pages to {}", self.directory.display()))?;
        }
        Ok(Exit::Good)
    }
}

fn programs() -> [Command; 2] {
    [Cli::command(), cluster::command()]
}

#[cfg(test)]
mod tests {
    use std::fs;

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
            "kubectl rdma pods",
            "kubectl rdma status",
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
}
