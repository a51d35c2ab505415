//! What was last known of each HCA: what it is while the host cannot see all of it, and that it was here.
//!
//! Selectors ask for netdev names, port rates and the like, which are not visible from the host
//! while a pod has them. An HCA must not fall out of its pool for that. The daemon writes what it
//! knows to one file of the node's state directory ([`FILE`]), so its next start knows it as well.
//! Names and numbers of one boot say nothing about the next one: there, the host sees every HCA
//! before a pod can take it. What outlives a boot is that a physical function was here: a NIC that
//! does not come back is missing. Virtual and scalable functions and soft RoCE come and go.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use hca::chardev::CharDevices;
use hca::inventory::Unusable;
use hca::topology::Machine;
use hca::{Hca, HcaId, Inventory, Netdev, PortState, RdmaDevice};
use jiff::Timestamp;
use node::identity::boot_id;
use node::policy::Policy;
use node::trust;
use serde::{Deserialize, Serialize};

use crate::config::ResourceName;
use crate::host_snapshot::HostSnapshot;

/// The file in the state directory.
pub const FILE: &str = "known-hcas";
/// The version of the file.
const VERSION: u32 = 1;
/// An HCA has about 2 kB.
const MAX_BYTES: u64 = 16 * 1024 * 1024;

/// HCAs as they were last known, all of them whole. The default one is for a file that is not read yet.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Of the file; none if that was not read, and must stay.
    version: Option<u32>,
    boot: String,
    known: BTreeMap<HcaId, Known>,
    /// By resource, the HCAs of pools whose units name none ([`Memory::note_pooled`]).
    pooled: BTreeMap<String, BTreeSet<HcaId>>,
    /// Resources of this boot: pods may hold units of one that is not configured any more.
    resources: BTreeSet<String>,
}

/// One HCA.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Known {
    hca: Hca,
    /// The boot that it was seen in last.
    boot: String,
    /// Since when it is not here, in Unix seconds.
    missing_since: Option<u64>,
    /// The resource that it was of when it was here, and its rail.
    resource: Option<String>,
    rail: Option<u32>,
}

/// An HCA that was here and is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Its identity.
    pub id: HcaId,
    /// Names of its RDMA devices when it was here.
    pub rdma_devices: Vec<String>,
    /// Since when, in Unix seconds.
    pub since: u64,
    /// The resource that it was of.
    pub resource: Option<String>,
    pub rail: Option<u32>,
}

impl fmt::Display for Missing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = i64::try_from(self.since).ok();
        let since = since.and_then(|since| Timestamp::from_second(since).ok());
        let (id, names) = (&self.id, self.rdma_devices.join(","));
        write!(
            formatter,
            "HCA {id} ({names}) was here and is missing since {}",
            since.unwrap_or_default()
        )
    }
}

impl Memory {
    /// What earlier daemons knew. `boot` is the kernel's boot ID.
    pub fn load(state_dir: &Path, boot: String) -> Self {
        let path = state_dir.join(FILE);
        let mut memory = read(&path).unwrap_or_else(|error| {
            tracing::warn!(
                file = %path.display(), error,
                "cannot read what was known of HCAs; one that a pod holds stays in its pool only \
                 by the kubelet's allocation"
            );
            Self::default()
        });
        if memory.boot != boot {
            memory.pooled.clear();
            memory.resources.clear();
        }
        Self {
            version: Some(VERSION),
            boot,
            ..memory
        }
    }

    /// Takes in what earlier daemons knew, read after this one began. What they knew of this boot stays: since
    /// then a pod may hide some of it, and the next scan brings what is new.
    pub fn recall(&mut self, earlier: Self) {
        let seen = std::mem::replace(self, earlier);
        for (id, mut known) in seen.known {
            if self.of_this_boot(&id).is_none() {
                known.boot.clone_from(&self.boot);
                self.known.insert(id, known);
            }
        }
        self.resources.extend(seen.resources);
        for (resource, hcas) in seen.pooled {
            self.pooled.entry(resource).or_default().extend(hcas);
        }
    }

    /// Resources that were configured in this boot.
    pub fn resources(&self) -> impl Iterator<Item = ResourceName> {
        let names = self.resources.iter();
        names.filter_map(|name| ResourceName::parse(name).ok())
    }

    /// Remembers what is configured.
    pub fn note_resources(&mut self, configured: impl Iterator<Item = String>) {
        self.resources.extend(configured);
    }

    /// The HCAs that a held unit of this resource can stand for, where its units name none.
    pub fn pooled(&self, resource: &str) -> impl Iterator<Item = &HcaId> {
        self.pooled.get(resource).into_iter().flatten()
    }

    /// Remembers the HCAs of pools whose units name none. While a pod holds a unit, it may have each HCA
    /// that the pool had since: the configuration can drop one, or give it to another pool.
    pub fn note_pooled(
        &mut self,
        now: BTreeMap<String, BTreeSet<HcaId>>,
        may_be_held: impl Fn(&str, &HcaId) -> bool,
    ) {
        self.pooled.retain(|resource, hcas| {
            hcas.retain(|hca| may_be_held(resource, hca));
            !hcas.is_empty()
        });
        for (resource, hcas) in now {
            self.pooled.entry(resource).or_default().extend(hcas);
        }
    }

    /// The file's content, unless the file has to stay as it is.
    pub fn text(&self) -> Option<String> {
        self.version.and_then(|_| serde_json::to_string(self).ok())
    }

    /// The HCAs of a scan, with what was known of those that the host cannot see whole, and remembers
    /// what is known now.
    pub fn list(&mut self, seen: &HostSnapshot, now: SystemTime) -> (Vec<Hca>, Vec<Unusable>) {
        let (mut candidates, mut unusable) =
            (seen.inventory.hcas.clone(), seen.inventory.unusable.clone());
        self.complete(&mut candidates, &mut unusable, &seen.inventory);
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.known.retain(|id, known| {
            let is_here = candidates.iter().any(|hca| hca.id == *id);
            known.missing_since = (!is_here).then(|| known.missing_since.unwrap_or(now));
            is_here || matches!(id, HcaId::Pci(_)) && known.hca.owner().is_none()
        });
        (candidates, unusable)
    }

    /// HCAs that were here, in this boot or an earlier one, and are not.
    pub fn missing(&self) -> Vec<Missing> {
        let missing = self.known.iter().filter_map(|(id, known)| {
            let names = known.hca.rdma_names().into_iter();
            Some(Missing {
                id: id.clone(),
                rdma_devices: names.map(str::to_owned).collect(),
                since: known.missing_since?,
                resource: known.resource.clone(),
                rail: known.rail,
            })
        });
        missing.collect()
    }

    /// Remembers where the HCAs that are here belong. The netdev's name shows the rail, and a pod may have it.
    pub fn note_places(&mut self, machine: &Machine, resource: impl Fn(&HcaId) -> Option<String>) {
        let here = self.known.iter_mut();
        for (id, known) in here.filter(|(_, known)| known.missing_since.is_none()) {
            known.resource = resource(id);
            let mut nics = machine.nics.iter();
            if let Some(nic) = nics.find(|nic| nic.hca.id == *id && nic.hca.shows_netdevs()) {
                known.rail = nic.rail.as_ref().map(|rail| rail.number);
            }
        }
    }

    /// The rail of an HCA, as it was last known.
    pub fn rail(&self, id: &HcaId) -> Option<u32> {
        self.known.get(id)?.rail
    }

    /// Forgets an HCA that is missing: it was removed for good.
    pub fn forget(&mut self, hca: &HcaId) {
        self.known
            .retain(|id, known| known.missing_since.is_none() || id != hca);
    }

    /// What is known of an HCA in this boot.
    fn of_this_boot(&self, id: &HcaId) -> Option<&Hca> {
        let known = self.known.get(id)?;
        (self.version.is_some() && known.boot == self.boot).then_some(&known.hca)
    }

    /// Fills what candidates lack from what was known of them, and remembers what is known now.
    /// RDMA devices on no bus have no identity while they are not visible: their names, which are
    /// unique over all network namespaces, lead to what is known, and they are usable then.
    fn complete(
        &mut self,
        candidates: &mut Vec<Hca>,
        unusable: &mut Vec<Unusable>,
        inventory: &Inventory,
    ) {
        let in_sight = |name: &str| inventory.netdev(name).is_some();
        for seen in candidates.iter_mut() {
            let known = self.of_this_boot(&seen.id);
            if let Some(known) = known.filter(|known| is_same_model(seen, known)) {
                fill(seen, known, in_sight);
            }
            if seen.is_read() {
                let before = self.known.remove(&seen.id);
                let (resource, rail) = before.map_or((None, None), |one| (one.resource, one.rail));
                let known = Known {
                    hca: lasting(seen),
                    boot: self.boot.clone(),
                    missing_since: None,
                    resource,
                    rail,
                };
                self.known.insert(seen.id.clone(), known);
            }
        }
        let hidden = inventory.unusable.iter();
        for hidden in hidden.filter(|one| one.device.ports.is_empty()) {
            let name = &hidden.device.name;
            let has_name = |hca: &Hca| hca.rdma_devices.iter().any(|one| one.name == *name);
            let by_guid = |hca: &&Hca| matches!(hca.id, HcaId::NodeGuid(_)) && has_name(hca);
            let mut of_this_boot = self.known.keys().filter_map(|id| self.of_this_boot(id));
            let Some(known) = of_this_boot.find(by_guid) else {
                continue;
            };
            if !candidates
                .iter()
                .any(|seen| seen.id == known.id || has_name(seen))
            {
                unusable.retain(|one| one.device.name != *name);
                let mut hca = Hca {
                    elsewhere: hidden.elsewhere,
                    fault: (!hidden.elsewhere).then(|| hidden.reason.clone()),
                    ..known.clone()
                };
                for device in hca.rdma_devices.iter_mut().filter(|one| one.name == *name) {
                    device.char_devices = hidden.device.char_devices.clone();
                }
                candidates.push(hca);
            }
        }
    }
}

/// The HCAs of a scan, those in pods with what the daemon of this node knows of them. For commands:
/// nothing is written.
#[must_use]
pub fn list(seen: &HostSnapshot, policy: &Path, host: &hca::Host) -> (Vec<Hca>, Vec<Unusable>) {
    let state_dir = Policy::load_for_release(policy).0.state_dir;
    Memory::load(&state_dir, boot_id(&host.proc)).list(seen, SystemTime::now())
}

/// What is worth knowing of an HCA while it is not visible. States, GIDs and the like change with
/// each pod: the file would be written each time.
fn lasting(seen: &Hca) -> Hca {
    let mut known = Hca {
        elsewhere: false,
        fault: None,
        ..seen.clone()
    };
    for device in &mut known.rdma_devices {
        device.char_devices = CharDevices::default();
        for port in &mut device.ports {
            port.gids.entries.retain(|entry| entry.index == 0);
            port.netdev = None;
            port.active_mtu = None;
            (port.state, port.phys_state) = (PortState::Unknown, "Unknown".to_owned());
            (port.lid, port.sm_lid) = (0, 0);
        }
    }
    for netdev in &mut known.netdevs {
        *netdev = Netdev {
            name: std::mem::take(&mut netdev.name),
            link_type: netdev.link_type,
            ..Netdev::default()
        };
    }
    known
}

/// Whether it may be the same HCA: one that was plugged in its place has its identity, and nothing of
/// its attributes.
fn is_same_model(seen: &Hca, known: &Hca) -> bool {
    let both = seen.pci.as_ref().zip(known.pci.as_ref());
    both.is_none_or(|(seen, known)| (seen.vendor, seen.device) == (known.vendor, known.device))
}

/// Fills what is not visible. `in_sight` says that the host has a netdev of this name: it is not one
/// of this HCA, or it would have been seen.
fn fill(seen: &mut Hca, known: &Hca, in_sight: impl Fn(&str) -> bool) {
    if !seen.is_read() {
        seen.bond_names.clone_from(&known.bond_names);
    }
    let are_away = seen.netdevs.len() < known.netdevs.len();
    let alone = seen.rdma_devices.len() == 1 && known.rdma_devices.len() == 1;
    for device in &mut seen.rdma_devices {
        let mut all = known.rdma_devices.iter();
        // It can be renamed where it is.
        let Some(same) = all.find(|one| one.name == device.name || alone) else {
            continue;
        };
        if device.ports.is_empty() {
            *device = RdmaDevice {
                name: std::mem::take(&mut device.name),
                char_devices: std::mem::take(&mut device.char_devices),
                ..same.clone()
            };
        }
        for port in &mut device.ports {
            let mut all = same.ports.iter();
            let Some(same) = all.find(|one| one.number == port.number) else {
                continue;
            };
            if are_away {
                port.carries_data = port.netdev.is_some() || same.carries_data;
            }
            if !port.is_active() {
                port.rate = same.rate.clone().or(port.rate.take());
            }
            // Its first GID goes with the netdev and comes back a moment later.
            if port.guid().is_none() {
                port.gids.entries.extend(same.gids.entries.iter().cloned());
            }
        }
    }
    let is_away = |name: &str| !in_sight(name);
    for netdev in known.netdevs.iter().filter(|one| is_away(&one.name)) {
        // As many as before: one of another name was renamed.
        if seen.netdevs.len() < known.netdevs.len() {
            seen.netdevs.push(netdev.clone());
        }
    }
    if seen.pf() == known.pf() {
        for name in known.pf_netdevs.iter().filter(|name| is_away(name)) {
            if seen.pf_netdevs.len() < known.pf_netdevs.len() {
                seen.pf_netdevs.push(name.clone());
            }
        }
    }
}

/// What the file has; nothing where there is none.
fn read(path: &Path) -> Result<Memory, String> {
    let text =
        trust::check_directory(trust::parent(path)).and_then(|()| trust::read(path, MAX_BYTES));
    let Some(text) = text.map_err(|error| error.to_string())? else {
        return Ok(Memory::default());
    };
    let memory: Memory = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    match memory.version {
        Some(VERSION) => Ok(memory),
        other => Err(format!("its version is {}", other.unwrap_or_default())),
    }
}
