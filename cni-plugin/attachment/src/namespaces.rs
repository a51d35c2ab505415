//! Network namespaces of this node, where the kernel has no list of them.

use std::{collections::BTreeSet, fs, iter, path::Path};

use netlink::{Namespace, Socket, link};

use crate::node::Node;

/// Where runtimes keep network namespaces, beside the directory of the pod's own.
const NETNS_DIRECTORY: &str = "/run/netns";

/// The namespaces that lie where the pod's does or in `/run/netns`, then those of processes, each
/// once, without the host's. One that cannot be opened is passed over: it may be gone by now.
pub fn all<'a>(node: &'a Node, pod: &'a Namespace) -> impl Iterator<Item = Namespace> + use<'a> {
    let host = node.netns.namespace.id();
    let mut seen = BTreeSet::from([(host.device, host.inode)]);
    // Read only when it is come to: nodes have thousands of processes.
    let of_processes = iter::once(()).flat_map(|()| Namespace::of_processes(&node.roots.proc));
    named(pod).chain(of_processes).filter(move |namespace| {
        let id = namespace.id();
        seen.insert((id.device, id.inode))
    })
}

/// The namespaces that lie where the pod's does or in `/run/netns`.
fn named(pod: &Namespace) -> impl Iterator<Item = Namespace> {
    let beside = pod
        .path()
        .parent()
        .filter(|directory| !directory.starts_with("/proc"));
    let directories = beside.into_iter().chain([Path::new(NETNS_DIRECTORY)]);
    directories
        .flat_map(|directory| fs::read_dir(directory).into_iter().flatten().flatten())
        .filter_map(|entry| Namespace::open(&entry.path()).ok().flatten())
}

/// What became of a search through namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// It was found.
    Found,
    /// It is in none.
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
    let mut rest: Vec<_> = named(pod).collect();
    rest.extend(Namespace::of_threads(proc));
    let is_pods = |other: &mut Namespace| other.id() != pod.id() && other.is_owned_with(pod, host);
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
/// or, when it is over, in all namespaces that a thread is in.
///
/// # Errors
/// As [`search_reached`].
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
    for other in Namespace::of_threads(proc) {
        if other.id() != host.id() && is_in(&other)? {
            return Ok(Search::Found);
        }
    }
    Ok(Search::Unknown)
}
