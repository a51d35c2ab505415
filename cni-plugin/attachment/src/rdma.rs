//! The RDMA devices of an attachment, where the RDMA subsystem has namespaces of its own
//! (exclusive mode): they go into the pod before its netdev, and return before it.
//!
//! A move takes a device's character devices away and makes new ones, with the lowest numbers
//! that are free (`ib_uverbs_add_one()`). The container was promised the old number when it was
//! allocated. So a move that would change the number is refused before anything is changed; one
//! that did nevertheless is taken back and the attachment fails. Moves are made one at a time on
//! a node, because two together could swap their numbers.
//!
//! Returning asks where each device is, not where it was left, so it can begin wherever an earlier
//! call was cut off. The kernel itself returns a device whose namespace dies, later than
//! the namespace is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use cni_wire::Code;
use hca::{CharDevice, Guid, Host, NetnsMode, chardev::verbs};
use netlink::{
    Namespace,
    rdma::{self, Device},
};

use crate::{
    error::Error,
    journal::{RdmaDevice, Record},
    node::Node,
};

/// The devices on which RDMA devices stand, by these devices' names: of all namespaces, as their
/// verbs nodes are seen from each. Names are unique in all of them (`ib_device_rename()`).
pub fn parents(host: &Host) -> Result<BTreeMap<String, String>, Error> {
    let class = host.sys.join("class/infiniband_verbs");
    let of_node = |(owner, node): (String, CharDevice)| {
        let parent = std::fs::canonicalize(class.join(node.name).join("device")).ok()?;
        Some((owner, parent.file_name()?.to_str()?.to_owned()))
    };
    Ok(verbs(host)?.into_iter().filter_map(of_node).collect())
}

/// The device of a record: it has the same parent device and one of the GUIDs. Its index distinguishes
/// several such devices, and devices without a parent. Its name does not: a pod can change it. Pure.
pub fn find<'a>(
    known: &RdmaDevice,
    there: &'a [Device],
    parents: &BTreeMap<String, String>,
) -> Option<&'a Device> {
    let is_it = |device: &&Device| {
        let stands_there = match (&known.parent, parents.get(&device.name)) {
            (Some(known), Some(now)) => known == now,
            _ => device.index == known.index,
        };
        let has_guid = match device.node_guid {
            // A VF whose GUID was never set, or was set to none again.
            None | Some(Guid(u64::MAX)) => true,
            Some(guid) => known.node_guids.contains(&guid.to_string()),
        };
        stands_there && has_guid
    };
    let mut found = there.iter().filter(is_it);
    let by_index = found.clone().find(|device| device.index == known.index);
    by_index.or_else(|| found.next().filter(|_| found.next().is_none()))
}

/// What containers know of the numbers of device nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceNodes {
    /// They were promised them when the HCA was allocated.
    Promised,
    /// They get those that the daemon reads after the move: the HCA was bound late.
    ReadAfterwards,
}

impl DeviceNodes {
    pub(crate) fn of(record: &Record) -> Self {
        match record.slots().next() {
            None => DeviceNodes::Promised,
            Some(_) => DeviceNodes::ReadAfterwards,
        }
    }
}

/// Moves devices into a pod.
///
/// # Errors
/// Code 11: one would get another character device than the container was promised; code 100:
/// the kernel's refusal. What was moved by then is named in the journal.
pub(crate) fn move_in(
    node: &Node,
    pod: &Namespace,
    devices: &[RdmaDevice],
    nodes: DeviceNodes,
) -> Result<(), Error> {
    if devices.is_empty() {
        return Ok(());
    }
    let _lock = node.journal.lock_rdma()?;
    let (Some(mut host), Some(mut inside)) = (
        rdma::socket(&node.netns.namespace, &node.netns.namespace)?,
        rdma::socket(pod, &node.netns.namespace)?,
    ) else {
        return Err(Error::new(Code::Unavailable, "no RDMA stack is loaded"));
    };
    for known in devices {
        let there = rdma::list(&mut host)?;
        let parents = parents(&node.roots)?;
        let device = find(known, &there, &parents).ok_or_else(|| {
            Error::new(
                Code::TryAgain,
                format!("RDMA device {} left the host meanwhile", known.name),
            )
        })?;
        let before = rdma::verbs_node(&mut host, device)?;
        if let (Some(before), DeviceNodes::Promised) = (&before, nodes) {
            // It was checked before, too; another attachment may have been quicker.
            let all = verbs(&node.roots)?.into_iter().map(|(_, node)| node.name);
            keeps_its_number(&device.name, before, &all.collect::<Vec<_>>())?;
        }
        rdma::give(&mut host, device, pod).map_err(Error::rdma_move)?;
        let arrived = rdma::list(&mut inside)?;
        let arrived = find(known, &arrived, &parents).ok_or_else(|| {
            Error::new(
                Code::Kernel,
                format!("RDMA device {} did not arrive in the pod", known.name),
            )
        })?;
        let after = rdma::verbs_node(&mut inside, arrived)?;
        if after != before && nodes == DeviceNodes::Promised {
            let name = |node: Option<String>| node.unwrap_or_else(|| "none".to_owned());
            return Err(Error::new(
                Code::TryAgain,
                format!(
                    "RDMA device {} has the character device {} in the pod, but the container was \
                     promised {}",
                    known.name,
                    name(after),
                    name(before)
                ),
            )
            .with_details("another RDMA device left the host meanwhile; delete the pod, so that a new one is allocated"));
        }
    }
    Ok(())
}

/// Refuses a move after which a device would have another number: the lowest that is free then,
/// its own among them. `all` are the verbs nodes of the host. Pure.
pub fn keeps_its_number(device: &str, node: &str, all: &[String]) -> Result<(), Error> {
    let number = |name: &str| name.strip_prefix("uverbs")?.parse::<u32>().ok();
    let Some(own) = number(node) else {
        return Ok(());
    };
    let used: BTreeSet<u32> = all.iter().filter_map(|name| number(name)).collect();
    match (0..own).find(|lower| !used.contains(lower)) {
        None => Ok(()),
        Some(lower) => Err(Error::new(
            Code::TryAgain,
            format!(
                "moving RDMA device {device} is refused: it has /dev/infiniband/{node}, which the \
                 container was promised, and would become uverbs{lower}, which is free"
            ),
        )
        .with_details(
            "it can be moved once the lower numbers are in use: load the driver of the device \
             that had them, or, with no pod using RDMA, reload the drivers so that numbers are \
             given anew",
        )),
    }
}

/// That a pod still has its devices.
///
/// # Errors
/// Code 104 naming the one it has not.
pub fn check(node: &Node, pod: &Namespace, devices: &[RdmaDevice]) -> Result<(), Error> {
    if devices.is_empty() {
        return Ok(());
    }
    let there = match rdma::socket(pod, &node.netns.namespace)? {
        Some(mut inside) => rdma::list(&mut inside)?,
        None => Vec::new(),
    };
    let parents = parents(&node.roots)?;
    match devices
        .iter()
        .find(|known| find(known, &there, &parents).is_none())
    {
        None => Ok(()),
        Some(lost) => Err(Error::new(
            Code::Differs,
            format!("RDMA device {} is gone from the pod", lost.name),
        )),
    }
}

/// Returns devices, out of `pod` when they are there, and gives them their names again.
/// `timeout` is how long a dying namespace may still have them.
///
/// # Errors
/// One is still away, or the kernel's refusal.
pub fn return_devices(
    node: &Node,
    devices: &[RdmaDevice],
    pod: Option<&Namespace>,
    timeout: Duration,
) -> Result<(), Error> {
    if devices.is_empty() || hca::netns_mode(&node.roots)? != Some(NetnsMode::Exclusive) {
        // In shared mode nothing is in a namespace; it cannot be left with devices in pods.
        return Ok(());
    }
    let Some(mut host) = rdma::socket(&node.netns.namespace, &node.netns.namespace)? else {
        return Ok(());
    };
    if let Some(pod) = pod {
        // It keeps the numbers of an ADD as they were promised, which is compared there as well.
        let _lock = node.journal.lock_rdma().ok();
        if let Some(mut inside) = rdma::socket(pod, &node.netns.namespace)? {
            let there = rdma::list(&mut inside)?;
            let parents = parents(&node.roots)?;
            for known in devices {
                if let Some(device) = find(known, &there, &parents) {
                    let given = || rdma::give(&mut inside, device, &node.netns.namespace);
                    pod.enter(&node.netns.namespace, given)?
                        .map_err(Error::rdma_move)?;
                }
            }
        }
    }
    let started = Instant::now();
    for known in devices {
        loop {
            let there = rdma::list(&mut host)?;
            let parents = parents(&node.roots)?;
            if let Some(device) = find(known, &there, &parents) {
                // A name that is taken meanwhile is a warning: the device is back.
                if device.name != known.name
                    && let Err(e) = rdma::rename(&mut host, device, &known.name)
                {
                    node.log.warn(e);
                }
                node.log.info(format_args!(
                    "RDMA device {} is back on the host",
                    known.name
                ));
                break;
            }
            let is_late = started.elapsed() >= timeout;
            let is_gone = match &known.parent {
                Some(parent) => !has_driver(&node.roots.sys, parent),
                // A soft device has no parent that shows it.
                None => is_late && is_nowhere(&verbs(&node.roots)?, &there),
            };
            if is_gone {
                node.log.warn(format_args!(
                    "RDMA device {} is gone from the host; nothing to return",
                    known.name
                ));
                break;
            }
            if is_late {
                let what = format_args!("RDMA device {}", known.name);
                return Err(Error::nowhere(what, timeout));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

/// Whether a device is on a bus and has a driver. While the kernel moves the RDMA device on it, which it
/// disables first (`rdma_dev_change_netns()`), no namespace lists that.
fn has_driver(sys: &Path, device: &str) -> bool {
    let Ok(buses) = fs::read_dir(sys.join("bus")) else {
        return true;
    };
    let driver = Path::new("devices").join(device).join("driver");
    buses.flatten().any(|bus| bus.path().join(&driver).exists())
}

/// Whether each verbs node of all namespaces is of a device that the host has. Without the module that
/// makes these nodes that is not known. Pure.
fn is_nowhere(verbs: &[(String, CharDevice)], of_host: &[Device]) -> bool {
    let is_of_host = |owner: &String| of_host.iter().any(|device| device.name == *owner);
    !verbs.is_empty() && verbs.iter().all(|(owner, _)| is_of_host(owner))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(index: u32, name: &str, guid: u64) -> Device {
        Device {
            index,
            name: name.into(),
            node_guid: Some(Guid(guid)),
        }
    }

    fn known() -> RdmaDevice {
        RdmaDevice {
            name: "mlx5_1".into(),
            index: 4,
            node_guids: vec![Guid(7).to_string()],
            parent: Some("0000:3b:00.1".into()),
        }
    }

    fn on(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let pairs = pairs
            .iter()
            .map(|(name, parent)| ((*name).to_owned(), (*parent).to_owned()));
        pairs.collect()
    }

    #[test]
    fn a_device_is_found_again_whatever_the_pod_called_it() {
        let parents = on(&[("mlx5_0", "0000:3b:00.0"), ("mine", "0000:3b:00.1")]);
        let renamed = [device(3, "mlx5_0", 6), device(4, "mine", 7)];
        assert_eq!(find(&known(), &renamed, &parents).unwrap().name, "mine");
        let bound_again = [device(9, "mine", 7)];
        assert_eq!(find(&known(), &bound_again, &parents).unwrap().index, 9);
    }

    #[test]
    fn a_name_alone_does_not_make_a_device() {
        let parents = on(&[("mlx5_1", "0000:3b:00.0")]);
        assert_eq!(find(&known(), &[device(4, "mlx5_1", 8)], &parents), None);
        assert_eq!(find(&known(), &[device(9, "mlx5_1", 7)], &parents), None);
        // A GUID that two functions have (a bond's) does not either.
        let both = on(&[("a", "0000:3b:00.1"), ("b", "0000:3b:00.1")]);
        let alike = [device(8, "a", 7), device(9, "b", 7)];
        assert_eq!(find(&known(), &alike, &both), None);
        let alike = [device(8, "a", 7), device(4, "b", 7)];
        assert_eq!(find(&known(), &alike, &both).unwrap().name, "b");
    }

    /// Its driver has made another device, which has another index.
    #[test]
    fn a_vf_is_found_by_its_guid_before_and_that_of_its_attachment() {
        let vf = RdmaDevice {
            node_guids: [7, 8].map(|guid| Guid(guid).to_string()).to_vec(),
            ..known()
        };
        let parents = on(&[("mlx5_7", "0000:3b:00.1"), ("mlx5_2", "0000:3b:00.1")]);
        for (guid, is_it) in [(7, true), (8, true), (u64::MAX, true), (9, false)] {
            let there = [device(11, "mlx5_7", guid)];
            assert_eq!(find(&vf, &there, &parents).is_some(), is_it, "{guid}");
        }
        let there = [device(11, "mlx5_7", 9), device(12, "mlx5_2", 8)];
        assert_eq!(find(&vf, &there, &parents).unwrap().name, "mlx5_2");
    }

    /// While the kernel moves it, no namespace lists it.
    #[test]
    fn a_device_is_gone_when_the_hardware_below_it_is() {
        let dir = tempfile::tempdir().unwrap();
        assert!(has_driver(dir.path(), "0000:3b:00.1"), "not known");
        let function = dir.path().join("bus/pci/devices/0000:3b:00.1");
        fs::create_dir_all(function.join("driver")).unwrap();
        assert!(has_driver(dir.path(), "0000:3b:00.1"));
        assert!(!has_driver(dir.path(), "0000:3b:00.2"));
        fs::remove_dir(function.join("driver")).unwrap();
        assert!(!has_driver(dir.path(), "0000:3b:00.1"));
    }

    #[test]
    fn a_soft_device_is_gone_when_the_host_has_each_verbs_node() {
        let node = |owner: &str| {
            let node = CharDevice {
                name: "uverbs0".into(),
                path: "/dev/null".into(),
                number: "231:192".parse().unwrap(),
                port: None,
            };
            (owner.to_owned(), node)
        };
        let of_host = [device(3, "mlx5_0", 6)];
        assert!(is_nowhere(&[node("mlx5_0")], &of_host));
        assert!(!is_nowhere(&[node("mine"), node("mlx5_0")], &of_host));
        assert!(!is_nowhere(&[], &of_host), "without ib_uverbs");
    }

    #[test]
    fn a_move_that_would_change_the_promised_node_is_refused() {
        let all = ["uverbs0", "uverbs1", "uverbs3"].map(str::to_owned);
        keeps_its_number("mlx5_1", "uverbs1", &all).unwrap();
        keeps_its_number("mlx5_0", "uverbs0", &all).unwrap();
        let error = keeps_its_number("mlx5_3", "uverbs3", &all).unwrap_err();
        assert_eq!(error.code, Code::TryAgain);
        assert!(
            error.msg.contains("uverbs3") && error.msg.contains("uverbs2"),
            "{error}"
        );
    }
}
