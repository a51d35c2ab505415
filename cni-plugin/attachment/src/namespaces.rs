//! Network namespaces of this node, where the kernel has no list of them.

use std::{collections::BTreeSet, fs, path::Path};

use netlink::{Namespace, Socket, link};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::node::Node;

/// Where runtimes keep network namespaces, beside the directory of the pod's own.
const NETNS_DIRECTORY: &str = "/run/netns";

/// Visits the namespaces that lie where the pod's does or in `/run/netns`, then those of processes, each
/// once, without the host's. One that cannot be opened is passed over: it may be gone by now.
pub fn visit(node: &Node, pod: &Namespace, mut each: impl FnMut(Namespace)) {
    let mut seen = BTreeSet::from([node.netns.namespace.id().inode]);
    for namespace in named(pod) {
        if seen.insert(namespace.id().inode) {
            each(namespace);
        }
    }
    Namespace::of_processes(&node.roots.proc, seen).for_each(each);
}

/// The namespaces that lie where the pod's does or in `/run/netns`.
fn named(pod: &Namespace) -> impl Iterator<Item = Namespace> {
    let known = Path::new(NETNS_DIRECTORY).to_path_buf();
    let beside = pod
        .path()
        .parent()
        .and_then(|beside| beside.canonicalize().ok());
    let beside = beside.filter(|beside| !beside.starts_with("/proc") && *beside != known);
    beside
        .into_iter()
        .chain([known])
        .flat_map(|directory| fs::read_dir(directory).into_iter().flatten().flatten())
        .filter_map(|entry| Namespace::open(&entry.path()).ok().flatten())
}

/// Lets this process have as many open files as it may: a runtime starts it with few, and a search
/// keeps each namespace open. One that could not be opened would count as ended.
pub(crate) fn open_many() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
    {
        // A smaller search is better than none.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// What became of a search through namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    Found,
    Nowhere,
    /// It is in none that is found, and there are others.
    Unknown,
}

/// Searches the namespaces to which links were moved out of a pod's, and from there on, until `is_in`
/// finds what is searched for. `inside` is a socket of `pod`, `host` the thread's namespace.
///
/// A namespace that a link leaves gets a number for the one that it goes to
/// (`__dev_change_net_namespace()`), and loses it when that ends. So namespaces of other pods are not
/// searched, and where each number is that of a namespace that was searched there are no others, but
/// for one behind a namespace that ended: it is searched where the pod's user namespace owns it.
///
/// # Errors
/// Those of `is_in`; the kernel's refusal.
pub fn search_reached<E: From<netlink::Error>>(
    host: &Namespace,
    proc: &Path,
    pod: &Namespace,
    inside: &mut Socket,
    mut is_in: impl FnMut(&Namespace, &mut Socket) -> Result<bool, E>,
) -> Result<Search, E> {
    open_many();
    let mut seen = BTreeSet::from([pod.id().inode]);
    let mut rest: Vec<_> = named(pod)
        .filter(|other| seen.insert(other.id().inode))
        .collect();
    rest.extend(Namespace::of_threads(proc, seen));
    let is_pods = |other: &mut Namespace| other.is_owned_with(pod, host);
    let mut reached: Vec<Namespace> = rest.extract_if(.., is_pods).collect();
    let mut result = Search::Nowhere;
    let mut searched = 0;
    let mut socket: Option<Socket> = None;
    loop {
        let here = socket.as_mut().unwrap_or(&mut *inside);
        let mut unseen = link::known_numbers(here)?;
        for known in [host, pod].into_iter().chain(&reached) {
            if unseen.is_empty() {
                break;
            }
            if let Some(number) = link::known_number(here, known)? {
                unseen.remove(&number);
            }
        }
        if !unseen.is_empty() {
            reached.extend(rest.extract_if(.., |other| {
                link::known_number(here, other)
                    .is_ok_and(|number| number.is_some_and(|number| unseen.remove(&number)))
            }));
        }
        if !unseen.is_empty() {
            result = Search::Unknown;
        }
        let Some(next) = reached.get(searched) else {
            return Ok(result);
        };
        let mut other = next.socket(host)?;
        if is_in(next, &mut other)? {
            return Ok(Search::Found);
        }
        socket = Some(other);
        searched += 1;
    }
}

/// Searches outside of a pod's namespace for what is in it no more: where links were moved to from it,
/// or, when it is over, in all namespaces that a thread is in and that this process can enter.
pub fn search_outside<E: From<netlink::Error>>(
    host: &Namespace,
    proc: &Path,
    pod: Option<&Namespace>,
    mut is_in: impl FnMut(&Namespace) -> Result<bool, E>,
) -> Result<Search, E> {
    if let Some(pod) = pod {
        let mut inside = pod.socket(host)?;
        return search_reached(host, proc, pod, &mut inside, |other, _| is_in(other));
    }
    for other in Namespace::of_threads(proc, BTreeSet::from([host.id().inode])) {
        match other.enter(host, || ()) {
            // A process that may open it need not have the right to enter it.
            Err(e) if e.is(libc::EPERM) => continue,
            entered => entered?,
        }
        if is_in(&other)? {
            return Ok(Search::Found);
        }
    }
    Ok(Search::Unknown)
}
