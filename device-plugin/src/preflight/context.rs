//! What is looked at: roots, the node's devices, and what the administrator wants of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hca::{Host, NetnsMode};

use crate::candidate::gather;
use crate::config::{Config, Sharing};
use crate::observe::Observation;
use crate::pool;
use crate::snapshot::Shape;

/// Whose checks are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The node's: drivers, hardware, kubelet.
    Node,
    /// Those of the container this process runs in.
    Pod,
}

/// What is wanted, where the administrator says so.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wishes {
    /// How RDMA devices should relate to network namespaces.
    pub netns_mode: Option<NetnsMode>,
    /// Rate that each port should have, in Gb/s.
    pub rate: Option<u32>,
    /// A partition key that each InfiniBand port should have.
    pub pkey: Option<u16>,
    /// How long error counters are watched.
    pub window: Duration,
}

/// Roots and wishes.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Prefix of the host's files.
    pub root: PathBuf,
    /// The kubelet's root directory.
    pub kubelet_root_dir: PathBuf,
    /// The kubelet's directory of device plugins.
    pub device_plugin_dir: PathBuf,
    /// Directory of CNI programs.
    pub cni_bin_dir: PathBuf,
    /// Directory of CNI configurations.
    pub cni_conf_dir: PathBuf,
    /// The node policy.
    pub policy: PathBuf,
    /// Whose checks.
    pub scope: Scope,
    /// What is wanted.
    pub wishes: Wishes,
    /// The daemon's configuration, if one is given.
    pub config: Option<Config>,
    /// The node as `kubectl get node NAME -o json` prints it.
    pub node_object: Option<serde_json::Value>,
    /// Networks as `kubectl get network-attachment-definitions -A -o json` prints them.
    pub networks: Option<serde_json::Value>,
}

/// Everything that subjects look from.
#[derive(Debug)]
pub struct Context {
    /// Roots and wishes.
    pub settings: Settings,
    /// The host's kernel file systems.
    pub host: Host,
    /// RDMA devices, netdevs, nodes.
    pub seen: Observation,
    /// RDMA devices by the pools that have them; `None` without a configuration.
    pub pools: Option<Pools>,
}

/// Which pools have which RDMA devices.
pub type Pools = BTreeMap<String, Vec<Membership>>;

/// A pool that has an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// The resource.
    pub resource: String,
    /// Several pods may use the device.
    pub shared: bool,
    /// Units on this device.
    pub units: u32,
}

impl Context {
    /// Looks at what all subjects need.
    ///
    /// # Errors
    /// [`hca::Error`] if there is no sysfs to look at.
    pub fn look(settings: Settings) -> hca::Result<Self> {
        let host = Host::at(&settings.root);
        let seen = Observation::make(&host)?;
        let pools = settings
            .config
            .as_ref()
            .map(|config| memberships(config, &seen));
        Ok(Self {
            settings,
            host,
            seen,
            pools,
        })
    }

    /// True if the running kernel may be asked as well: it is the one whose files are read.
    #[must_use]
    pub fn live(&self) -> bool {
        self.settings.root == Path::new("/")
    }

    /// True if the container's checks are made.
    #[must_use]
    pub fn in_pod(&self) -> bool {
        self.settings.scope == Scope::Pod
    }

    /// A path of the host.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.settings.root.join(path.trim_start_matches('/'))
    }

    /// The pools an RDMA device is in; none if it is in none, or without a configuration.
    #[must_use]
    pub fn pools_of(&self, device: &str) -> &[Membership] {
        self.pools
            .as_ref()
            .and_then(|pools| pools.get(device))
            .map_or(&[], Vec::as_slice)
    }

    /// True unless a configuration leaves this device out of all pools.
    #[must_use]
    pub fn offered(&self, device: &str) -> bool {
        self.pools
            .as_ref()
            .is_none_or(|pools| pools.contains_key(device))
    }
}

fn memberships(config: &Config, seen: &Observation) -> Pools {
    let (candidates, _) = gather::list(&seen.inventory, &seen.functions);
    let assembled = pool::assemble(config, &candidates, seen, &[]);
    let mut pools = Pools::new();
    for (pool, snapshot) in config.pools.iter().zip(&assembled.snapshots) {
        let units = match snapshot.shape() {
            Shape::Pooled { units } => units,
            _ => 0,
        };
        for member in snapshot.members() {
            let units = match pool.sharing {
                Sharing::Pooled { .. } => units,
                Sharing::Slots { .. } => member.slots,
                Sharing::Exclusive { .. } => 1,
            };
            for device in &member.rdma_devices {
                pools.entry(device.clone()).or_default().push(Membership {
                    resource: pool.resource.as_str().to_owned(),
                    shared: pool.sharing.is_shared(),
                    units,
                });
            }
        }
    }
    pools
}
