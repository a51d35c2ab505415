//! What is done to a namespace is written as a command line: `ip` with the namespace given, or
//! - `tc …`;
//! - `sysctl PATH VALUE`, the path below `/proc/sys/net`;
//! - `altname LINK NAME`, also such a name as `ip` would not send.
//!
//! `\xNN` stands for a byte, `{xdp}` and `{classifier}` for object files with a program.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::bounded;
use crate::netns::{Netns, run};
use crate::raw_netlink::{add_altname, index_here};

/// Does this to a namespace; object files are in `directory`.
pub(super) fn perform(directory: &Path, netns: &Netns, commands: &[&str]) -> Result<()> {
    const OTHERS: [&str; 4] = ["tc ", "sysctl ", "altname ", "-"];
    let plain = |command: &&str| {
        !OTHERS.iter().any(|other| command.starts_with(other)) && !command.contains(['\\', '{'])
    };
    if commands.len() > 2 && commands.iter().all(plain) {
        let mut ip = Command::new("ip");
        ip.args(["-netns", netns.name(), "-batch", "-"]);
        let answer = bounded(&mut ip, commands.join("\n").as_bytes())?;
        ensure!(answer.status.success(), "{commands:?}: {}", answer.stderr);
        return Ok(());
    }
    for command in commands {
        one(directory, netns, command).with_context(|| (*command).to_owned())?;
    }
    Ok(())
}

fn one(directory: &Path, netns: &Netns, command: &str) -> Result<()> {
    let mut command = command.to_owned();
    for section in ["xdp", "classifier"] {
        let file = directory.join(section);
        command = command.replace(&format!("{{{section}}}"), &file.to_string_lossy());
    }
    let words: Vec<OsString> = command.split_whitespace().map(bytes_of).collect();
    let text: Vec<&str> = command.split_whitespace().collect();
    match text.as_slice() {
        ["sysctl", path, value] => {
            let path = Path::new("/proc/sys/net").join(path);
            netns.enter(|| fs::write(&path, value).with_context(|| path.display().to_string()))
        }
        ["altname", link, _] => netns.enter(|| {
            let index = index_here(link.as_bytes())?;
            add_altname(
                index,
                words.get(2).map_or(&[], |name| name.as_encoded_bytes()),
            )
        }),
        ["tc", ..] => run(Command::new("tc")
            .args(["-netns", netns.name()])
            .args(words.iter().skip(1)))
        .map(drop),
        _ => run(Command::new("ip")
            .args(["-netns", netns.name()])
            .args(words))
        .map(drop),
    }
}

/// A word of a command line, with `\xNN` as the byte it stands for.
fn bytes_of(word: &str) -> OsString {
    let mut bytes = Vec::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once("\\x") {
        bytes.extend(before.as_bytes());
        let digits = after.get(..2).unwrap_or_default();
        match u8::from_str_radix(digits, 16) {
            Ok(byte) => {
                bytes.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            Err(_) => {
                bytes.extend(b"\\x");
                rest = after;
            }
        }
    }
    bytes.extend(rest.as_bytes());
    OsString::from_vec(bytes)
}
