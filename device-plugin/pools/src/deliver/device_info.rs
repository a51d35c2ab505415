//! Device information files of the Network Plumbing Working Group: what Multus passes to CNI
//! plugins and shows in a pod's network status about the device that a unit stands for.
//!
//! One file for each allocated unit, written when it is allocated and removed when no pod holds it
//! any more. Allocate itself only hands over what is to be written: the files are wanted when the
//! pod's network is made, which is later. A file that is lost to a crash in between costs Multus
//! this information and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hca::HcaId;
use serde_json::{Value, json};

use crate::config::ResourceName;
use crate::snapshot::{Member, Snapshot, Unit};

/// Version of the device information specification.
const VERSION: &str = "1.1.0";
const SUFFIX: &str = "-device.json";
/// How long after Allocate the kubelet may not yet name a unit as held.
pub const ALLOCATION_GRACE_PERIOD: Duration = Duration::from_secs(30);

/// Contents of files by their names.
pub type Files = BTreeMap<String, String>;

/// The files of allocated units; none for units of a whole pool, which are no single device, none
/// for slots, whose device is not known yet, and none for soft RoCE, for which the specification has no word.
pub fn files(snapshot: &Snapshot, ids: &[String]) -> Files {
    let described = ids.iter().filter_map(|id| match snapshot.unit(id)? {
        Unit::Member(member) => {
            let name = file_name(snapshot.resource(), id);
            Some((name, describe(member)?.to_string()))
        }
        Unit::Pool | Unit::Slot(_) => None,
    });
    described.collect()
}

/// The name that the network attachment library asks for.
fn file_name(resource: &ResourceName, id: &str) -> String {
    format!("{}-{id}{SUFFIX}", resource.as_str().replace('/', "-"))
}

fn describe(member: &Member) -> Option<Value> {
    let address = match (&member.hca.id, &member.hca.pci) {
        (HcaId::Pci(address), _) => address.to_string(),
        // A scalable function is part of a PCI function.
        (HcaId::Auxiliary(_), Some(pci)) => pci.address.to_string(),
        _ => return None,
    };
    let devices = member.hca.rdma_names().join(",");
    let mut pci = json!({"pci-address": address, "rdma-device": devices});
    if let (Some(pci), Some(pf)) = (pci.as_object_mut(), member.hca.owner()) {
        pci.insert("pf-pci-address".into(), pf.to_string().into());
    }
    Some(json!({"type": "pci", "version": VERSION, "pci": pci}))
}

/// Whether a name is that of a file of ours whose unit no pod holds. `held` are the resources that are or
/// were ours, with the units that pods hold.
pub fn is_unallocated(name: &str, held: &[(ResourceName, BTreeSet<String>)]) -> bool {
    let of_resource = held.iter().filter_map(|(resource, units)| {
        let prefix = format!("{}-", resource.as_str().replace('/', "-"));
        let id = name.strip_prefix(&prefix)?.strip_suffix(SUFFIX)?;
        // The resource rdma/a must not take the files of rdma/a-b for its own.
        id.parse::<hca::UnitId>().ok()?;
        Some(units.contains(id))
    });
    let all: Vec<bool> = of_resource.collect();
    !all.is_empty() && !all.contains(&true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::{named, virtual_function};

    #[test]
    fn a_function_is_described_with_its_owner() {
        let mut function = virtual_function();
        function
            .rdma_devices
            .extend(named("0000:3b:00.5", &["mlx5_6"]).rdma_devices);
        assert_eq!(
            describe(&Member::example(function)).unwrap(),
            json!({"type": "pci", "version": "1.1.0", "pci": {
                "pci-address": "0000:3b:00.5", "rdma-device": "mlx5_5,mlx5_6",
                "pf-pci-address": "0000:3b:00.0"
            }})
        );
        let software = named("guid-505400fffe000001", &["rxe0"]);
        assert_eq!(describe(&Member::example(software)), None);
    }

    #[test]
    fn files_are_named_as_the_library_asks() {
        let resource = ResourceName::parse("intel.com/sriov_net").unwrap();
        assert_eq!(
            file_name(&resource, "0000:3b:00.2"),
            "intel.com-sriov_net-0000:3b:00.2-device.json"
        );
    }

    #[test]
    fn only_files_of_our_resources_whose_unit_is_free_go() {
        let held = [
            (
                ResourceName::parse("rdma/a").unwrap(),
                BTreeSet::from(["0000:3b:00.2".into()]),
            ),
            (ResourceName::parse("rdma/a-b").unwrap(), BTreeSet::new()),
        ];
        for (name, goes) in [
            ("rdma-a-0000:3b:00.2-device.json", false),
            ("rdma-a-0000:3b:00.3-device.json", true),
            ("rdma-a-b-0000:3b:00.2-device.json", true),
            ("intel.com-x-0000:3b:00.2-device.json", false),
            ("rdma-a-notes-device.json", false),
            ("rdma-a-0000:3b:00.3-device.yaml", false),
        ] {
            assert_eq!(is_unallocated(name, &held), goes, "{name}");
        }
    }
}
