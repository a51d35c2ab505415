//! Manual pages and completions of a program, from its command line.

use std::fs;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;

/// `man1/NAME.1` with one page more for each sub-command, and `completions/` for bash, zsh, fish.
pub fn write(mut command: Command, directory: &Path) -> io::Result<()> {
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
