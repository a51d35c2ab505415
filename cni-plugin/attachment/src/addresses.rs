//! Where an attachment's addresses come from and go to: no IPAM, ours in this process, or any
//! other by exec.

use std::{
    collections::BTreeSet,
    fmt::{Debug, Display},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Instant,
};

use cni_wire::{
    AttachmentId, CniResult, Code, Command, ContainerId, Environment, Error, IfName, NetworkConfig,
    Request, delegate::Delegate, text::bounded,
};

use crate::{
    journal::{Record, record},
    node::Node,
    part::Part,
};

const OWN: &str = "rdma-ipam";
/// The type whose configuration ours reads, too.
const COMPATIBLE: &str = "whereabouts";
/// The names under which this plugin itself is installed.
const SELF: [&str; 2] = ["rdma-netdev", "rdma"];
/// The reference plugin that asks a server over the interface itself.
const DHCP: &str = "dhcp";

#[derive(Debug)]
pub enum Ipam {
    /// None: no addresses are given.
    None,
    Own,
    Other(Delegate),
}

impl Ipam {
    /// The IPAM of a request that asks for addresses, or about them. The network names it, and a
    /// namespace's user may write the network: only what the policy lists in `allow.ipam` runs.
    ///
    /// `whereabouts` is served here only where the node's `whereabouts` is a link to our
    /// `rdma-ipam`: a cluster that runs the real one must not get a second allocator for its
    /// ranges. There it is allowed as ours is.
    ///
    /// # Errors
    /// Code 101: the policy does not list it, or it is this plugin; code 2: it is `dhcp`; code 7: `ipam`
    /// is wrong, or the type is not installed.
    pub fn of(node: &Node, request: &Request) -> Result<Ipam, Error> {
        let Some(kind) = request.config.ipam_type()? else {
            return Ok(Ipam::None);
        };
        let (allowed, path) = (&node.policy.values.allow.ipam, &node.policy.path);
        // What is not listed is not even searched for.
        allowed_by(allowed, path, kind)?;
        match find(kind, &request.env.path)? {
            Ipam::Other(_) if !allowed.iter().any(|known| known == kind) => {
                Err(unlisted(allowed, path, kind))
            }
            found => Ok(found),
        }
    }

    /// The IPAM of a release of which the journal knows nothing: none where the policy does not
    /// allow it, or it is not installed. That is logged. Ours releases in any case.
    pub fn of_release(node: &Node, request: &Request) -> Ipam {
        let kind = request.config.ipam_type().ok().flatten();
        if kind.is_some_and(|kind| matches!(find(kind, &request.env.path), Ok(Ipam::Own))) {
            return Ipam::Own;
        }
        match Ipam::of(node, request) {
            Ok(ipam) => ipam,
            Err(e) => {
                node.log.warn(format_args!("no addresses released: {e}"));
                Ipam::None
            }
        }
    }

    /// Leases the addresses of interfaces, each by its rail where it has one; none without an IPAM. All
    /// or none: nothing stays leased on failure, also when the IPAM itself failed half-way.
    ///
    /// # Errors
    /// The IPAM's; code 6 for an answer without an address; code 7 for an IPAM that gives addresses to
    /// one interface only.
    pub fn add(
        &self,
        node: &Node,
        request: &Request,
        rails: &[Option<u32>],
    ) -> Result<Vec<Option<CniResult>>, Error> {
        let known: Option<Vec<u32>> = rails.iter().copied().collect();
        let leased = self.logged(node, Command::Add, || match self {
            Ipam::None => Ok(vec![None; rails.len()]),
            Ipam::Own => {
                let leased = node.ipam.add(request, known.as_deref())?;
                Ok(leased.into_iter().map(Some).collect())
            }
            Ipam::Other(delegate) => Ok(vec![Some(delegate.add(request)?)]),
        });
        let leased = leased.and_then(|leased: Vec<Option<CniResult>>| {
            check_answer(leased.iter().flatten()).map(|()| leased)
        });
        leased.map_err(|error| self.release_after(node, request, error))
    }

    /// Why it does not give addresses to several interfaces, if so.
    pub fn serves_one(&self) -> Option<Error> {
        match self {
            Ipam::None | Ipam::Own => None,
            Ipam::Other(delegate) => Some(serves_one(delegate.program().display())),
        }
    }

    /// The rails for which the network has ranges; none where it has not one for each.
    pub fn rails(&self, node: &Node, request: &Request) -> Result<Option<BTreeSet<u32>>, Error> {
        match self {
            Ipam::Own => node.ipam.rails(request),
            Ipam::None | Ipam::Other(_) => Ok(None),
        }
    }

    /// Releases what a failed ADD may hold; the first error stays the first.
    pub fn release_after(&self, node: &Node, request: &Request, first: Error) -> Error {
        match self.del(node, request) {
            Ok(()) => first,
            Err(e) if e.msg == first.msg => first,
            Err(e) => first.with_details(format!("its addresses could not be released: {e}")),
        }
    }

    /// Releases all addresses of the attachment.
    pub fn del(&self, node: &Node, request: &Request) -> Result<(), Error> {
        self.start_del(node, request)?
    }

    /// As [`Delegate::start`].
    fn start_del(&self, node: &Node, request: &Request) -> Result<Result<(), Error>, Error> {
        self.logged(node, Command::Del, || match self {
            Ipam::None => Ok(Ok(())),
            Ipam::Own => Ok(node.ipam.del(request)),
            Ipam::Other(delegate) => Ok(match delegate.start(Command::Del, request)? {
                // It does not speak the configuration's version, so it never gave an address.
                Err(e) if e.code == Code::IncompatibleVersion => Ok(()),
                done => done.map(drop),
            }),
        })
    }

    /// CHECK, of several interfaces by their `rails`; STATUS and GC.
    pub fn ask(
        &self,
        node: &Node,
        command: Command,
        request: &Request,
        rails: Option<&[u32]>,
    ) -> Result<(), Error> {
        self.logged(node, command, || match self {
            Ipam::None => Ok(()),
            Ipam::Own => match command {
                Command::Check => node.ipam.check(request, rails),
                Command::Status => node.ipam.status(request),
                Command::Gc => node.ipam.gc(request),
                Command::Add | Command::Del | Command::Version => Ok(()),
            },
            Ipam::Other(delegate) => delegate.call(command, request),
        })
    }

    /// Asks, and logs what was answered.
    fn logged<T: Debug, E: Display>(
        &self,
        node: &Node,
        command: Command,
        ask: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let started = Instant::now();
        let answer = ask();
        let program = match self {
            Ipam::None => return answer,
            Ipam::Own => Path::new(OWN),
            Ipam::Other(delegate) => delegate.program(),
        };
        let (program, command) = (program.display(), command.as_str());
        let micros = started.elapsed().as_micros();
        match &answer {
            Ok(given) => node.log.debug(format_args!(
                "IPAM {program} {command}: {given:?}, {micros} µs"
            )),
            Err(e) => node
                .log
                .debug(format_args!("IPAM {program} {command}: {e}, {micros} µs")),
        }
        answer
    }
}

/// Refuses an answer without an address.
///
/// # Errors
/// Code 6.
pub fn check_answer<'r>(mut leased: impl Iterator<Item = &'r CniResult>) -> Result<(), Error> {
    match leased.any(|result| result.ips.is_empty()) {
        false => Ok(()),
        true => Err(Error::advise(
            Code::Decode,
            "the IPAM answered without an address",
            "set a range in ipam; or leave ipam out for an interface without addresses",
        )),
    }
}

/// What the journal keeps for the release; none without an IPAM.
///
/// # Errors
/// Code 7: `ipam` is wrong.
pub fn note(request: &Request) -> Result<Option<record::Ipam>, Error> {
    let path = request.env.path.iter().filter(|one| one.to_str().is_some());
    Ok(request.config.ipam_type()?.map(|kind| record::Ipam {
        kind: kind.to_owned(),
        config: String::from_utf8_lossy(request.config.raw()).into_owned(),
        args: request.env.args.to_string(),
        path: path.cloned().collect(),
    }))
}

/// Releases the addresses of a journalled attachment, as its own DEL would. An IPAM that is gone
/// from `CNI_PATH` cannot release anything, now or later, and must not keep the rest of the
/// attachment: that is logged.
///
/// # Errors
/// The IPAM's; code 101 for one that the policy does not list any more.
pub fn release(node: &Node, record: &Record) -> Result<(), Error> {
    let Some(noted) = &record.ipam else {
        return Ok(());
    };
    let request = request_of(record, noted)?;
    let (allowed, policy) = (&node.policy.values.allow.ipam, &node.policy.path);
    match find(&noted.kind, &noted.path) {
        Ok(Ipam::Other(_)) if !allowed.contains(&noted.kind) => {
            Err(unlisted(allowed, policy, &noted.kind))
        }
        Ok(ipam) => match ipam.start_del(node, &request) {
            Err(e) => {
                gone(node, record, &noted.kind, &e);
                Ok(())
            }
            Ok(done) => done,
        },
        Err(e) if matches!(e.code, Code::Policy | Code::InvalidConfig) => {
            gone(node, record, &noted.kind, &e);
            // They may be ours, under the other name.
            match noted.kind == COMPATIBLE {
                true => Ipam::Own.del(node, &request),
                false => Ok(()),
            }
        }
        Err(e) => Err(e),
    }
}

/// The DEL of a journalled attachment.
fn request_of(record: &Record, noted: &record::Ipam) -> Result<Request, Error> {
    Ok(Request {
        env: Environment {
            command: Command::Del,
            attachment: Some(AttachmentId {
                container_id: ContainerId::parse(&record.container_id)?,
                ifname: IfName::parse(&record.ifname)
                    .map_err(|reason| Error::new(Code::State, format!("journal: {reason}")))?,
            }),
            netns: Some(record.netns.path.clone()),
            args: cni_wire::Args::parse(&noted.args)?,
            path: noted.path.clone(),
            netns_override: false,
        },
        config: NetworkConfig::parse(noted.config.as_bytes())?,
    })
}

/// Which interface of a journalled attachment has each of its leased addresses, by the number of the
/// lease; none where the attachment has one interface.
///
/// # Errors
/// The journalled configuration cannot be read any more.
pub fn positions(node: &Node, record: &Record) -> Result<Option<Vec<usize>>, Error> {
    let rails: Option<Vec<u32>> = record.parts.iter().map(Part::rail).collect();
    match (&record.ipam, rails) {
        (Some(noted), Some(rails)) if rails.len() > 1 => {
            let request = request_of(record, noted)?;
            node.ipam.positions(&request, &rails).map(Some)
        }
        _ => Ok(None),
    }
}

/// Says that nothing can release an attachment's addresses any more.
fn gone(node: &Node, record: &Record, kind: &str, why: &Error) {
    node.log.warn(format_args!(
        "{}: its addresses are still leased by IPAM {kind}, which cannot be run: {why}",
        record.owner(),
    ));
}

/// The program of a type. Whether it runs is the policy's decision; this plugin never does.
fn find(kind: &str, path: &[PathBuf]) -> Result<Ipam, Error> {
    if kind == OWN {
        return Ok(Ipam::Own);
    }
    can_be_ipam(kind)?;
    let delegate = Delegate::find(kind, path)?;
    let program = delegate.program();
    // Under another name it would call itself without end.
    if same_file(Path::new("/proc/self/exe"), program) {
        let why = format!("{} is this plugin", program.display());
        return Err(no_ipam(kind, &why));
    }
    let own = |own: Delegate| same_file(own.program(), program);
    if kind == COMPATIBLE && Delegate::find(OWN, path).is_ok_and(own) {
        return Ok(Ipam::Own);
    }
    Ok(Ipam::Other(delegate))
}

fn same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|file| (file.dev(), file.ino())).ok();
    id(one).is_some_and(|one| id(other) == Some(one))
}

/// Refuses types that no policy allows.
fn can_be_ipam(kind: &str) -> Result<(), Error> {
    match kind {
        DHCP => Err(Error::new(
            Code::UnsupportedField,
            "ipam.type: dhcp needs an interface that is up, and addresses are leased before it is made",
        )
        .with_details("use rdma-ipam, whereabouts, host-local or static")),
        kind if SELF.contains(&kind) => Err(no_ipam(kind, "it is the name of this plugin")),
        _ => Ok(()),
    }
}

fn no_ipam(kind: &str, why: &str) -> Error {
    let msg = format!("ipam.type {kind:?} is not an IPAM plugin: {why}");
    Error::new(Code::Policy, msg)
        .with_details("no policy allows it; name an IPAM plugin, such as rdma-ipam")
}

/// Whether a policy, the file at `path`, lets networks name this type: what can be said where its
/// program is not at hand. `whereabouts` counts as ours, which a node decides by its programs.
///
/// # Errors
/// Code 101: the policy's `allow.ipam` does not list it, or it is this plugin; code 2: it is `dhcp`.
pub fn allowed_by(allowed: &[String], path: &Path, kind: &str) -> Result<(), Error> {
    can_be_ipam(kind)?;
    let listed = |name: &str| allowed.iter().any(|known| known == name);
    match listed(kind) || kind == COMPATIBLE && listed(OWN) {
        true => Ok(()),
        false => Err(unlisted(allowed, path, kind)),
    }
}

/// Whether a type is ours, under either of the names that our configuration is known by.
#[must_use]
pub fn is_own(kind: &str) -> bool {
    kind == OWN || kind == COMPATIBLE
}

/// Why an IPAM, by its type or program, is none for `devices: all`.
#[must_use]
pub fn serves_one(ipam: impl Display) -> Error {
    Error::new(
        Code::InvalidConfig,
        format!("devices: all makes several interfaces, and IPAM {ipam} gives addresses to one"),
    )
    .with_details(format!(
        "set ipam.type to {OWN}; or leave ipam out, so that moved netdevs keep their addresses"
    ))
}

fn unlisted(listed: &[String], path: &Path, kind: &str) -> Error {
    let allowed = match listed.is_empty() {
        true => "it allows none".to_owned(),
        false => format!("it allows {}", listed.join(", ")),
    };
    Error::new(
        Code::Policy,
        format!(
            "the node's policy does not allow ipam.type {:?}: {allowed}",
            bounded(kind, 100)
        ),
    )
    .with_details(format!(
        "name one of them, or let an administrator add it to allow.ipam in {}",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    fn found(kind: &str, directory: &Path) -> Result<&'static str, Code> {
        match find(kind, &[directory.to_owned()]) {
            Ok(Ipam::None) => Ok("none"),
            Ok(Ipam::Own) => Ok("own"),
            Ok(Ipam::Other(_)) => Ok("other"),
            Err(refusal) => Err(refusal.code),
        }
    }

    #[test]
    fn this_plugin_is_never_an_ipam_under_any_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| fs::write(dir.path().join(name), name).unwrap();
        for name in ["rdma-ipam", "rdma-netdev", "static", "whereabouts", "cni"] {
            file(name);
        }
        let link = |to: &str, name: &str| symlink(to, dir.path().join(name)).unwrap();
        link("/proc/self/exe", "this");
        // One program under many names, as k3s installs them.
        link("cni", "host-local");
        for (kind, expected) in [
            ("rdma-ipam", Ok("own")),
            ("static", Ok("other")),
            ("host-local", Ok("other")),
            ("whereabouts", Ok("other")),
            ("rdma-netdev", Err(Code::Policy)),
            ("rdma", Err(Code::Policy)),
            ("dhcp", Err(Code::UnsupportedField)),
            ("this", Err(Code::Policy)),
            ("nowhere", Err(Code::InvalidConfig)),
            ("../static", Err(Code::InvalidConfig)),
            ("..", Err(Code::InvalidConfig)),
            ("a\0b", Err(Code::InvalidConfig)),
        ] {
            assert_eq!(found(kind, dir.path()), expected, "{kind:?}");
        }
        fs::remove_file(dir.path().join("whereabouts")).unwrap();
        link("rdma-ipam", "whereabouts");
        assert_eq!(found("whereabouts", dir.path()), Ok("own"));
    }
}
