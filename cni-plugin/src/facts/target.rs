//! Which netdev of the host a configuration means.

use std::fmt;

use cni_wire::{Code, text::list};
use hca::{Host, lookup};

use attachment::node::Node;
use netlink::uplink;
use node::policy::Allow;

use crate::{
    config::{Attach, Config, Target, UnitHcas},
    error::Error,
};

/// Which netdev of the host a network means that moves one. Pure.
///
/// # Errors
/// Code 7: nothing says so.
pub fn move_target(config: &Config, unit: Option<&UnitHcas>) -> Result<Target, Error> {
    match (&config.device, unit) {
        (Some(device), _) => Ok(device.clone()),
        (None, Some(unit)) => of_unit(unit, "name the netdev with device"),
        (None, None) => Err(unselected(config)),
    }
}

/// Which netdev of the host a child is on: by default that of the default route, as in the reference
/// plugins, if the policy allows uplinks.
pub(super) fn parent(
    node: &mut Node,
    config: &Config,
    unit: Option<&UnitHcas>,
) -> Result<Target, Error> {
    if let Some(master) = &config.master {
        return Ok(Target::Name(master.clone()));
    }
    if let Some(unit) = unit {
        return of_unit(unit, "name the netdev with master");
    }
    let link = match node.policy.values.allow.uplinks {
        true => uplink::default_route_link(&mut node.netns.socket)?,
        false => None,
    };
    let name = link.map(|link| link.name.to_string());
    name.map(Target::Name).ok_or_else(|| unselected(config))
}

/// Refuses a network that selects no netdev, whichever pod and node it is for. `by_unit`: a unit of the
/// pod can. Pure.
///
/// # Errors
/// Code 7.
pub fn lacks_target(config: &Config, by_unit: bool, allow: &Allow) -> Result<(), Error> {
    let is_selected = by_unit
        || match config.attach {
            Attach::Move | Attach::RdmaOnly => config.device.is_some(),
            Attach::Child(_) => config.master.is_some() || allow.uplinks,
        };
    match is_selected {
        true => Ok(()),
        false => Err(unselected(config)),
    }
}

pub(super) fn unselected(config: &Config) -> Error {
    let (what, keys) = match config.attach {
        Attach::Child(_) => ("netdev", "master"),
        Attach::Move => (
            "netdev",
            "device, hwaddr, kernelpath, pciBusID or rdmaDevice",
        ),
        Attach::RdmaOnly => ("RDMA device", "rdmaDevice"),
    };
    Error::advise(
        Code::InvalidConfig,
        format_args!("no {what} is selected"),
        format_args!(
            "annotate the NetworkAttachmentDefinition with k8s.v1.cni.cncf.io/resourceName, so that \
             Multus passes a deviceID, or set {keys}"
        ),
    )
}

fn of_unit(unit: &UnitHcas, remedy: &str) -> Result<Target, Error> {
    let first = unit.hcas.first().cloned();
    first
        .map(Target::Hca)
        .ok_or_else(|| names_no_hca(unit, remedy))
}

pub(super) fn names_no_hca(unit: &UnitHcas, remedy: &str) -> Error {
    Error::advise(
        Code::InvalidConfig,
        format_args!(
            "deviceID {} is a share of a pool with several HCAs",
            unit.text
        ),
        remedy,
    )
}

/// That sysfs could not be read.
pub(crate) fn unreadable(error: &hca::Error) -> Error {
    let code = match error {
        hca::Error::Missing { .. } => Code::InvalidConfig,
        _ => Code::Io,
    };
    Error::new(code, error)
}

/// The name of the netdev a target means.
///
/// # Errors
/// Code 7 when it does not exist or several could be meant.
pub fn name_of(host: &Host, target: &Target, port: Option<u32>) -> Result<String, Error> {
    match target {
        Target::Name(name) => Ok(name.clone()),
        Target::Mac(mac) => {
            let found = lookup::netdevs_by_mac(host, mac).map_err(|e| unreadable(&e))?;
            // A bond has the address of a member, a VLAN that of its parent: the hardware is meant.
            let hardware: Vec<_> = found.iter().filter(|n| n.kind.is_none()).collect();
            let names: Vec<&str> = match hardware.as_slice() {
                [] => found.iter().map(|n| n.name.as_str()).collect(),
                some => some.iter().map(|n| n.name.as_str()).collect(),
            };
            only(&names, format_args!("MAC address {mac}"))
        }
        Target::KernelPath(path) => {
            let relative = path.trim_start_matches("/sys/");
            let entries = std::fs::read_dir(host.sys.join(relative).join("net")).map_err(|e| {
                let what = format_args!("kernelpath {path} has no netdev here: {e}");
                Error::new(Code::InvalidConfig, what)
            })?;
            let names: Vec<String> = entries
                .filter_map(|e| e.ok()?.file_name().into_string().ok())
                .collect();
            only(&names.iter().map(String::as_str).collect::<Vec<_>>(), path)
        }
        Target::RdmaDevice(name) => of_ports(host, name, port),
        Target::Hca(hca) => {
            let occupants = lookup::on_hca(host, hca).map_err(|e| unreadable(&e))?;
            if let ([only], None) = (occupants.netdevs.as_slice(), port) {
                return Ok(only.name.clone());
            }
            let mut numbered = Vec::new();
            for device in &occupants.rdma_devices {
                match hca::rdma::read(host, device) {
                    Ok(device) => numbered.extend(ports(&device)),
                    // A pod has it.
                    Err(error) if error.is_missing() => {}
                    Err(error) => return Err(unreadable(&error)),
                }
            }
            if numbered.is_empty() {
                let netdevs = occupants.netdevs.into_iter();
                numbered.extend(netdevs.map(|n| (n.dev_port + 1, n.name)));
            }
            by_port(&numbered, port, &hca.to_string())
        }
    }
}

fn of_ports(host: &Host, device: &str, port: Option<u32>) -> Result<String, Error> {
    let device = hca::rdma::read(host, device).map_err(|e| unreadable(&e))?;
    by_port(
        &ports(&device),
        port,
        &format!("RDMA device {}", device.name),
    )
}

/// Numbers of ports with their netdevs.
fn ports(device: &hca::RdmaDevice) -> Vec<(u32, String)> {
    let ports = device.ports.iter();
    ports
        .filter_map(|port| Some((port.number, port.netdev.clone()?)))
        .collect()
}

fn by_port(found: &[(u32, String)], port: Option<u32>, what: &str) -> Result<String, Error> {
    let names: Vec<&str> = found
        .iter()
        .filter(|(number, _)| port.is_none_or(|port| port == *number))
        .map(|(_, name)| name.as_str())
        .collect();
    if names.is_empty() && !found.is_empty() {
        let ports = list(found.iter().map(|(n, name)| format!("{n} is {name}")));
        let port = port.unwrap_or(0);
        let what = format_args!("{what} has no netdev on port {port} ({ports})");
        return Err(Error::new(Code::InvalidConfig, what));
    }
    only(&names, what)
}

fn only(names: &[&str], what: impl fmt::Display) -> Result<String, Error> {
    match names {
        [] => Err(Error::new(
            Code::InvalidConfig,
            format_args!("{what} has no netdev in the host's network namespace"),
        )),
        [name] => Ok((*name).to_owned()),
        several => Err(Error::advise(
            Code::InvalidConfig,
            format_args!("{what} has several netdevs: {}", several.join(", ")),
            "say which one with port (from 1), device or master",
        )),
    }
}

#[cfg(test)]
mod tests {
    use hca_trees::{Tree, ports};

    use super::*;

    #[test]
    fn one_of_several_netdevs_is_chosen_by_port() {
        let both = [(1, "ens1f0".to_owned()), (2, "ens1f1".to_owned())];
        assert_eq!(by_port(&both, Some(2), "x").unwrap(), "ens1f1");
        assert_eq!(by_port(&both[..1], None, "x").unwrap(), "ens1f0");
        let error = by_port(&both, None, "0000:3b:00.0").unwrap_err();
        assert!(error.msg.contains("ens1f0, ens1f1") && error.details.contains("port"));
        let error = by_port(&both, Some(3), "0000:3b:00.0").unwrap_err();
        assert!(error.msg.contains("port 3"), "{error}");
        let error = by_port(&[], None, "x").unwrap_err();
        assert!(error.msg.contains("x has no netdev"), "{error}");
    }

    #[test]
    fn a_port_is_that_of_the_rdma_device_whatever_its_netdev_stands_on() {
        let name = |lay: fn(&Tree), port| {
            let directory = tempfile::tempdir().unwrap();
            let tree = Tree::new(directory.path());
            lay(&tree);
            let hca = Target::Hca(ports::CARD.parse().unwrap());
            name_of(&tree.host(), &hca, port).map_err(|error| error.msg.clone())
        };
        assert_eq!(name(ports::xdr_with_smi, None).unwrap(), "ibs192");
        assert_eq!(name(ports::four_planes, Some(9)).unwrap(), "eth_r0_p2");
        let several = name(ports::four_planes, None).unwrap_err();
        assert!(several.contains("several netdevs"), "{several}");
        let empty = name(ports::four_planes, Some(1)).unwrap_err();
        assert!(empty.contains("3 is eth_r0_p0"), "{empty}");
        let second = name(ports::multiport_eswitch, Some(2));
        assert_eq!(second.unwrap(), "ens1f1np1");
        assert_eq!(name(ports::cabled_on_port_2, Some(2)).unwrap(), "ens1d1");
    }
}
