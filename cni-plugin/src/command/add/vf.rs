//! The settings of a VF, through its PF: MAC address, VLAN, trust, spoof check, link state, rates, GUID.
//!
//! They are set while the VF is on the host, before anything else is planned: a record says how it
//! was. The VF's driver reads a GUID when it starts, and makes another netdev and another RDMA device
//! then, so what the request means is resolved again afterwards.

use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant},
};

use attachment::{
    journal::{Lock, Part},
    netdev::{
        identity::LinkScope,
        restore::DRIVER_TIMEOUT,
        snapshot::Snapshot,
        vf::{Settings, Vf},
    },
    node::Node,
    rdma::parents,
};
use cni_wire::{Code, text::list};
use hca::{GidEntry, Guid, Host, LinkLayer, MacAddress, Port, chardev::verbs};
use netlink::link::{self, Change};

use super::Add;
use crate::{
    config::{self, Config},
    error::Error,
    rdma::{self, Numbers},
    resolve::HostLink,
};

impl Add<'_> {
    /// Sets what the network asks of the VF, and waits for its netdev, which keeps its name, where a
    /// GUID makes another. `earlier` are the attachment's other interfaces. Returns the netdev's state
    /// before, with what restores the settings. A MAC address that the policy does not allow is left to
    /// the VF.
    ///
    /// # Errors
    /// Code 7 for what is not a VF of a PF that is on the host; code 11 where the VF would not keep its
    /// character device, its netdev does not come, or another port of this host has the GUID; the
    /// refusal of kernel or driver.
    pub(super) fn set_vf(
        &mut self,
        mut taken: Snapshot,
        nic: &HostLink,
        config: &Config,
        earlier: Vec<Part>,
    ) -> Result<Snapshot, Error> {
        let allow = &self.node.policy.values.allow.vf;
        let by_pf = taken.vf.is_some() && allow.mac;
        let settings = Settings {
            mac: config.mac.clone().filter(|_| by_pf),
            ..config.vf.clone()
        };
        if settings == Settings::default() {
            return Ok(taken);
        }
        let (Some(vf), Some(address)) = (&mut taken.vf, taken.identity.bus_device.clone()) else {
            let keys = config::vf::keys(&config.vf, allow);
            let key = keys.first().map(|(key, ..)| *key).unwrap_or_default();
            let msg = format!(
                "{key}: {} is not a virtual function whose physical function has a netdev on the host",
                nic.link.name
            );
            return Err(Error::new(Code::InvalidConfig, msg).with_details(format!(
                "set it where the physical function is (ip link set PF vf N ...), and leave {key} out"
            )));
        };
        let prepare = |guid| self.prepare_guid(vf, nic, &address, guid);
        let prepared = settings.guid.map(prepare).transpose()?;
        vf.plan(&settings);
        let part = Part {
            moved: Some(taken.clone()),
            ..Part::named(self.id.ifname.as_str())
        };
        let record = self.record_of(earlier.into_iter().chain([part]).collect())?;
        self.write_down(record)?;
        self.node
            .journal
            .take(&taken.identity, self.key, &self.node.boot)?;
        if let Some(mac) = &settings.mac {
            self.set_own_mac(nic, mac);
        }
        if let Some(vf) = &taken.vf {
            let socket = &mut self.node.netns.socket;
            vf.apply(&self.node.roots.sys, socket, &address).map_err(|refused| {
                Error::from(refused).with_details(
                    "the driver of the physical function decides what its VFs can have; dmesg may say \
                     more",
                )
            })?;
        }
        if let Some((_lock, before)) = prepared {
            self.await_driver(&taken, &address, &before)?;
        }
        Ok(taken)
    }

    /// Sets the MAC address by the VF itself, before the PF sets it: after that, some drivers (igb) refuse
    /// it to the VF until its driver starts again. A refusal here does not matter where the VF takes the
    /// PF's address.
    fn set_own_mac(&mut self, nic: &HostLink, mac: &MacAddress) {
        let change = Change {
            mac: Some(mac.bytes()),
            ..Change::default()
        };
        let what = format_args!("set MAC of {}", nic.link.name);
        if let Err(refused) =
            link::change(&mut self.node.netns.socket, what, nic.link.index, &change)
        {
            self.node.log.debug(refused);
        }
    }

    /// Whether a GUID can be set and restored. Returns what keeps it from others meanwhile, and the VF's
    /// verbs nodes.
    fn prepare_guid(
        &mut self,
        vf: &mut Vf,
        nic: &HostLink,
        address: &str,
        guid: Guid,
    ) -> Result<(Lock, BTreeSet<String>), Error> {
        if !vf.has_guids() {
            let msg = format!(
                "guid: {} had GUIDs that the driver of its physical function does not report, so that \
                 they could not be restored",
                nic.link.name
            );
            return Err(Error::new(Code::InvalidConfig, msg).with_details(
                "use a driver that does (mlx5 of Linux 5.5 or newer), or leave guid out",
            ));
        }
        let function = address.parse().ok();
        let function = function.and_then(|address| hca::pci::read(&self.node.roots, address).ok());
        vf.driver = function.and_then(|function| function.driver);
        let names = rdma::of_netdev(&self.node.roots, &nic.link, &nic.rdma)?;
        rdma::describe(self.node, &names, self.numbers())?;
        let lock = self.node.journal.lock_rdma()?;
        let holder = match device_with(&self.node.roots, address, guid)? {
            Some(device) => Some(device),
            None => vf.other_with(&self.node.roots, &mut self.node.netns.socket, guid)?,
        };
        let Some(holder) = holder else {
            return Ok((lock, verbs_nodes(self.node, address)?));
        };
        let msg = format!("guid: {holder} of this node has {guid}");
        let remedy = "a fabric has each GUID once: choose another; if a pod that ends has it, the \
                      next ADD sets it";
        Err(Error::new(Code::TryAgain, msg).with_details(remedy))
    }

    /// Waits for the netdev and the verbs nodes that the driver makes anew.
    fn await_driver(
        &mut self,
        taken: &Snapshot,
        address: &str,
        before: &BTreeSet<String>,
    ) -> Result<(), Error> {
        let numbers = self.numbers();
        let started = Instant::now();
        loop {
            let links = link::list(&mut self.node.netns.socket)?;
            let after = verbs_nodes(self.node, address)?;
            let has_nodes = match numbers {
                Numbers::Promised => after == *before,
                Numbers::ReadAfterwards => after.len() == before.len(),
            };
            if let (Ok(Some(renewed)), true) =
                (taken.identity.find(&links, LinkScope::Host), has_nodes)
            {
                if renewed.name != taken.name {
                    let what = format!("rename {} to {}", renewed.name, taken.name);
                    let change = Change::name(taken.name.as_bytes());
                    link::change(&mut self.node.netns.socket, what, renewed.index, &change)?;
                }
                return Ok(());
            }
            if started.elapsed() > DRIVER_TIMEOUT {
                return Err(Error::new(
                    Code::TryAgain,
                    format!(
                        "VF {address} has no netdev, or another character device ({}), after its \
                         driver was bound again for guid",
                        list(after)
                    ),
                )
                .with_details("dmesg says what the driver did"));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The RDMA device that the host sees with a GUID, its own or a port's, beside those at `address`.
fn device_with(host: &Host, address: &str, guid: Guid) -> Result<Option<String>, Error> {
    let parents = parents(host)?;
    for (name, _) in parents.into_iter().filter(|(_, on)| on != address) {
        let device = match hca::rdma::read(host, &name) {
            Err(e) if e.is_missing() => continue,
            device => device?,
        };
        let is_infiniband = |port: &&Port| port.link_layer == LinkLayer::InfiniBand;
        let ports = device.ports.iter().filter(is_infiniband);
        let mut gids = ports.flat_map(|port| &port.gids.entries);
        let ends_so = |entry: &GidEntry| entry.gid.0.ends_with(&guid.0.to_be_bytes());
        if device.node_guid == Some(guid) || gids.any(ends_so) {
            return Ok(Some(format!("RDMA device {name}")));
        }
    }
    Ok(None)
}

/// The verbs nodes of the RDMA devices on a PCI function.
fn verbs_nodes(node: &Node, address: &str) -> Result<BTreeSet<String>, Error> {
    let parents = parents(&node.roots)?;
    let nodes = verbs(&node.roots)?.into_iter();
    let of_function = nodes.filter(|(owner, _)| parents.get(owner).is_some_and(|on| on == address));
    Ok(of_function.map(|(_, node)| node.name).collect())
}

#[cfg(test)]
mod tests {
    use hca_trees::{On, PciSpec, PortSpec, RdmaSpec, Tree};

    use super::*;

    #[test]
    fn a_guid_of_another_device_or_port_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        tree.pci(&PciSpec::MLX5);
        tree.rdma(&RdmaSpec {
            on: On::Pci("0000:3b:00.0"),
            node_guid: "b859:9f03:0000:0000",
            ports: &[PortSpec::INFINIBAND],
            ..RdmaSpec::default()
        });
        let host = tree.host();
        let device = hca::rdma::read(&host, "mlx5_0").unwrap();
        let node = device.node_guid.unwrap();
        let gid = device.ports[0].gids.entries[0].gid.0;
        let port = Guid(u64::from_be_bytes(gid[8..].try_into().unwrap()));
        assert_ne!(node, port);
        for guid in [node, port] {
            let found = |address| device_with(&host, address, guid).unwrap();
            assert_eq!(found("0000:3b:00.2").as_deref(), Some("RDMA device mlx5_0"));
            assert_eq!(found("0000:3b:00.0"), None, "its own");
        }
        let free = device_with(&host, "0000:3b:00.2", Guid(node.0 ^ 1 << 40)).unwrap();
        assert_eq!(free, None);
    }
}
