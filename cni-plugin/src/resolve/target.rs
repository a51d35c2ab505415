//! Which netdev of the host a configuration means.

use cni_wire::{Code, text::list};
use hca::{HcaId, Host, lookup};

use crate::{
    config::{Config, Target},
    error::Error,
};

/// Which netdev of the host a request to move means. Pure.
///
/// # Errors
/// Code 7: nothing says so.
pub fn move_target(config: &Config) -> Result<Target, Error> {
    if let Some(device) = &config.device {
        return Ok(device.clone());
    }
    match &config.allocation {
        Some(_) => allocated(config),
        None => Err(
            Error::new(Code::InvalidConfig, "no netdev is selected to be moved").with_details(
                "set device, hwaddr, kernelpath, pciBusID or rdmaDevice, or let Multus pass a \
                 deviceID (k8s.v1.cni.cncf.io/resourceName)",
            ),
        ),
    }
}

/// The HCA of the allocation.
pub(super) fn allocated(config: &Config) -> Result<Target, Error> {
    let allocation = config.allocation.as_ref();
    match allocation.and_then(|allocation| allocation.hcas.first()) {
        Some(hca) => Ok(Target::Hca(hca.clone())),
        None => Err(names_none(config, "name the netdev with master")),
    }
}

pub(super) fn names_none(config: &Config, remedy: &str) -> Error {
    let unit = config.allocation.as_ref().map_or("", |unit| &unit.text);
    let msg = format!("deviceID {unit} is a share of a pool with several HCAs");
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
            let candidates: Vec<(u32, &str)> = occupants
                .netdevs
                .iter()
                .map(|n| (n.dev_port + 1, n.name.as_str()))
                .collect();
            by_port(&candidates, port, &hca.to_string())
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
    let candidates: Vec<(u32, &str)> = device
        .ports
        .iter()
        .filter_map(|p| Some((p.number, p.netdev.as_deref()?)))
        .collect();
    by_port(&candidates, port, &format!("RDMA device {}", device.name))
}

fn by_port(found: &[(u32, &str)], port: Option<u32>, what: &str) -> Result<String, Missing> {
    let names: Vec<&str> = found
        .iter()
        .filter(|(number, _)| port.is_none_or(|port| port == *number))
        .map(|(_, name)| *name)
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
    use super::*;

    #[test]
    fn one_of_several_netdevs_is_chosen_by_port() {
        let both = [(1, "ens1f0"), (2, "ens1f1")];
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
}
