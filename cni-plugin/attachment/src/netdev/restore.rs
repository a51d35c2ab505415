//! Returning a netdev from a pod to the host and restoring its state.
//!
//! Every step asks for a state, not for a change: run again after being cut off anywhere, it
//! ends the same. The one thing that must succeed is that the netdev returns; what cannot be
//! restored after that (an address that somebody else has now, a route whose gateway is gone) is a
//! warning, never a reason to leave it behind.

mod state;
mod transfer;

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{error::Error, node::Node, part::Defect};
use netlink::{
    Namespace,
    link::{self, Link},
};
pub(crate) use transfer::find_on_host;
use transfer::{is_gone, rename, take_out};

use super::snapshot::Snapshot;

/// How long a netdev may take to return from a namespace that is being torn down. The kernel
/// returns it after two grace periods, with many namespaces one after the other.
pub const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the driver of a VF may take to make its netdev and RDMA device, once it is bound again.
pub const DRIVER_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub struct Returned {
    /// What could not be restored, as text.
    pub warnings: Vec<String>,
    /// What was not restored because it is over, as text.
    pub notes: Vec<String>,
    /// It has not got its name, which is tried again.
    pub is_misnamed: bool,
    /// Why a VF may have an attachment's settings still.
    pub vf_kept: Option<String>,
    /// A macvlan or ipvlan is on it, in whichever namespace.
    pub carries_child: bool,
    /// The hardware itself, or the virtual link, is gone; there is nothing to restore.
    pub hardware_gone: bool,
}

impl Returned {
    /// A failure becomes a warning.
    pub(super) fn attempt(&mut self, done: netlink::Result<()>) {
        self.warnings.extend(done.err().map(|e| e.to_string()));
    }

    /// The worst that has to be repaired later.
    pub fn defect(&self) -> Option<Defect> {
        let found = [
            (self.carries_child, Defect::Child),
            (self.vf_kept.is_some(), Defect::Vf),
            (self.is_misnamed, Defect::Name),
        ];
        let worst = found.into_iter().find(|(is_so, _)| *is_so);
        worst.map(|(_, defect)| defect)
    }
}

/// Returns a netdev to the host, out of the pod when it is there, and restores it.
///
/// # Errors
/// It is not found within `timeout`, several links could be it, or the kernel does not let it go.
pub fn return_netdev(
    node: &mut Node,
    taken: &Snapshot,
    pod: Option<&Namespace>,
    timeout: Duration,
) -> Result<Returned, Error> {
    let mut report = Returned::default();
    let (mut started, mut timeout) = (Instant::now(), timeout);
    let mut has_new_driver = false;
    loop {
        // Whatever the pod's namespace refuses, a netdev that the host has is restored.
        let taken_out = match pod {
            Some(pod) => take_out(node, taken, pod, &mut report),
            None => Ok(None),
        };
        let (mut arrived, refused) = match taken_out {
            Ok(arrived) => (arrived, None),
            Err(e) => (None, Some(e)),
        };
        if arrived.is_none() {
            let links = link::list(&mut node.netns.socket)?;
            arrived = find_on_host(node, taken, &links)?.cloned();
            // The partitions that the pod made on it: the kernel gives them to the host, too, when the
            // pod's namespace ends. It had none when it was taken, and is down when it returns so.
            let returned = arrived
                .as_ref()
                .filter(|port| pod.is_none() && !port.is_up());
            let made = |link: &&Link| returned.is_some_and(|port| link.is_partition_of(port));
            for child in links.iter().filter(made) {
                report.attempt(link::delete(&mut node.netns.socket, child));
            }
        }
        let device = taken.identity.bus_device.as_deref().unwrap_or_default();
        if let Some(vf) = &taken.vf
            && !has_new_driver
            && (arrived.is_some() || vf.lacks_driver(&node.roots.sys, device))
        {
            match vf.restore_guids(&node.roots, &mut node.netns.socket, device) {
                Ok(false) => {}
                Ok(true) => {
                    has_new_driver = true;
                    (started, timeout) = (Instant::now(), DRIVER_TIMEOUT);
                    continue;
                }
                Err(e) if arrived.is_some() => report.vf_kept = Some(e.to_string()),
                Err(e) => return Err(e.into()),
            }
        }
        if let Some(mut link) = arrived {
            if link.name != taken.name {
                rename(node, &mut link, taken, &mut report);
            }
            if link.index != taken.identity.index {
                report.warnings.push(format!(
                    "{} has the index {}, not {} as before: rules of nftables and tc that name the \
                     index do not match it any longer; make them again",
                    taken.name, link.index, taken.identity.index
                ));
            }
            // A change of namespaces does not take it away from beneath a child in another one.
            if link.is_ethernet() {
                match link::carries_child(&mut node.netns.socket, &link) {
                    Ok(carries_child) => report.carries_child = carries_child,
                    Err(e) => report.warnings.push(e.to_string()),
                }
            }
            state::restore(node, taken, link, &mut report);
            return Ok(report);
        }
        if let Some(refused) = refused {
            return Err(refused);
        }
        if is_gone(node, taken)? {
            report.hardware_gone = true;
            return Ok(report);
        }
        if started.elapsed() >= timeout {
            return Err(Error::nowhere(&taken.name, timeout));
        }
        thread::sleep(Duration::from_millis(20));
    }
}
