//! Host links that a pool sets up (`linkUp`). This and their MTU ([`crate::mtu`]) are the only changes
//! that the daemon makes to the host's network without a pod.
//!
//! A netdev is set up once, when it appears: at the start, when a pool first has it, when its driver
//! was loaded anew. One that somebody sets down after that stays down. One that is in the CNI plugin's
//! journal belongs to the CNI plugin: a netdev that is up cannot be given its name back by older
//! kernels. Nothing is kept on disk; a daemon that was killed begins anew.

use std::collections::BTreeSet;
use std::sync::Arc;

use attachment::reclaim::in_host_namespace;
use hca::{HcaId, netdev::Netdev};
use netlink::{Socket, link};

use crate::{
    config::{Config, ResourceName},
    node_paths::NodePaths,
    reclaim::taken,
    snapshot::Snapshot,
};

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
        config: &Config,
        snapshots: &[Arc<Snapshot>],
        netdevs: &[Netdev],
    ) -> Vec<Down> {
        self.done
            .retain(|done| netdevs.iter().any(|netdev| netdev.ifindex == *done));
        let wanting = config.pools.iter().filter(|pool| pool.link_up);
        let snapshots = wanting.filter_map(|pool| {
            let mut all = snapshots.iter();
            all.find(|snapshot| *snapshot.resource() == pool.resource)
        });
        let mut down: Vec<Down> = Vec::new();
        for snapshot in snapshots {
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
                            id: member.hca.id.clone(),
                        });
                    }
                }
            }
        }
        if down.is_empty() {
            self.faults.clear();
        }
        down
    }

    /// Takes note of what [`set_up`] did. A fault is tried again at the next scan.
    pub(crate) fn tried(&mut self, outcomes: Vec<(Down, Result<(), String>)>) {
        let mut faults = Vec::new();
        for (down, outcome) in outcomes {
            match outcome {
                Ok(()) => {
                    tracing::info!(netdev = down.name, resource = %down.resource, "set up, by linkUp");
                    self.done.insert(down.ifindex);
                }
                Err(why) => faults.push(format!(
                    "{} cannot be set up (linkUp of {}): {why}",
                    down.name, down.resource
                )),
            }
        }
        self.faults = faults;
    }
}

/// Sets netdevs up that no attachment of the journal is about.
pub(crate) fn set_up(paths: &NodePaths, all: Vec<Down>) -> Vec<(Down, Result<(), String>)> {
    let ours = unattached(all, &taken(paths).unwrap_or_default());
    let mut socket = socket(paths);
    ours.into_iter()
        .map(|down| {
            let outcome = match &mut socket {
                Ok(socket) => change(socket, &down).map_err(|error| error.to_string()),
                Err(why) => Err(why.clone()),
            };
            (down, outcome)
        })
        .collect()
}

/// A socket in the host's network namespace.
pub(crate) fn socket(paths: &NodePaths) -> Result<Socket, String> {
    in_host_namespace(&paths.host)
        .map_err(|why| format!("{why}; set hostNetwork: true"))
        .and_then(|()| Socket::open().map_err(|error| error.to_string()))
}

/// Those on no HCA of which a pod has a netdev.
fn unattached(mut all: Vec<Down>, taken: &BTreeSet<HcaId>) -> Vec<Down> {
    all.retain(|down| !taken.contains(&down.id));
    all
}

fn change(socket: &mut Socket, down: &Down) -> netlink::Result<()> {
    let what = format_args!("set {} up", down.name);
    link::change(socket, what, down.ifindex, &link::Change::up())
}

#[cfg(test)]
mod tests {
    use hca_trees::{PciSpec, PortSpec, Tree};

    use super::*;
    use crate::candidate::gather;
    use crate::config::parse;
    use crate::host_snapshot::example::scan;
    use crate::pool::assemble;

    /// A host with two NICs, both down, and what pools make of it.
    fn host(pools: &str) -> (Config, Vec<Arc<Snapshot>>, Vec<Netdev>) {
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
        let (candidates, _) = gather::list(&seen.inventory);
        let snapshots = assemble(&config, &candidates, &seen, &[]).snapshots;
        let snapshots = snapshots.into_iter().map(Arc::new).collect();
        (config, snapshots, seen.inventory.netdevs)
    }

    fn pool(name: &str, device: &str, more: &str) -> String {
        format!(
            "- {{resource: rdma/{name}, mode: shared, select: {{rdmaDevices: [{device}]}}{more}}}\n"
        )
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
        let (config, snapshots, netdevs) = host(&text);
        let down = Links::default().note(&config, &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma0"]);
        let text = pool("a", "mlx5_0", ", linkUp: true") + &pool("b", "mlx5_0", ", linkUp: true");
        let (config, snapshots, netdevs) = host(&text);
        let down = Links::default().note(&config, &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma0"], "once, though two pools have it");
    }

    #[test]
    fn a_netdev_is_set_up_once_for_each_time_it_appears() {
        let (config, snapshots, mut netdevs) = host(&pool("a", "'*'", ", linkUp: true"));
        let mut links = Links::default();
        netdevs[1].up = true;
        let down = links.note(&config, &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma0"]);
        links.tried(done(&down));
        // Somebody sets both down.
        netdevs[1].up = false;
        assert_eq!(names(&links.note(&config, &snapshots, &netdevs)), [""; 0]);
        // A driver is loaded anew.
        assert_eq!(
            names(&links.note(&config, &snapshots, &netdevs[..1])),
            [""; 0]
        );
        let down = links.note(&config, &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma1"]);
    }

    #[test]
    fn a_netdev_of_the_cni_plugins_journal_is_not_set_up() {
        let (config, snapshots, netdevs) = host(&pool("a", "'*'", ", linkUp: true"));
        let down = Links::default().note(&config, &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma0", "rdma1"]);
        let taken = BTreeSet::from([down[0].id.clone()]);
        assert_eq!(names(&unattached(down, &taken)), ["rdma1"]);
    }

    #[test]
    fn what_could_not_be_set_up_is_reported_and_tried_again() {
        let (config, snapshots, netdevs) = host(&pool("a", "mlx5_0", ", linkUp: true"));
        let mut links = Links::default();
        let down = links.note(&config, &snapshots, &netdevs);
        let refused = down.iter().map(|down| (down.clone(), Err("no".to_owned())));
        links.tried(refused.collect());
        assert_eq!(
            links.faults(),
            ["rdma0 cannot be set up (linkUp of rdma/a): no"]
        );
        let down = links.note(&config, &snapshots, &netdevs);
        assert_eq!(names(&down), ["rdma0"]);
        links.tried(done(&down));
        assert!(links.faults().is_empty());
    }
}
