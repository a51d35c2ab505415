//! RoCE readiness: the GID that an address becomes.
//!
//! The RDMA core makes GIDs of a netdev's addresses in a work queue, a moment after they were
//! set. A program that starts earlier finds no GID of its own, so the ADD waits for it, for a
//! bounded time: a table that is full must not keep a pod from its network.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use attachment::log::Log;
use hca::{Host, PortId, gid};
use serde_json::{Value, json};

/// How long the GIDs of an attachment are waited for.
const GID_TIMEOUT: Duration = Duration::from_millis(250);

/// A RoCE v2 GID of an attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ready {
    /// The port whose table has it.
    pub port: PortId,
    /// The address it was made of.
    pub address: IpAddr,
    /// Its index, which programs such as NCCL and perftest ask for.
    pub index: u32,
}

impl Ready {
    pub(crate) fn to_json(&self) -> Value {
        json!({"device": self.port.device, "port": self.port.port,
               "address": self.address, "gidIndex": self.index})
    }
}

/// The index that a library opens these ports with: that of the first IPv4 address, else of the first
/// address. None where it differs between ports.
pub(crate) fn common_index(ready: &[Ready]) -> Option<u32> {
    let mut first: BTreeMap<&PortId, &Ready> = BTreeMap::new();
    for gid in ready {
        let known = first.entry(&gid.port).or_insert(gid);
        if known.address.is_ipv6() && gid.address.is_ipv4() {
            *known = gid;
        }
    }
    let mut indexes = first.values().map(|gid| gid.index);
    let index = indexes.next()?;
    indexes.all(|other| other == index).then_some(index)
}

/// Waits for the GIDs of the addresses of interface `ifname`, in the tables of these ports, until
/// [`GID_TIMEOUT`] after `started`.
///
/// The log names those that are missing then.
pub(crate) fn await_ready(
    host: &Host,
    ports: &[PortId],
    addresses: &[IpAddr],
    ifname: &str,
    started: Instant,
    log: &Log,
) -> Vec<Ready> {
    let mut ready = Vec::new();
    for port in ports {
        let follows = gid::follow_addresses(host, port);
        let unread = |e| log.warn(format_args!("GIDs are not read: {e}"));
        if !follows.map_err(unread).unwrap_or_default() {
            continue;
        }
        for address in addresses {
            let found = loop {
                match gid::find_roce_v2(host, port, *address, Some(ifname)) {
                    Ok(None) if started.elapsed() < GID_TIMEOUT => {
                        thread::sleep(Duration::from_millis(2));
                    }
                    found => break found,
                }
            };
            match found {
                Ok(Some(entry)) => {
                    let (index, device, number) = (entry.index, &port.device, port.port);
                    log.info(format_args!(
                        "{address} of {ifname} is GID {index} of {device} port {number}"
                    ));
                    ready.push(Ready {
                        port: port.clone(),
                        address: *address,
                        index,
                    });
                }
                Ok(None) => log.warn(format_args!(
                    "{address} of {ifname} has no RoCE v2 GID on {} port {} after \
                     {GID_TIMEOUT:?}: RDMA from it will not work; rdmactl discover --gids shows \
                     whether the port's GID table is full",
                    port.device, port.port
                )),
                Err(e) => log.warn(format_args!("GID of {address} is not read: {e}")),
            }
        }
    }
    ready
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_index_is_that_of_the_first_ipv4_address_of_all_ports() {
        let gid = |device: &str, port, address: &str, index| Ready {
            port: PortId {
                device: device.into(),
                port,
            },
            address: address.parse().unwrap(),
            index,
        };
        let all = [
            gid("mlx5_0", 1, "fd00::1", 3),
            gid("mlx5_0", 1, "10.0.0.1", 5),
            gid("mlx5_0", 1, "10.0.0.2", 7),
            gid("mlx5_0", 2, "10.0.0.3", 5),
            gid("mlx5_1", 1, "10.1.0.1", 5),
            gid("mlx5_2", 1, "10.2.0.1", 3),
        ];
        assert_eq!(common_index(&all[..1]), Some(3), "IPv6 alone");
        assert_eq!(common_index(&all[..5]), Some(5));
        assert_eq!(common_index(&all), None);
        assert_eq!(common_index(&[]), None);
    }
}
