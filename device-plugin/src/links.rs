//! Host links that a pool sets up (`linkUp`), with an MTU if the pool names one. These are the only
//! changes that the daemon makes to the host's network without a pod.
//!
//! A netdev is set up once, when it appears: at the start, when a pool first has it, when its driver
//! was loaded anew. One that somebody sets down after that stays down. An uplink is left alone. One that
//! is in the CNI plugin's journal belongs to the CNI plugin: a netdev that is up cannot be given its name
//! back by older kernels. Nothing is kept on disk; a daemon that was killed begins anew.

use std::collections::BTreeSet;
use std::sync::Arc;

use attachment::reclaim::in_host_namespace;
use hca::{HcaId, netdev::Netdev, uplink::Uplinks};
use netlink::{Socket, link};
use pools::config::ResourceName;
use pools::snapshot::Snapshot;

use crate::node_paths::NodePaths;
use crate::reclaim::taken;

/// What was done so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Links {
    /// Interface indices of netdevs that were up when they were first seen, or were set up.
    done: BTreeSet<u32>,
    /// Why netdevs could not be set up at the last scan.
    faults: Vec<String>,
}

/// A netdev that is to be set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Down {
    resource: ResourceName,
    name: String,
    ifindex: u32,
    mtu: Option<u32>,
    /// The HCA it is on, as the journal names it.
    id: HcaId,
}

impl Links {
    /// Why netdevs could not be set up, for a person.
    pub(crate) fn faults(&self) -> &[String] {
        &self.faults
    }

    /// Takes note of a scan of the host; returns what is to be set up after it. Pure.
    pub(crate) fn note(
        &mut self,
        snapshots: &[Arc<Snapshot>],
        netdevs: &[Netdev],
        uplinks: &Uplinks,
    ) -> Vec<Down> {
        self.done
            .retain(|done| netdevs.iter().any(|netdev| netdev.ifindex == *done));
        let mut down: Vec<Down> = Vec::new();
        for snapshot in snapshots.iter().filter(|one| one.pool().link_up) {
            for member in snapshot.members() {
                let own =
                    |netdev: &&Netdev| member.hca.netdev_names().any(|name| name == netdev.name);
                for netdev in netdevs.iter().filter(own) {
                    if netdev.up {
                        self.done.insert(netdev.ifindex);
                    }
                    // Two shared pools may have it.
                    let named = down.iter().any(|one| one.ifindex == netdev.ifindex);
                    if !named && !self.done.contains(&netdev.ifindex) {
                        down.push(Down {
                            resource: snapshot.resource().clone(),
                            name: netdev.name.clone(),
                            ifindex: netdev.ifindex,
                            mtu: snapshot.pool().mtu,
                            id: member.hca.id.clone(),
                        });
                    }
                }
            }
        }
        self.faults.clear();
        down.retain(|down| {
            let why = match uplinks {
                Uplinks::Known(all) => all.get(&down.name).map(ToString::to_string),
                Uplinks::Unknown(why) => Some(format!("it may be an uplink: {why}")),
            };
            self.faults.extend(why.as_ref().map(|why| down.fault(why)));
            why.is_none()
        });
        down
    }

    /// Takes note of what [`set_up`] did. A fault is tried again at the next scan.
    pub(crate) fn tried(&mut self, outcomes: Vec<(Down, Result<(), String>)>) {
        for (down, outcome) in outcomes {
            match outcome {
                Ok(()) => {
                    tracing::info!(netdev = down.name, resource = %down.resource, "set up, by linkUp");
                    self.done.insert(down.ifindex);
                }
                Err(why) => self.faults.push(down.fault(&why)),
            }
        }
    }
}

impl Down {
    fn fault(&self, why: &str) -> String {
        let Self { name, resource, .. } = self;
        format!("{name} cannot be set up (linkUp of {resource}): {why}")
    }
}

/// Sets netdevs up that no attachment of the journal is about; none if that is not known.
pub(crate) fn set_up(paths: &NodePaths, mut all: Vec<Down>) -> Vec<(Down, Result<(), String>)> {
    let socket = taken(paths)
        .map_err(|error| error.to_string())
        .and_then(|taken| {
            all.retain(|down| !taken.contains(&down.id));
            in_host_namespace(&paths.host).map_err(|why| format!("{why}; set hostNetwork: true"))
        })
        .and_then(|()| Socket::open().map_err(|error| error.to_string()));
    let mut socket = socket;
    all.into_iter()
        .map(|down| {
            let outcome = match &mut socket {
                Ok(socket) => change(socket, &down).map_err(|error| error.to_string()),
                Err(why) => Err(why.clone()),
            };
            (down, outcome)
        })
        .collect()
}

fn change(socket: &mut Socket, down: &Down) -> netlink::Result<()> {
    let Down { name, ifindex, .. } = down;
    if let Some(mtu) = down.mtu {
        let what = format_args!(
            "set the MTU of {name} to {mtu} (linkUp of {})",
            down.resource
        );
        let mtu = link::Change {
            mtu: Some(mtu),
            ..link::Change::default()
        };
        if let Err(error) = link::change(socket, what, *ifindex, &mtu) {
            tracing::warn!("{error}");
        }
    }
    let what = format_args!("set {name} up");
    link::change(socket, what, *ifindex, &link::Change::up())
}

#[cfg(test)]
mod tests {
    use hca::uplink::Why;
    use hca_trees::{PciSpec, PortSpec, Tree};

    use super::*;
    use pools::config::parse;
    use pools::example::scan;
    use pools::pool::assemble;

    /// A host with two NICs, both down, and what pools make of it.
    fn host(pools: &str) -> (Vec<Arc<Snapshot>>, Vec<Netdev>) {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.rdma_core(true);
        for (address, above, number) in [
            ("0000:3b:00.0", "pci0000:3a", 0),
            ("0000:86:00.0", "pci0000:85", 1),
        ] {
            let pci = PciSpec {
                address,
                above,
                ..PciSpec::MLX5
            };
            let (rdma, netdev) = (format!("mlx5_{number}"), format!("rdma{number}"));
            tree.nic(&pci, &rdma, &netdev, &[PortSpec::ROCE]);
        }
        let mut seen = scan(&tree);
        for netdev in &mut seen.inventory.netdevs {
            netdev.up = false;
        }
        let config = parse(&format!("version: 1\npools:\n{pools}")).unwrap();
        let candidates = seen.inventory.hcas.clone();
        let snapshots = assemble(&config, &candidates, &seen, &[]).snapshots;
        let snapshots = snapshots.into_iter().map(Arc::new).collect();
        (snapshots, seen.inventory.netdevs)
    }

    fn pool(name: &str, device: &str, more: &str) -> String {
        format!(
            "- {{resource: rdma/{name}, mode: shared, select: {{rdmaDevices: [{device}]}}{more}}}\n"
        )
    }

    /// What is to be set up on a host without uplinks.
    fn note(links: &mut Links, snapshots: &[Arc<Snapshot>], netdevs: &[Netdev]) -> Vec<Down> {
        links.note(snapshots, netdevs, &Uplinks::Known([].into()))
    }

    fn names(down: &[Down]) -> Vec<&str> {
        down.iter().map(|down| down.name.as_str()).collect()
    }

    fn done(down: &[Down]) -> Vec<(Down, Result<(), String>)> {
        down.iter().map(|down| (down.clone(), Ok(()))).collect()
    }

    #[test]
    fn only_pools_that_ask_for_it_have_their_netdevs_set_up() {
        let text = pool("a", "mlx5_0", ", linkUp: true") + &pool("b", "mlx5_1", "");
        let (snapshots, netdevs) = host(&text);
        let down = note(&mut Links::default(), &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma0"]);
        let text = pool("a", "mlx5_0", ", linkUp: true") + &pool("b", "mlx5_0", ", linkUp: true");
        let (snapshots, netdevs) = host(&text);
        let down = note(&mut Links::default(), &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma0"], "once, though two pools have it");
    }

    #[test]
    fn a_netdev_is_set_up_once_for_each_time_it_appears() {
        let (snapshots, mut netdevs) = host(&pool("a", "'*'", ", linkUp: true"));
        let mut links = Links::default();
        netdevs[1].up = true;
        let down = note(&mut links, &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma0"]);
        links.tried(done(&down));
        // Somebody sets both down.
        netdevs[1].up = false;
        assert_eq!(names(&note(&mut links, &snapshots, &netdevs)), [""; 0]);
        // A driver is loaded anew.
        assert_eq!(names(&note(&mut links, &snapshots, &netdevs[..1])), [""; 0]);
        let down = note(&mut links, &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma1"]);
    }

    #[test]
    fn nothing_is_set_up_if_the_journal_cannot_be_listed() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("state");
        let policy = format!("{{\"stateDir\": \"{}\"}}", state_dir.display());
        std::fs::write(dir.path().join("policy.json"), policy).unwrap();
        std::fs::create_dir(&state_dir).unwrap();
        std::fs::write(state_dir.join("attachments"), "").unwrap();
        let (snapshots, netdevs) = host(&pool("a", "'*'", ", linkUp: true"));
        let mut links = Links::default();
        let down = note(&mut links, &snapshots, &netdevs);
        links.tried(set_up(&NodePaths::all_in(dir.path()), down));
        let [first, _] = links.faults() else {
            panic!("{:?}", links.faults());
        };
        assert!(
            first.starts_with("rdma0 cannot be set up (linkUp of rdma/a): ")
                && first.contains("state/attachments is not trusted"),
            "{first}"
        );
    }

    #[test]
    fn uplinks_are_not_set_up() {
        let (snapshots, netdevs) = host(&pool("a", "'*'", ", linkUp: {mtu: 4200}"));
        let mut links = Links::default();
        let uplinks = Uplinks::Known([("rdma0".to_owned(), Why::DefaultRoute)].into());
        let down = links.note(&snapshots, &netdevs, &uplinks);
        assert_eq!((names(&down), down[0].mtu), (vec!["rdma1"], Some(4200)));
        let of_rdma0 =
            "rdma0 cannot be set up (linkUp of rdma/a): it carries the node's default route";
        assert_eq!(links.faults(), [of_rdma0]);
        let unknown = Uplinks::Unknown("no routes".into());
        let down = links.note(&snapshots, &netdevs, &unknown);
        assert_eq!((down.len(), links.faults().len()), (0, 2));
    }

    #[test]
    fn what_could_not_be_set_up_is_reported_and_tried_again() {
        let (snapshots, netdevs) = host(&pool("a", "mlx5_0", ", linkUp: true"));
        let mut links = Links::default();
        let down = note(&mut links, &snapshots, &netdevs);
        let refused = down.iter().map(|down| (down.clone(), Err("no".to_owned())));
        links.tried(refused.collect());
        assert_eq!(
            links.faults(),
            ["rdma0 cannot be set up (linkUp of rdma/a): no"]
        );
        let down = note(&mut links, &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma0"]);
        links.tried(done(&down));
        assert!(links.faults().is_empty());
    }
}
