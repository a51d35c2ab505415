//! What the interfaces get: decided together, with what the pod has.

use super::{Add, Nic};
use crate::{
    addressing::{Addressing, Pod, Request, addressing},
    error::Error,
};

impl Add<'_> {
    /// Completes the plans. What was leased becomes what is answered.
    pub(super) fn give(&mut self, nics: &mut [Nic]) -> Result<(), Error> {
        let requests: Vec<Request<'_>> = nics.iter().map(request).collect();
        let all = addressing(&requests, &Pod::read(self.inside, &requests)?)?;
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
