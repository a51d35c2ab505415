//! Labels for schedulers: what the node is equipped with, decided on its state. A port that goes down, or an
//! HCA that is missing, does not change them; equal hardware has equal labels.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use node::{features, file, trust};
use node_wire::rdma_node::{HcaState, NodeState};
use serde_json::{Value, json};

const NICS: &str = "rdma-netdev.io/nics";
const LINK_LAYER: &str = "rdma-netdev.io/link-layer";
const RATE: &str = "rdma-netdev.io/rate";
const RAILS: &str = "rdma-netdev.io/rails";
const BLOCK: &str = "rdma-netdev.io/block";
/// node-feature-discovery does not read more of a file.
const MAX_BYTES: u64 = 64 * 1024;
/// All of them.
const NAMES: [&str; 5] = [NICS, LINK_LAYER, RATE, RAILS, BLOCK];

/// Values by name.
pub type Labels = BTreeMap<String, String>;

/// The labels of a state; none while the daemon does not know each pool yet. `block` is that of the policy,
/// `before` are the labels that are set.
#[must_use]
pub fn of(state: &NodeState, block: Option<&str>, before: &Labels) -> Option<Labels> {
    let mut modes = state.resources.iter().map(|resource| &resource.mode);
    if state.resources.is_empty() || modes.any(String::is_empty) {
        return None;
    }
    let pooled = state.hcas.iter().filter(|hca| hca.resource.is_some());
    let pooled: Vec<&HcaState> = pooled.collect();
    let missing = state.missing.iter().filter(|hca| hca.resource.is_some());
    let here = pooled
        .iter()
        .map(|hca| (&hca.hardware.id, hca.hardware.rail));
    let all: BTreeMap<&String, Option<u32>> =
        missing.map(|hca| (&hca.id, hca.rail)).chain(here).collect();
    if all.is_empty() {
        return Some(Labels::new());
    }
    let rails: BTreeSet<u32> = all.values().copied().flatten().collect();
    let ports = pooled.iter().flat_map(|hca| &hca.hardware.ports);
    let layers: BTreeSet<&str> = ports.map(|port| &*port.link_layer).collect();
    let layer = match layers.len() {
        0 | 1 => layers.first().copied(),
        _ => Some("mixed"),
    };
    // While one is missing, what the others are says less than what was.
    let known = |name: &str, now: Option<String>| {
        let was = || before.get(name).cloned();
        match all.len() == pooled.len() {
            true => now.or_else(was),
            false => was().or(now),
        }
    };
    let values = [
        (NICS, Some(all.len().to_string())),
        (LINK_LAYER, known(LINK_LAYER, layer.map(str::to_owned))),
        (RATE, known(RATE, rate(&pooled))),
        (RAILS, (!rails.is_empty()).then(|| rails.len().to_string())),
        (BLOCK, block.map(str::to_owned)),
    ];
    let labels = values.into_iter();
    Some(
        labels
            .filter_map(|(name, value)| Some((name.to_owned(), value?)))
            .collect(),
    )
}

/// The rate of most HCAs in Gb/s, the higher one of two. None until a port of this rate was up since the node
/// booted: drivers report any rate before.
fn rate(hcas: &[&HcaState]) -> Option<String> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for hca in hcas {
        let rates = hca.hardware.ports.iter().filter_map(|port| port.rate_mbps);
        if let Some(rate) = rates.max() {
            *counts.entry(rate).or_default() += 1;
        }
    }
    let (rate, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    let mut ports = hcas.iter().flat_map(|hca| &hca.hardware.ports);
    let is_proved = ports
        .any(|port| port.rate_mbps == Some(rate) && matches!(&*port.state, "ACTIVE" | "UNKNOWN"));
    is_proved.then(|| rate.div_ceil(1000).to_string())
}

/// The labels in node-feature-discovery's file; empty where there is none that can be read.
#[must_use]
pub fn read(directory: &Path) -> Labels {
    let file = trust::read(&directory.join(features::FILE), MAX_BYTES);
    let text = file.ok().flatten().unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    own(text.lines().filter_map(|line| line.split_once('=')))
}

/// Those of ours.
pub fn own<'l>(labels: impl Iterator<Item = (&'l str, &'l str)>) -> Labels {
    let own = labels.filter(|(name, _)| NAMES.contains(name));
    own.map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Makes the file as the labels are, where node-feature-discovery has its directory.
///
/// # Errors
/// The file cannot be written or removed.
pub fn write(directory: &Path, labels: &Labels) -> io::Result<()> {
    if !directory.is_dir() || read(directory) == *labels {
        return Ok(());
    }
    let path = directory.join(features::FILE);
    if labels.is_empty() {
        let removed = fs::remove_file(path);
        return removed.or_else(|error| match error.kind() {
            ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        });
    }
    let lines = labels
        .iter()
        .map(|(name, value)| format!("{name}={value}\n"));
    // Without a wait for the disk: the next agent compares it.
    file::replace_in_boot(&path, lines.collect::<String>())
}

/// The merge patch that makes a Node's labels so.
#[must_use]
pub fn patch(labels: &Labels) -> Value {
    let values: BTreeMap<&str, Option<&String>> = NAMES
        .iter()
        .map(|name| (*name, labels.get(*name)))
        .collect();
    json!({"metadata": {"labels": values}})
}

#[cfg(test)]
mod tests {
    use node_wire::rdma_node::{MissingState, ResourceState};
    use node_wire::status::{HostHca, HostPort};

    use super::*;

    /// An HCA of a pool, with a port.
    fn hca(number: u32, state: &str, rate_mbps: u32) -> HcaState {
        let port = HostPort {
            link_layer: "ether".into(),
            state: state.into(),
            rate_mbps: Some(rate_mbps),
            ..HostPort::default()
        };
        HcaState {
            hardware: HostHca {
                id: format!("hca-{number}"),
                rail: Some(number / 2),
                ports: vec![port],
                ..HostHca::default()
            },
            resource: Some("rdma/nic".into()),
            ..HcaState::default()
        }
    }

    fn node(hcas: Vec<HcaState>) -> NodeState {
        NodeState {
            resources: vec![ResourceState {
                mode: "exclusive".into(),
                ..ResourceState::default()
            }],
            hcas,
            ..NodeState::default()
        }
    }

    fn eight(state: &str) -> NodeState {
        node((0..8).map(|number| hca(number, state, 400_000)).collect())
    }

    fn text(labels: &Labels) -> String {
        let values = labels.iter().map(|(name, value)| {
            let name = name.strip_prefix("rdma-netdev.io/").unwrap();
            format!("{name}={value}")
        });
        values.collect::<Vec<_>>().join(" ")
    }

    fn labels(state: &NodeState) -> String {
        text(&of(state, None, &Labels::new()).unwrap())
    }

    const FULL: &str = "link-layer=ether nics=8 rails=4 rate=400";

    #[test]
    fn labels_say_what_the_pools_have() {
        let mut state = eight("ACTIVE");
        assert_eq!(labels(&state), FULL);
        let labels_in_block = of(&state, Some("su-3"), &Labels::new()).unwrap();
        assert_eq!(text(&labels_in_block), format!("block=su-3 {FULL}"));
        // In no pool: the node's own.
        let mut uplink = hca(9, "ACTIVE", 25_000);
        uplink.resource = None;
        state.hcas.push(uplink);
        assert_eq!(labels(&state), FULL);
        let other = &mut state.hcas[0].hardware;
        (other.ports[0].link_layer, other.rail) = ("infiniband".into(), None);
        assert_eq!(labels(&state), FULL.replace("ether", "mixed"));
        assert_eq!(labels(&node(Vec::new())), "");
    }

    #[test]
    fn neither_ports_nor_pods_nor_missing_hcas_change_labels() {
        let mut state = eight("ACTIVE");
        for (number, word) in ["DOWN", "UNKNOWN", "INIT", "DOWN", "DOWN"]
            .iter()
            .enumerate()
        {
            state.hcas[number].hardware.ports[0].state = (*word).into();
            assert_eq!(labels(&state), FULL);
        }
        // A port that was not up yet, and one that lost lanes.
        state.hcas[0].hardware.ports[0].rate_mbps = Some(40_000);
        state.hcas[5].hardware.ports[0].rate_mbps = Some(100_000);
        assert_eq!(labels(&state), FULL);
        // Shown as missing, or as missing and as a member of its pool until pods end.
        let missing = |number: u32| MissingState {
            id: format!("hca-{number}"),
            rdma_devices: Vec::new(),
            since: String::new(),
            resource: Some("rdma/nic".into()),
            rail: Some(number / 2),
        };
        state.missing = vec![missing(6), missing(7)];
        state.hcas.truncate(7);
        assert_eq!(labels(&state), FULL);
        // The faster half is missing, and then all, as while a driver is loaded anew.
        let before = of(&eight("ACTIVE"), None, &Labels::new()).unwrap();
        for here in [4, 0] {
            let mut state = node((0..here).map(|n| hca(n, "ACTIVE", 200_000)).collect());
            state.missing = (here..8).map(missing).collect();
            assert_eq!(text(&of(&state, None, &before).unwrap()), FULL);
        }
    }

    #[test]
    fn a_rate_that_no_port_proves_does_not_replace_one() {
        let booted = node((0..8).map(|number| hca(number, "DOWN", 40_000)).collect());
        assert_eq!(labels(&booted), "link-layer=ether nics=8 rails=4");
        let before = of(&eight("ACTIVE"), None, &Labels::new()).unwrap();
        assert_eq!(text(&of(&booted, None, &before).unwrap()), FULL);
    }

    #[test]
    fn a_daemon_that_has_not_listed_its_pools_changes_nothing() {
        let mut state = eight("ACTIVE");
        state.resources.push(ResourceState::default());
        assert_eq!(of(&state, None, &Labels::new()), None);
        assert_eq!(of(&NodeState::default(), None, &Labels::new()), None);
    }

    #[test]
    fn the_file_is_written_where_its_directory_is() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("features.d");
        let all = of(&eight("ACTIVE"), None, &Labels::new()).unwrap();
        write(&directory, &all).unwrap();
        assert!(!directory.exists());
        fs::create_dir(&directory).unwrap();
        write(&directory, &all).unwrap();
        let file = directory.join("rdma-netdev");
        let lines = "rdma-netdev.io/link-layer=ether\nrdma-netdev.io/nics=8\nrdma-netdev.io/rails=4\n\
                     rdma-netdev.io/rate=400\n";
        assert_eq!(fs::read_to_string(&file).unwrap(), lines);
        assert_eq!(read(&directory), all);
        write(&directory, &Labels::new()).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn a_patch_removes_labels_that_are_not_so_any_more() {
        let labels = Labels::from([(NICS.to_owned(), "8".to_owned())]);
        let patch = patch(&labels);
        let values = patch.pointer("/metadata/labels").unwrap();
        assert_eq!(values[NICS], "8");
        assert!(values.get(RATE).unwrap().is_null());
    }
}
