//! This node, as one call sees it: roots, policy, journal, the host's network namespace.

use std::{
    cell::Cell,
    net::IpAddr,
    path::PathBuf,
    str::FromStr,
    time::{SystemTime, UNIX_EPOCH},
};

use ::node::{
    identity::{boot_id, is_other_boot},
    policy::{Policy, PolicyError},
    trust,
};
use cni_wire::Code;
use hca::{HcaId, Host};
use ipam::plugin::Plugin as Ipam;
use netlink::{Namespace, Socket};

use crate::{
    error::Error,
    journal::{Journal, Key, Record},
    log::{self, Log},
};

/// Where things are, as `main` found them in the environment.
#[derive(Clone, Debug)]
pub struct Places {
    /// Prefix of `sys`, `dev`, `proc`; `/` but for tests and daemons in a container.
    pub root: PathBuf,
    pub policy: PathBuf,
    /// `RDMA_NODE_NAME`.
    pub node: Option<String>,
}

/// A node and what a call needs of it. Functions take the parts that they use.
#[derive(Debug)]
pub struct Node {
    pub roots: Host,
    /// The root directory of the host: `/` but in tests and for daemons in a container.
    pub root: PathBuf,
    /// What the node's administrator allows.
    pub policy: NodePolicy,
    pub journal: Journal,
    pub netns: HostNetns,
    /// The IPAM of this project, in this process.
    pub ipam: Ipam,
    pub boot: String,
    pub log: Log,
    reported_unreadable: Cell<bool>,
}

/// The host's network namespace: the one this process runs in.
#[derive(Debug)]
pub struct HostNetns {
    pub namespace: Namespace,
    pub socket: Socket,
}

impl HostNetns {
    fn open(places: &Places) -> Result<Self, Error> {
        Ok(HostNetns {
            namespace: Namespace::current(&places.root.join("proc"))?,
            socket: Socket::open()?,
        })
    }
}

/// The node's policy and where it stands.
#[derive(Debug)]
pub struct NodePolicy {
    pub values: Policy,
    pub path: PathBuf,
    /// What is wrong with the file, for commands that go on with the rest of it.
    pub fault: Option<PolicyError>,
}

impl Node {
    /// For ADD, CHECK and STATUS: a wrong policy is an error.
    ///
    /// # Errors
    /// The policy is wrong, or the kernel gives no socket.
    pub fn open(places: &Places, subject: String) -> Result<Node, Error> {
        let policy = Policy::load(&places.policy)?;
        let netns = HostNetns::open(places)?;
        Ok(Node::with(places, policy, None, &subject, netns))
    }

    /// For DEL, GC and reclaim: what can be read of the policy has to do.
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn open_for_release(places: &Places, subject: String) -> Result<Node, Error> {
        let (policy, fault) = Policy::load_for_release(&places.policy);
        let netns = HostNetns::open(places)?;
        Ok(Node::with(places, policy, fault, &subject, netns))
    }

    pub(crate) fn with(
        places: &Places,
        policy: Policy,
        fault: Option<PolicyError>,
        subject: &str,
        netns: HostNetns,
    ) -> Node {
        let roots = Host::at(&places.root);
        let log = Log::new(&policy.log, log::PROGRAM, subject);
        log::observe(&log);
        Node {
            journal: Journal::at(&policy.state_dir),
            ipam: Ipam::new(policy.clone(), &places.root, places.node.as_deref()),
            log,
            reported_unreadable: Cell::new(false),
            boot: boot_id(&roots.proc),
            root: places.root.clone(),
            netns,
            roots,
            policy: NodePolicy {
                values: policy,
                path: places.policy.clone(),
                fault,
            },
        }
    }

    /// Whether a record or a claim with this boot ID is of the present boot, as far as is known.
    pub fn is_of_this_boot(&self, boot: &str) -> bool {
        !is_other_boot(boot, &self.boot)
    }

    /// The records of the journal that can be read. The others are logged, once in a call: they
    /// are no reason to refuse another attachment.
    pub fn records(&self) -> Result<Vec<(Key, Record)>, Error> {
        let (records, unreadable) = self.journal.records()?;
        if !self.reported_unreadable.replace(true) {
            for (_, error) in &unreadable {
                self.log.warn(error);
            }
        }
        Ok(records)
    }

    /// The socket on which the daemon answers this node's programs.
    pub fn daemon_socket(&self) -> PathBuf {
        self.root.join(DAEMON_SOCKET)
    }

    /// The addresses the node is known by to its cluster, as the daemon writes them into the state
    /// directory. Without a daemon there are none beside those of the routes.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn known_addresses(&self) -> Result<Vec<IpAddr>, Error> {
        self.state_lines(NODE_ADDRESSES)
    }

    /// The HCAs of exclusive pools, as the daemon writes them into the state directory. Without a
    /// daemon there are none.
    ///
    /// # Errors
    /// The file is there and cannot be read. It would be wrong to take that for none.
    pub fn exclusive_hcas(&self) -> Result<Vec<HcaId>, Error> {
        self.state_lines(EXCLUSIVE_HCAS)
    }

    /// A file of the state directory with one value a line; none where there is no such file.
    fn state_lines<T: FromStr>(&self, name: &str) -> Result<Vec<T>, Error> {
        let path = self.policy.values.state_dir.join(name);
        let failed = |cause: String| {
            Error::new(Code::State, format_args!("read {}: {cause}", path.display())).with_details(
                "the daemon of this node writes it; restart rdma-device-plugin (nothing is attached \
                 without it, because it protects the node's own netdevs and HCAs of exclusive pools)",
            )
        };
        let text = trust::read(&path, MAX_STATE_BYTES).map_err(|e| failed(e.to_string()))?;
        let text = String::from_utf8(text.unwrap_or_default());
        let text = text.map_err(|e| failed(e.to_string()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        lines
            .map(|line| {
                line.parse()
                    .map_err(|_| failed(format!("{line:?} is not known here")))
            })
            .collect()
    }
}

/// The daemon's socket, below the root.
pub const DAEMON_SOCKET: &str = "run/rdma-netdev/node.sock";

/// The file in the state directory with the HCAs of exclusive pools: one identity a line, as units
/// name it.
pub const EXCLUSIVE_HCAS: &str = "exclusive-hcas";

/// A thousand addresses or HCAs fit.
const MAX_STATE_BYTES: u64 = 1 << 20;

/// The file in the state directory with the node's addresses.
pub const NODE_ADDRESSES: &str = "node-addresses";

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map(|time| time.as_secs())
        .unwrap_or_default()
}
