//! This node, as one call sees it: roots, policy, journal, the host's namespace.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use cni_wire::{Code, Error};
use hca::Host;
use ipam::{
    plugin::Plugin as Ipam,
    policy::{Policy, PolicyError},
};

use crate::{
    journal::Store,
    kernel::{Namespace, Socket},
    log::Log,
    netdev::restore::Ground,
};

/// Where things are, as `main` found them in the environment.
#[derive(Clone, Debug)]
pub struct Places {
    /// Prefix of `sys`, `dev`, `proc`; `/` but for tests and daemons in a container.
    pub root: PathBuf,
    /// The policy's file.
    pub policy: PathBuf,
    /// `RDMA_NODE_NAME`.
    pub node: Option<String>,
}

/// A node and what a call needs of it.
#[derive(Debug)]
pub struct Node {
    /// The kernel's file systems.
    pub host: Host,
    /// What root allows here.
    pub policy: Policy,
    /// Where that is written.
    pub policy_path: PathBuf,
    /// What is wrong with it, for whoever goes by the rest.
    pub fault: Option<PolicyError>,
    /// The root directory of the host: `/` but in tests and for daemons in a container.
    pub root: PathBuf,
    /// The journal.
    pub store: Store,
    /// The IPAM of this project, in this process.
    pub ipam: Ipam,
    /// The host's namespace: the one this process runs in.
    pub home: Namespace,
    /// A socket of it.
    pub socket: Socket,
    /// The kernel's boot ID.
    pub boot: String,
    /// Where events are written.
    pub log: Log,
}

impl Node {
    /// For ADD, CHECK and STATUS: a wrong policy is an error.
    ///
    /// # Errors
    /// Code 101 for the policy; code 100 when the kernel gives no socket.
    pub fn open(places: &Places, subject: String) -> Result<Node, Error> {
        let policy = Policy::load(&places.policy)
            .map_err(|e| Error::new(Code::Policy, e.to_string()).with_details(e.remedy()))?;
        Node::with(places, policy, subject)
    }

    /// For DEL, GC and reclaim: what can be read of the policy has to do.
    ///
    /// # Errors
    /// Code 100 when the kernel gives no socket.
    pub fn open_for_release(places: &Places, subject: String) -> Result<Node, Error> {
        let (policy, fault) = Policy::load_for_release(&places.policy);
        let node = Node::with(places, policy, subject)?;
        Ok(Node { fault, ..node })
    }

    fn with(places: &Places, policy: Policy, subject: String) -> Result<Node, Error> {
        let host = Host::at(&places.root);
        let home = Namespace::current(&host.proc)?;
        Ok(Node {
            store: Store::at(&policy.state_dir),
            ipam: Ipam::new(policy.clone(), &places.root, places.node.as_deref()),
            log: Log::open(&policy.log, subject),
            boot: boot_id(&host.proc),
            root: places.root.clone(),
            policy_path: places.policy.clone(),
            fault: None,
            socket: Socket::open()?,
            host,
            policy,
            home,
        })
    }

    /// What a restoration stands on.
    pub fn ground(&mut self) -> Ground<'_> {
        Ground {
            home: &self.home,
            socket: &mut self.socket,
            proc: &self.host.proc,
            sys: &self.host.sys,
        }
    }

    /// The addresses the node is known by to its cluster, one a line, as the daemon writes them
    /// into the state directory. Without a daemon there are none beside those the routes tell.
    pub fn known_addresses(&self) -> Vec<IpAddr> {
        let text = fs::read_to_string(self.policy.state_dir.join(NODE_ADDRESSES));
        text.unwrap_or_default()
            .lines()
            .filter_map(|line| line.trim().parse().ok())
            .collect()
    }
}

/// The file in the state directory with the node's addresses.
pub const NODE_ADDRESSES: &str = "node-addresses";

/// Changes with every boot; empty where the kernel does not tell.
fn boot_id(proc: &Path) -> String {
    fs::read_to_string(proc.join("sys/kernel/random/boot_id"))
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map(|time| time.as_secs())
        .unwrap_or_default()
}
