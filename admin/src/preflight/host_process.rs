//! Programs of the host, such as the kubelet. Any pod can have a process of that name.

use std::path::{Path, PathBuf};

use super::context::Context;
use super::engine::{Fact, Unread};
use super::read;

/// A process in the PID and mount namespaces of the host's process 1, whose user is root: its program is
/// a file of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostProcess {
    /// Name and number, for findings.
    pub title: String,
    /// Its directory below `/proc`.
    pub directory: PathBuf,
}

impl super::engine::Object for HostProcess {
    fn name(&self) -> Option<String> {
        Some(self.title.clone())
    }
}

/// Programs of the host with one of these names, of which the kernel keeps fifteen bytes.
pub(super) fn find(context: &Context, names: &[&str]) -> Fact<Vec<HostProcess>> {
    let proc = &context.host.proc;
    let Some(of_host) = namespaces(context, &proc.join("1"))? else {
        return Err(Unread(format!("{} shows no process 1", proc.display())));
    };
    let mut found = Vec::new();
    for pid in read::names(context, proc)?.unwrap_or_default() {
        let directory = proc.join(&pid);
        let name = std::fs::read_to_string(directory.join("comm")).unwrap_or_default();
        let name = name.trim();
        if names.contains(&name)
            && namespaces(context, &directory)?.as_ref() == Some(&of_host)
            && is_roots(context, &directory)?
        {
            let title = format!("{name} ({pid})");
            found.push(HostProcess { title, directory });
        }
    }
    match found.is_empty() {
        true => Err(Unread(format!(
            "no {} of the host is running",
            names.join(" or ")
        ))),
        false => Ok(found),
    }
}

/// PID and mount namespace; `None` of a process that ended.
fn namespaces(context: &Context, process: &Path) -> Fact<Option<[PathBuf; 2]>> {
    let link = |name| link(context, &process.join("ns").join(name));
    Ok(link("pid")?.zip(link("mnt")?).map(<[PathBuf; 2]>::from))
}

fn link(context: &Context, path: &Path) -> Fact<Option<PathBuf>> {
    read::present(context, path, std::fs::read_link(path))
}

/// By the effective user, the second of the line (`proc_pid_status(5)`).
fn is_roots(context: &Context, process: &Path) -> Fact<bool> {
    let status = read::text(context, &process.join("status"))?.unwrap_or_default();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    Ok(users.and_then(|users| users.split_whitespace().nth(1)) == Some("0"))
}
