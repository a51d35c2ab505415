//! What the interfaces get: decided together, with what the pod has.

use cni_wire::CniResult;
use netlink::{Socket, route, rule};
use netlink_packet_route::AddressFamily;

use super::{Add, Nic};
use crate::{
    addressing::{Addressing, Pod, Request, addressing},
    error::Error,
};

impl Add<'_> {
    /// Completes the plans. What was leased becomes what is answered.
    pub(super) fn give(&mut self, nics: &mut [Nic]) -> Result<(), Error> {
        let requests: Vec<Request<'_>> = nics.iter().map(request).collect();
        let all = addressing(&requests, &pod(self.inside, &requests)?)?;
        for (nic, Addressing { interface, result }) in nics.iter_mut().zip(all) {
            nic.plan.given = Some(interface);
            nic.leased = Some(result);
        }
        Ok(())
    }
}

fn request(nic: &Nic) -> Request<'_> {
    let plan = &nic.plan;
    let host = plan.resolved.host_link();
    Request {
        ifname: plan.ifname.as_str(),
        rail: plan.rail,
        config: &plan.config,
        mtu: host.map(|host| plan.config.mtu.unwrap_or(host.link.mtu)),
        leased: nic.leased.as_ref(),
        moved: plan.snapshot.as_ref(),
    }
}

/// What of the pod's these interfaces can conflict with.
fn pod(inside: &mut Socket, requests: &[Request<'_>]) -> netlink::Result<Pod> {
    let has_default = |leased: &CniResult| leased.routes.iter().any(|r| r.dst.prefix() == 0);
    let mut pod = Pod::default();
    if (requests.iter()).any(|r| r.config.accept_ra || r.leased.is_none_or(has_default)) {
        for family in route::FAMILIES {
            let found = route::list_table(inside, family, route::MAIN, |length| length == 0)?;
            pod.defaults.extend((!found.is_empty()).then_some(family));
        }
    }
    let rules = rule::list(inside, AddressFamily::Unspec)?;
    pod.tables = rules.iter().map(rule::table_of).collect();
    Ok(pod)
}
