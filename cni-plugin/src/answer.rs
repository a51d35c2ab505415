//! What ADD answers to the runtime, and reports to Multus and the daemon.

use std::{collections::BTreeMap, net::IpAddr, time::Instant};

use attachment::{addresses::Ipam, journal::Record, node::Node, part::Part};
use cni_wire::{CniResult, Code, Dns, Interface, IpConfig, Request, Version, text::list};
use hca::{HcaId, PortId};
use netlink::{Namespace, link::Link, sysfs::Sysfs};
use node::policy::Allow;

use crate::{
    config::Config,
    device_info::{self, Report},
    error::Error,
    facts::{Found, Nic, RdmaTarget},
    gids,
    rdma::RdmaRequirement,
};

/// What the chain's result is split into.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// What stays as it is.
    pub result: CniResult,
    /// Addresses and routes that a chained ipvlan takes over.
    pub taken: Option<CniResult>,
}

impl Chain {
    /// A chained ipvlan without an IPAM takes over the chain's addresses and routes, as the reference
    /// plugin does. A network can forge them: nobody has leased them here.
    ///
    /// # Errors
    /// Code 101: the policy does not let networks choose addresses.
    pub(crate) fn of(
        mut result: CniResult,
        is_ipvlan: bool,
        ipam: &Ipam,
        allow: &Allow,
    ) -> Result<Chain, Error> {
        let (true, Ipam::None, Some(first)) = (is_ipvlan, ipam, result.ips.first()) else {
            return Ok(Chain {
                result,
                taken: None,
            });
        };
        if !allow.unleased_addresses() {
            return Err(Error::advise(
                Code::Policy,
                format_args!(
                    "the node's policy does not allow an ipvlan the addresses of prevResult, such as {}",
                    first.address
                ),
                "set ipam, or let an administrator add static to allow.ipam",
            ));
        }
        let taken = Some(CniResult {
            ips: std::mem::take(&mut result.ips),
            routes: std::mem::take(&mut result.routes),
            ..CniResult::default()
        });
        Ok(Chain { result, taken })
    }
}

/// The chain's only interface: a chained ipvlan is on it unless the network sets a master.
///
/// # Errors
/// Code 7: prevResult has several interfaces.
pub(crate) fn only_interface(before: &CniResult) -> Result<Option<String>, Error> {
    match before.interfaces.as_slice() {
        [] => Ok(None),
        [only] => Ok(Some(only.name.clone())),
        several => {
            let names = list(several.iter().map(|interface| &interface.name));
            Err(Error::advise(
                Code::InvalidConfig,
                format_args!("prevResult has several interfaces: {names}"),
                "name the master of the ipvlan with master",
            ))
        }
    }
}

/// An attachment that is made.
pub(crate) struct Made<'a> {
    pub node: &'a Node,
    pub request: &'a Request,
    pub config: &'a Config,
    pub pod: &'a Namespace,
    pub record: &'a Record,
    /// `dns` of the network.
    pub dns: &'a Dns,
    /// By part: what was read of its NIC, its addresses and routes, and the interface.
    pub interfaces: Vec<(&'a Nic, CniResult, Option<Link>)>,
}

impl Made<'_> {
    /// The chain's result with the interfaces. Those come first where there was nothing before; else
    /// behind what other plugins made, whose numbers must not change.
    pub(crate) fn result(&self, mut result: CniResult) -> CniResult {
        let parts = self.record.parts.iter().zip(&self.interfaces);
        for (part, (_, given, link)) in parts {
            let Some(link) = link else { continue };
            let (number, mut given) = (result.interfaces.len(), given.clone());
            result.interfaces.push(self.interface(part, link));
            result.ips.extend(given.ips.into_iter().map(|ip| IpConfig {
                interface: Some(number),
                ..ip
            }));
            if self.request.config.version < Version::V1_0_0 {
                // It cannot say that a route is in another table.
                given.routes.retain(|route| route.table.is_none());
            }
            for route in given.routes {
                if !result.routes.contains(&route) {
                    result.routes.push(route);
                }
            }
            match (self.dns.is_empty(), given.dns.is_empty()) {
                (false, _) => result.dns.clone_from(self.dns),
                (true, false) => result.dns = given.dns,
                (true, true) => {}
            }
        }
        result
    }

    fn interface(&self, part: &Part, link: &Link) -> Interface {
        let moved = part.moved().map(|moved| &moved.host);
        let on_pci = moved.filter(|host| host.bus.as_deref() == Some("pci"));
        Interface {
            name: part.name().to_owned(),
            mac: (!link.mac.is_empty()).then(|| link.mac_text()),
            mtu: Some(link.mtu),
            sandbox: self.request.env.netns.clone(),
            socket_path: None,
            pci_id: on_pci.and_then(|host| host.identity.bus_device.clone()),
        }
    }

    /// Waits for the GIDs of the interfaces' addresses and writes the device information file, of which
    /// there is one: of several interfaces it has the first's PCI function, and all RDMA devices and
    /// GIDs. `before` is the chain's result.
    ///
    /// Returns the GID indexes of slots, for the daemon.
    ///
    /// # Errors
    /// Code 100: the pod's namespace cannot be read. What cannot be written is a warning.
    pub(crate) fn report(&self, before: &CniResult) -> Result<BTreeMap<String, u32>, Error> {
        let mut indexes = BTreeMap::new();
        let node = self.node;
        if self.config.rdma == RdmaRequirement::Off {
            return Ok(indexes);
        }
        let interfaces = self.interfaces.iter();
        let behind: Vec<Behind> = interfaces
            .map(|(nic, result, link)| self.behind(nic, result, link.as_ref(), before))
            .collect();
        let info = self.config.device_info.as_deref();
        if info.is_none() && behind.iter().all(|one| one.ports.is_empty()) {
            return Ok(indexes);
        }
        let started = Instant::now();
        let (mut gids, mut devices) = (Vec::new(), Vec::new());
        for (part, one) in self.record.parts.iter().zip(&behind) {
            let of_pod = (!part.rdma().is_empty())
                .then(|| Sysfs::of(self.pod, &node.netns.namespace))
                .transpose()?;
            let mut host = node.roots.clone();
            if let Some(sysfs) = &of_pod {
                host.sys = sysfs.path();
            }
            let (ports, addresses) = (&one.ports, &one.addresses);
            let ready = gids::await_ready(&host, ports, addresses, part.name(), started, &node.log);
            let slot = part.slots().first().map(|slot| slot.unit.clone());
            indexes.extend(slot.zip(gids::common_index(&ready)));
            gids.extend(ready);
            let moved = part.rdma().iter().map(|device| device.name.as_str());
            for device in moved.chain(one.ports.iter().map(|port| port.device.as_str())) {
                if !devices.contains(&device) {
                    devices.push(device);
                }
            }
        }
        let Some(named) = info else {
            return Ok(indexes);
        };
        let report = Report {
            pci: behind.first().and_then(|first| first.pci.as_deref()),
            rdma: devices,
            gids: &gids,
        };
        let id = self.request.attachment()?;
        let written = device_info::place(&node.root, named, id).and_then(|file| {
            device_info::write(&file, &report).map_err(|e| format!("{}: {e}", file.display()))
        });
        if let Err(reason) = written {
            node.log
                .warn(format_args!("device information not written: {reason}"));
        }
        Ok(indexes)
    }
}

/// The hardware behind an interface.
struct Behind {
    /// The RDMA ports its traffic goes through.
    ports: Vec<PortId>,
    addresses: Vec<IpAddr>,
    /// PCI address of the function below: that of the unit, whose netdev may be on another bus
    /// (virtio), else that of the netdev.
    pci: Option<String>,
}

impl Made<'_> {
    fn behind(
        &self,
        nic: &Nic,
        result: &CniResult,
        link: Option<&Link>,
        before: &CniResult,
    ) -> Behind {
        let (ports, ips, pci): (_, Vec<&IpConfig>, _) = match &nic.found {
            Found::RdmaOnly(only) => {
                let position = self.position(before);
                let ips = before.ips.iter();
                let ips = ips.filter(|ip| ip.interface.is_none() || ip.interface == position);
                let mut devices = only.devices.iter();
                let pci = devices.find_map(|target| target.device.pci.as_ref());
                let ports = only.devices.iter().flat_map(RdmaTarget::ports);
                let pci = pci.map(|pci| pci.address.to_string());
                (ports.collect(), ips.collect(), pci)
            }
            Found::Move(_) | Found::Child(..) => {
                let host = nic.found.host_link();
                let netdev = host.map(|host| &host.link).or(link);
                let on_pci = netdev.filter(|link| link.bus.as_deref() == Some("pci"));
                let ports = host.map(|host| host.rdma.clone()).unwrap_or_default();
                let pci = on_pci.and_then(|link| link.bus_device.clone());
                (ports, result.ips.iter().collect(), pci)
            }
        };
        let hca = nic.unit.as_ref().and_then(|unit| unit.hcas.first());
        Behind {
            ports,
            addresses: ips.into_iter().map(|ip| ip.address.ip()).collect(),
            pci: match hca {
                Some(HcaId::Pci(address)) => Some(address.to_string()),
                _ => pci,
            },
        }
    }

    /// The position of the pod's interface in the chain's result: that of the call's name, else the only
    /// one of the pod.
    fn position(&self, before: &CniResult) -> Option<usize> {
        let env = &self.request.env;
        let ifname = env.attachment.as_ref().map(|id| id.ifname.as_str());
        let interfaces = before.interfaces.iter().enumerate();
        let of_pod: Vec<_> = interfaces.filter(|(_, i)| i.sandbox == env.netns).collect();
        let mut named = of_pod
            .iter()
            .filter(|(_, i)| Some(i.name.as_str()) == ifname);
        match (named.next(), of_pod.as_slice()) {
            (Some((position, _)), _) | (None, [(position, _)]) => Some(*position),
            _ => None,
        }
    }
}
