//! What the interfaces are given, with source routing where it is due. Reads what the pod has.

use std::collections::BTreeSet;

use attachment::netdev::replay;
use cni_wire::{CniResult, Code};
use netlink::{
    address,
    link::{self, By},
    route,
};
use netlink_packet_route::AddressFamily;

use super::{Add, Nic};
use crate::{
    error::Error,
    interface_config::InterfaceConfig,
    plan::{self, Plan},
};

impl Add<'_> {
    /// Plans what each interface is given: what was leased, else what its netdev had on the host.
    /// Decides about source routing, and keeps the pod's way out where it is.
    pub(super) fn give(&mut self, nics: &mut [Nic]) -> Result<(), Error> {
        let mut given = Vec::new();
        for nic in &*nics {
            given.push(given_to(&nic.plan, nic.leased.as_ref())?);
        }
        let own: Vec<_> = given.iter().map(InterfaceConfig::families).collect();
        let (mut families, mut tables): (Option<Vec<_>>, Option<BTreeSet<u32>>) = (None, None);
        // Families of which an earlier interface leads out of the pod.
        let mut led = Vec::new();
        for (number, (nic, mut given)) in nics.iter_mut().zip(given).enumerate() {
            let plan = &mut nic.plan;
            for family in route::FAMILIES {
                if given.has_default(family) && self.pod_has_default(family, &led)? {
                    given.defaults_of_the_pod.push(family);
                }
            }
            let rails = &plan.config.source_routing;
            let mut others = match (rails.wanted, &families) {
                (Some(_), _) => Vec::new(),
                (None, Some(known)) => known.clone(),
                (None, None) => families.insert(self.families_of_others()?).clone(),
            };
            let siblings = own.iter().enumerate().filter(|(other, _)| *other != number);
            others.extend(siblings.flat_map(|(_, families)| families));
            let due = rails.families(&given, &others, &given.defaults_of_the_pod);
            if !due.is_empty() {
                let ifname = plan.ifname.as_str();
                let used = match &mut tables {
                    Some(used) => used,
                    none => none.insert(route::tables(self.inside)?),
                };
                let table = rails.table(ifname, plan.rail, used)?;
                used.insert(table);
                rails.apply(&mut given, &due, ifname, table);
            }
            let v6 = AddressFamily::Inet6;
            if plan.config.accept_ra
                && rails.wanted != Some(false)
                && (due.contains(&v6) || own.len() > 1 || self.pod_has_default(v6, &led)?)
            {
                given.without_advertised_default();
            }
            if nic.leased.is_none() {
                let stay = given.defaults_of_the_pod.clone();
                given.without_defaults(&stay);
            }
            led.extend(
                route::FAMILIES
                    .iter()
                    .filter(|family| given.has_default(**family)),
            );
            plan.given = Some(given);
        }
        Ok(())
    }

    /// The first of several interfaces that has a default route leads out of the pod.
    fn pod_has_default(
        &mut self,
        family: AddressFamily,
        led: &[AddressFamily],
    ) -> Result<bool, Error> {
        let main = route::list_table(self.inside, family, route::MAIN, |length| length == 0)?;
        Ok(led.contains(&family) || main.iter().any(replay::is_default))
    }

    /// The families of which the pod's other RDMA interfaces have addresses.
    fn families_of_others(&mut self) -> Result<Vec<AddressFamily>, Error> {
        let mut families = Vec::new();
        // Container and interface stand in the names of the records.
        for (_, _, other) in self.node.journal.list()? {
            if other.container_id != self.id.container_id || other.ifname == self.id.ifname {
                continue;
            }
            // With several interfaces, the first is known by this name, too.
            let name = By::Name(other.ifname.as_str().as_bytes());
            if let Some(link) = link::get(self.inside, name)? {
                let mut addresses = address::list(self.inside, link.index)?;
                addresses.retain(|address| !replay::is_link_local(address));
                families.extend(addresses.iter().map(|address| address.header.family));
            }
        }
        Ok(families)
    }
}

/// Without a table of its own yet.
fn given_to(plan: &Plan, leased: Option<&CniResult>) -> Result<InterfaceConfig, Error> {
    let config = &plan.config;
    let given = match (&plan.snapshot, leased) {
        (Some(taken), None) => InterfaceConfig::of_host(config, taken, plan.ifname.as_str())
            .map_err(|e| Error::new(Code::Internal, format!("read back {}: {e}", taken.name)))?,
        (_, leased) => {
            let none = CniResult::default();
            InterfaceConfig::of_result(config.attach, config, leased.unwrap_or(&none))?
        }
    };
    if let Some(host) = plan.resolved.host_link() {
        let mtu = config.mtu.unwrap_or(host.link.mtu);
        plan::carries_ipv6(mtu, config, given.needs_ipv6())?;
    }
    Ok(given)
}
