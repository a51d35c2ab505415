//! What is answered to the runtime, and reported to Multus.

use std::collections::BTreeMap;

use attachment::addresses::Ipam;
use cni_wire::{CniResult, Code, Interface, IpConfig, Version, text::list};
use netlink::link::Link;
use node::policy::Allow;

use super::{Add, Nic};
use crate::{
    config::Config,
    error::Error,
    plan::Plan,
    rdma::RdmaRequirement,
    report::{self, Reported},
    resolve::{RdmaOnly, Resolved},
};

impl Add<'_> {
    /// This plugin's own result, once the GIDs of its addresses are there and the device information
    /// file is complete, and the GID indexes of slots. `before` is the chain's.
    pub(super) fn answer(
        &self,
        nics: &[Nic],
        before: &CniResult,
    ) -> Result<(CniResult, BTreeMap<String, u32>), Error> {
        let mut all = CniResult::default();
        let mut reported = Vec::new();
        for Nic {
            plan, leased, link, ..
        } in nics
        {
            let moved = || plan.rdma.iter().map(|device| device.name.clone());
            if let Resolved::RdmaOnly(target) = &plan.resolved {
                reported.push(self.behind(target, before, moved().collect()));
            }
            let Some(link) = link else { continue };
            let mut part = self.part(plan, link, leased.clone().unwrap_or_default());
            let host = plan.resolved.host_link();
            let ports = host.map(|host| host.rdma.clone());
            let slot = plan.config.allocation.as_ref();
            let slot = slot.and_then(|allocation| allocation.slot.as_ref());
            reported.push(Reported {
                ifname: plan.ifname.to_string(),
                slot: slot.map(|slot| slot.unit.clone()),
                ports: ports.unwrap_or_default(),
                addresses: part.ips.iter().map(|ip| ip.address.ip()).collect(),
                moved: moved().collect(),
                pci: report::function(host.map(|host| &host.link), &plan.config),
            });
            part.routes.retain(|route| !all.routes.contains(route));
            merge(&mut all, part, cni_wire::Dns::default());
        }
        let gid_indexes = match self.config.rdma {
            RdmaRequirement::Off => BTreeMap::new(),
            _ => report::write(self.node, self.pod, self.id, self.config, &reported)?,
        };
        Ok((all, gid_indexes))
    }

    /// One interface, with number 0.
    fn part(&self, plan: &Plan, link: &Link, mut result: CniResult) -> CniResult {
        if self.request.config.version < Version::V1_0_0 {
            // It cannot say that a route is in another table.
            result.routes.retain(|route| route.table.is_none());
        }
        let moved = plan.snapshot.as_ref();
        let on_pci = moved.filter(|moved| moved.bus.as_deref() == Some("pci"));
        result.interfaces = vec![Interface {
            name: link.name.to_string(),
            mac: (!link.mac.is_empty()).then(|| link.mac_text()),
            mtu: Some(link.mtu),
            sandbox: self.request.env.netns.clone(),
            socket_path: None,
            pci_id: on_pci.and_then(|moved| moved.identity.bus_device.clone()),
        }];
        result
    }

    /// What is behind the interface that another plugin of the chain made.
    fn behind(&self, target: &RdmaOnly, before: &CniResult, moved: Vec<String>) -> Reported {
        let interface = target.interface.as_ref();
        let position = interface.map(|interface| interface.position);
        let link = interface.map(|interface| &interface.link);
        let ips = before.ips.iter();
        let ips = ips.filter(|ip| ip.interface.is_none() || ip.interface == position);
        Reported {
            ifname: link.map_or(self.id.ifname.to_string(), |link| link.name.to_string()),
            slot: None,
            ports: target.ports(),
            addresses: ips.map(|ip| ip.address.ip()).collect(),
            moved,
            pci: report::function(link, self.config),
        }
    }
}

/// A chained ipvlan stands on the chain's only interface, unless a master is named, and without
/// an IPAM it takes over the chain's addresses and routes, as the reference plugin does. A network
/// can forge them: nobody has leased them here.
///
/// # Errors
/// Code 7: several interfaces could be meant; code 101: the policy does not let networks choose
/// addresses.
pub(super) fn inherit(
    config: &mut Config,
    before: &mut CniResult,
    ipam: &Ipam,
    allow: &Allow,
) -> Result<Option<CniResult>, Error> {
    if config.master.is_none() && config.allocation.is_none() {
        config.master = match before.interfaces.as_slice() {
            [] => None,
            [only] => Some(only.name.clone()),
            several => {
                let names = list(several.iter().map(|interface| &interface.name));
                return Err(Error::new(
                    Code::InvalidConfig,
                    format!("prevResult has several interfaces: {names}"),
                )
                .with_details("say with master which one the ipvlan is to stand on"));
            }
        };
    }
    let (Ipam::None, Some(first)) = (ipam, before.ips.first()) else {
        return Ok(None);
    };
    if !allow.unleased_addresses() {
        let message = format!(
            "the node's policy does not allow an ipvlan the addresses of prevResult, such as {}",
            first.address
        );
        return Err(Error::new(Code::Policy, message)
            .with_details("set ipam, or let an administrator add static to allow.ipam"));
    }
    Ok(Some(CniResult {
        ips: std::mem::take(&mut before.ips),
        routes: std::mem::take(&mut before.routes),
        ..CniResult::default()
    }))
}

/// Ours first where there was nothing before; else behind what other plugins made, whose
/// numbers must not change.
pub(super) fn merge(result: &mut CniResult, made: CniResult, dns: cni_wire::Dns) {
    let offset = result.interfaces.len();
    result.interfaces.extend(made.interfaces);
    result.ips.extend(made.ips.into_iter().map(|ip| IpConfig {
        interface: ip.interface.map(|index| index + offset),
        ..ip
    }));
    result.routes.extend(made.routes);
    if !dns.is_empty() {
        result.dns = dns;
    } else if !made.dns.is_empty() {
        result.dns = made.dns;
    }
}
