//! Which netdev of the host a configuration means.

use cni_wire::{Code, text::list};
use hca::{HcaId, Host, lookup};

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

/// Which netdev of the host a child is on. As the reference plugins do, it is the one of the default
/// route where nothing else is said and the policy allows uplinks at all.
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
            Attach::Move => config.device.is_some(),
            Attach::Child(_) => config.master.is_some() || allow.uplinks,
            Attach::RdmaOnly => true,
        };
    match is_selected {
        true => Ok(()),
        false => Err(unselected(config)),
    }
}

fn unselected(config: &Config) -> Error {
    let keys = match config.attach {
        Attach::Child(_) => "master",
        Attach::Move | Attach::RdmaOnly => "device, hwaddr, kernelpath, pciBusID or rdmaDevice",
    };
    Error::new(Code::InvalidConfig, "no netdev is selected").with_details(format!(
        "annotate the NetworkAttachmentDefinition with k8s.v1.cni.cncf.io/resourceName, so that \
         Multus passes a deviceID, or set {keys}"
    ))
}

fn of_unit(unit: &UnitHcas, remedy: &str) -> Result<Target, Error> {
    let first = unit.hcas.first().cloned();
    first
        .map(Target::Hca)
        .ok_or_else(|| names_no_hca(unit, remedy))
}

pub(super) fn names_no_hca(unit: &UnitHcas, remedy: &str) -> Error {
    let msg = format!(
        "deviceID {} is a share of a pool with several HCAs",
        unit.text
    );
    Error::new(Code::InvalidConfig, msg).with_details(remedy)
}

/// Why there is no netdev to work with.
#[derive(Debug)]
pub enum Missing {
    /// Its hardware is here but its netdev is not: it is in a pod, returning from one, or
    /// its driver makes none.
    Netdev(Error),
    /// Anything else: it does not exist, or the request does not say which.
    Other(Error),
}

impl From<Missing> for Error {
    fn from(missing: Missing) -> Self {
        match missing {
            Missing::Netdev(error) | Missing::Other(error) => error,
        }
    }
}

impl From<hca::Error> for Missing {
    fn from(error: hca::Error) -> Self {
        Missing::Other(unreadable(&error))
    }
}

/// What sysfs could not say.
pub(crate) fn unreadable(error: &hca::Error) -> Error {
    let code = match error {
        hca::Error::Missing { .. } | hca::Error::BadName { .. } => Code::InvalidConfig,
        _ => Code::Io,
    };
    Error::new(code, error.to_string())
}

/// The name of the netdev a target means.
///
/// # Errors
/// See [`Missing`]; code 7 when it does not exist or several could be meant.
pub fn name_of(host: &Host, target: &Target, port: Option<u32>) -> Result<String, Missing> {
    match target {
        Target::Name(name) => Ok(name.clone()),
        Target::Mac(mac) => {
            let found = lookup::netdevs_by_mac(host, mac)?;
            // A bond has the address of a member, a VLAN that of its parent: the hardware is meant.
            let hardware: Vec<_> = found.iter().filter(|n| n.kind.is_none()).collect();
            let names: Vec<&str> = match hardware.as_slice() {
                [] => found.iter().map(|n| n.name.as_str()).collect(),
                some => some.iter().map(|n| n.name.as_str()).collect(),
            };
            only(&names, &format!("MAC address {mac}"))
        }
        Target::KernelPath(path) => {
            let relative = path.trim_start_matches("/sys/");
            let directory = host.sys.join(relative).join("net");
            let entries = std::fs::read_dir(&directory).map_err(|e| {
                Missing::Netdev(Error::new(
                    Code::InvalidConfig,
                    format!("kernelpath {path} has no netdev here: {e}"),
                ))
            })?;
            let names: Vec<String> = entries
                .filter_map(|e| e.ok()?.file_name().into_string().ok())
                .collect();
            only(&names.iter().map(String::as_str).collect::<Vec<_>>(), path)
        }
        Target::RdmaDevice(name) => {
            let device = hca::rdma::read(host, name).map_err(away)?;
            of_ports(&device, port)
        }
        Target::Hca(hca @ HcaId::NodeGuid(_)) => {
            let device = lookup::on_hca(host, hca).map_err(away)?;
            let device = device.rdma_devices.first().map(String::as_str);
            let device = hca::rdma::read(host, device.unwrap_or_default()).map_err(away)?;
            of_ports(&device, port)
        }
        Target::Hca(hca) => {
            let occupants = lookup::on_hca(host, hca)?;
            if let ([only], None) = (occupants.netdevs.as_slice(), port) {
                return Ok(only.name.clone());
            }
            let mut numbered = Vec::new();
            for device in &occupants.rdma_devices {
                match hca::rdma::read(host, device) {
                    Ok(device) => numbered.extend(ports(&device)),
                    // A pod has it.
                    Err(error) if error.is_missing() => {}
                    Err(error) => return Err(error.into()),
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

/// In exclusive mode an RDMA device that a pod has is not seen here.
fn away(error: hca::Error) -> Missing {
    match error.is_missing() {
        true => Missing::Netdev(unreadable(&error)),
        false => Missing::Other(unreadable(&error)),
    }
}

fn of_ports(device: &hca::RdmaDevice, port: Option<u32>) -> Result<String, Missing> {
    by_port(
        &ports(device),
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

fn by_port(found: &[(u32, String)], port: Option<u32>, what: &str) -> Result<String, Missing> {
    let names: Vec<&str> = found
        .iter()
        .filter(|(number, _)| port.is_none_or(|port| port == *number))
        .map(|(_, name)| name.as_str())
        .collect();
    if names.is_empty() && !found.is_empty() {
        let ports = found.iter().map(|(n, name)| format!("{n} is {name}"));
        return Err(Missing::Other(Error::new(
            Code::InvalidConfig,
            format!(
                "{what} has no netdev on port {} ({})",
                port.unwrap_or(0),
                list(ports)
            ),
        )));
    }
    only(&names, what)
}

fn only(names: &[&str], what: &str) -> Result<String, Missing> {
    match names {
        [] => Err(Missing::Netdev(Error::new(
            Code::InvalidConfig,
            format!("{what} has no netdev in the host's network namespace"),
        ))),
        [name] => Ok((*name).to_owned()),
        several => Err(Missing::Other(
            Error::new(
                Code::InvalidConfig,
                format!("{what} has several netdevs: {}", several.join(", ")),
            )
            .with_details("say which one with port (from 1), device or master"),
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
        let Err(Missing::Other(error)) = by_port(&both, None, "0000:3b:00.0") else {
            panic!()
        };
        assert!(error.msg.contains("ens1f0, ens1f1") && error.details.contains("port"));
        let Err(Missing::Other(error)) = by_port(&both, Some(3), "0000:3b:00.0") else {
            panic!()
        };
        assert!(error.msg.contains("port 3"), "{error}");
        assert!(matches!(by_port(&[], None, "x"), Err(Missing::Netdev(_))));
    }

    #[test]
    fn a_port_is_that_of_the_rdma_device_whatever_its_netdev_stands_on() {
        let name = |lay: fn(&Tree), port| {
            let directory = tempfile::tempdir().unwrap();
            let tree = Tree::new(directory.path());
            lay(&tree);
            let hca = Target::Hca(ports::CARD.parse().unwrap());
            name_of(&tree.host(), &hca, port).map_err(|missing| Error::from(missing).msg.clone())
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
