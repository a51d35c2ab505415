//! Writes the manual pages and completions of the node programs, from their own command lines:
//! `pages DIRECTORY`. The programs know nothing of it, since every byte of a CNI program is read
//! for each interface of a pod.

#![forbid(unsafe_code)]

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;

fn main() -> ExitCode {
    let Some(directory) = std::env::args_os().nth(1) else {
        let _ = writeln!(io::stderr(), "usage: pages DIRECTORY");
        return ExitCode::from(2);
    };
    for program in programs() {
        if let Err(error) = write(program, Path::new(&directory)) {
            let _ = writeln!(
                io::stderr(),
                "write pages to {}: {error}",
                directory.display()
            );
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn programs() -> [Command; 5] {
    [
        rdma_device_plugin::cli::command(),
        rdma_device_plugin::cli::kubectl_command(),
        rdma_netdev::admin::command(),
        ipam::admin::command(),
        rdma_ipam_broker::cli::command(),
    ]
}

/// `man1/NAME.1` with one page more for each sub-command, and `completions/` for bash, zsh, fish.
fn write(mut command: Command, directory: &Path) -> io::Result<()> {
    // Before completions are made, which puts the sub-commands "help" in: their pages would say
    // nothing.
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

    #[test]
    fn each_command_that_prints_json_is_documented() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/JSON.md");
        let docs = fs::read_to_string(docs).unwrap();
        let mut documented = 0;
        for mut program in programs() {
            // Global flags reach the commands when it is built.
            program.build();
            for command in program.get_subcommands() {
                if command.get_arguments().all(|flag| flag.get_id() != "json") {
                    continue;
                }
                if command.get_name() == "help" {
                    continue;
                }
                let name = program.get_bin_name().unwrap_or(program.get_name());
                let line = format!("| `{name} {} --json` |", command.get_name());
                assert!(docs.contains(&line), "docs/JSON.md has no line {line:?}");
                documented += 1;
            }
        }
        assert_eq!(
            docs.matches(" --json` |").count(),
            documented,
            "one of none"
        );
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
